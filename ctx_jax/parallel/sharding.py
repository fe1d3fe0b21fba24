"""Logical axis -> mesh axes: one table, from which every parameter, state and activation sharding follows."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

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


def spec(axes: tuple[str, ...]) -> PartitionSpec:
    """The partition of an array whose axes carry these logical names."""
    return PartitionSpec(*(RULES[axis] or None for axis in axes))


def constrain(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Pins an activation to the mesh that the train step (or `jax.set_mesh`) made current; nothing outside one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.ndim != len(axes):
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows (the first axis) over data and fsdp: batches and memory."""
    return NamedSharding(mesh, spec(("batch",)))


def parameter_name(path: Any) -> str:
    """A parameter's path in its tree, as "encoder/layers/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parameter_shardings(mesh: jax.sharding.Mesh, shapes: Any, axes: Any) -> Any:
    """The sharding of each parameter.

    Args:
        shapes: tree of arrays or their shapes (`layers.parameters.unboxed`).
        axes: the same tree of axis names (`layers.parameters.axes_of`).

    Raises ValueError, naming the tensor, for an axis that does not divide evenly over its mesh axes, and for two axes
    of one tensor that claim the same mesh axis: nothing is replicated silently.
    """

    def sharding(path: Any, leaf: Any, names: tuple[str, ...]) -> NamedSharding:
        claimed: dict[str, str] = {}
        for name, size in zip(names, leaf.shape, strict=True):
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

    return jax.tree_util.tree_map_with_path(sharding, shapes, axes)


def like_parameters(mesh: jax.sharding.Mesh, tree: Any, shapes: Any, shardings: Any) -> Any:
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
