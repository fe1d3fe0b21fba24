"""Logical axis -> mesh axes: one table, from which every parameter, state and activation sharding follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ctx_jax.layers.parameters import AXES
from ctx_jax.parallel.mesh import AnyMesh
from ctx_jax.serialization import nearest

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "vocabulary": ("tensor", "fsdp"),
    "logits": ("tensor",),
    "width": ("fsdp",),
    "heads": ("tensor",),
    "feed_forward": ("tensor",),
    "length": (),
    "activation": (),
    "table": (),
    "channels": (),
    "norm": (),
    "layers": (),
    "positions": (),
    "segments": (),
    "classes": (),
}
"""Mesh axes of each logical axis of `layers.parameters.AXES`; () = whole on every device."""

MESH_AXES = ("data", "fsdp", "tensor")
"""What a rule may name; the last two split parameters."""

WHOLE = frozenset({"norm", "positions", "segments", "classes"})
"""Axes whose tensors are meant to be whole on every device, up to LARGE parameters each: vectors, and short tables."""

SMALL, LARGE = 2**16, 2**22
"""Parameters (256 KiB and 16 MiB) of a tensor that may be whole whatever its axes, and of one that is WHOLE."""

TOLERATED = 0.02
"""The part of a model's parameters that may be whole by accident on a mesh that could split them."""


def spec(axes: tuple[str, ...]) -> PartitionSpec:
    """The partition of an array whose axes carry these logical names."""
    return PartitionSpec(*(RULES[axis] or None for axis in axes))


def constrain(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Pins an activation to the mesh that the train step (or `jax.set_mesh`) made current; nothing outside one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.ndim != len(axes):
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))


def over_rows(function: Callable[[Any, Any], Any], rows: Any, others: Any) -> Any:
    """function(rows, others) on each device's part of the rows, the first axis of all arrays in `rows` and of all that
    it returns; the others are whole. For what the compiler cannot split by itself: kernels."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(rows, others)
    split = spec(("batch",))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split, check_vma=False)
    return mapped(rows, others)


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Rows (the first axis) over data and fsdp: batches and memory."""
    return NamedSharding(mesh, spec(("batch",)))


def parameter_name(path: Any) -> str:
    """A parameter's path in its tree, as "encoder/layers/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parameter_shardings(mesh: AnyMesh, shapes: Any, axes: Any) -> Any:
    """The sharding of each parameter.

    Args:
        shapes: tree of arrays or their shapes (`layers.parameters.unboxed`).
        axes: the same tree of axis names (`layers.parameters.axes_of`).

    Raises ValueError, naming the tensor, for an axis without a rule, one that does not divide evenly over its mesh
    axes, two axes of one tensor that claim the same mesh axis, and what `check_replication` refuses: nothing is
    replicated silently.
    """
    check_rules()

    def sharding(path: Any, leaf: Any, names: tuple[str, ...]) -> NamedSharding:
        claimed: dict[str, str] = {}
        for name, size in zip(names, leaf.shape, strict=True):
            if name not in RULES:
                raise ValueError(
                    f"parameter {parameter_name(path)} {leaf.shape}: no rule says how its axis {name!r} is split"
                    f"{nearest(name, list(RULES))}; there are rules for {', '.join(RULES)}"
                )
            used = tuple(axis for axis in RULES[name] if mesh.shape[axis] > 1)
            parts = math.prod(mesh.shape[axis] for axis in used)
            if size % parts:
                described = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in used)
                raise ValueError(
                    f"parameter {parameter_name(path)} {leaf.shape}: its axis {name!r} of {size} does not divide over "
                    f"the mesh's {described}: choose a multiple of {parts} (vocabulary_multiple pads tables) or a "
                    "smaller mesh axis"
                )
            for axis in used:
                if axis in claimed:
                    raise ValueError(
                        f"parameter {parameter_name(path)} {leaf.shape}: its axes {claimed[axis]!r} and {name!r} both "
                        f"claim mesh axis {axis!r}: name one of them differently"
                    )
                claimed[axis] = name
        return NamedSharding(mesh, spec(names))

    shardings = jax.tree_util.tree_map_with_path(sharding, shapes, axes)
    check_replication(mesh, shapes, axes)
    return shardings


def check_rules() -> None:
    """Raises ValueError if there is a rule for an axis that nothing can have, an axis without a rule, or a rule that
    names no axis of a mesh: each of them would match nothing."""
    for name in sorted(RULES.keys() ^ AXES):
        if name in AXES:
            raise ValueError(f"axis {name!r} of layers.parameters.AXES has no rule in parallel.sharding.RULES: add one")
        raise ValueError(
            f"the rule for {name!r} in parallel.sharding.RULES matches nothing: layers.parameters.AXES has no such "
            f"axis{nearest(name, sorted(AXES))}"
        )
    for name, used in RULES.items():
        for axis in used:
            if axis not in MESH_AXES:
                raise ValueError(
                    f"the rule for {name!r} in parallel.sharding.RULES names {axis!r}, which is no axis of a mesh"
                    f"{nearest(axis, list(MESH_AXES))}; there are {', '.join(MESH_AXES)}"
                )


def check_replication(mesh: AnyMesh, shapes: Any, axes: Any) -> None:
    """Raises ValueError if fsdp or tensor splits no parameter at all, or if more than TOLERATED of the parameters are
    whole by accident.

    A tensor is whole by accident if no rule splits any of its axes over fsdp or tensor, of which one is larger than 1;
    except small ones, and those of at most LARGE parameters that have an axis in WHOLE. Arguments as
    `parameter_shardings`.
    """
    splitting = {axis: mesh.shape[axis] for axis in MESH_AXES[1:] if mesh.shape[axis] > 1}
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    names = jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    tensors = [
        (math.prod(leaf.shape), f"{parameter_name(path)} {leaf.shape}", held)
        for (path, leaf), held in zip(leaves, names, strict=True)
    ]
    if not splitting or not tensors:
        return
    split = [{axis for name in held for axis in RULES[name] if axis in splitting} for _, _, held in tensors]
    for axis, parts in splitting.items():
        if not any(axis in used for used in split):
            raise ValueError(
                f"mesh axis {axis} {parts} splits no parameter, not even {max(tensors)[1]}: set mesh.{axis} to 1, or "
                "name an axis that parallel.sharding.RULES splits over it"
            )
    whole = [
        tensor
        for tensor, used in zip(tensors, split, strict=True)
        if not used and tensor[0] > (SMALL if WHOLE.isdisjoint(tensor[2]) else LARGE)
    ]
    count, total = (sum(size for size, _, _ in group) for group in (whole, tensors))
    if count > TOLERATED * total:
        _, tensor, held = max(whole)
        described = " x ".join(f"{axis} {parts}" for axis, parts in splitting.items())
        raise ValueError(
            f"parameter {tensor} is whole on every device of a mesh of {described}, and tensors like it hold "
            f"{count / total:.1%} of all parameters: no rule of parallel.sharding.RULES splits its axes "
            f"{', '.join(held)} there; name one that is split, or choose another mesh"
        )


def like_parameters(mesh: AnyMesh, tree: Any, shapes: Any, shardings: Any) -> Any:
    """Shardings of a tree that repeats the parameters' tree within its own, as optimizer states do.

    A leaf whose path contains a parameter's path and which has its shape (a moment, an average) is sharded like it.
    The rest is whole on every device: counters, and Adafactor's row and column statistics, which are as small as the
    sides of their matrix.
    """
    parameters = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True
        )
    }

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        for length in range(len(path), 0, -1):
            for start in range(len(path) - length + 1):
                shape, found = parameters.get(path[start : start + length], (None, None))
                if found is not None and shape == leaf.shape:
                    return found
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding, tree)
