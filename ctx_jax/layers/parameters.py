"""Parameters with logical axis names: what sharding, decay masks and parameter tables are derived from.

class Scale(nn.Module):
    width: int

    def setup(self):
        self.scale = parameter(self, "scale", nn.initializers.ones, (self.width,), ("norm",))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

AXES = frozenset(
    {
        "batch",
        "length",
        "activation",  # the width of activations: never split, so that LayerNorm stays local
        "vocabulary",
        "logits",  # the vocabulary of logits, whose rows are split where a table's vocabulary is
        "table",  # the width of embedding tables: never split
        "width",  # the width of kernels
        "heads",
        "channels",
        "feed_forward",
        "norm",  # LayerNorm gains and biases, biases of the model width
        "layers",
        "positions",
        "segments",
        "classes",
    }
)
"""Every logical axis; `parallel/sharding.py` maps each of them to mesh axes."""


class Named(struct.PyTreeNode, nn.meta.AxisMetadata):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A parameter in a box that carries the logical name of each of its axes; Linen unboxes it where it is used."""

    value: Any
    axes: tuple[str, ...] = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> Named:
        return self.replace(value=val)

    def add_axis(self, index: int, params: Any) -> Named:
        return self.replace(axes=(*self.axes[:index], "layers", *self.axes[index:]))

    def remove_axis(self, index: int, params: Any) -> Named:
        return self.replace(axes=(*self.axes[:index], *self.axes[index + 1 :]))


def parameter(
    module: nn.Module, name: str, init: Callable[..., jax.Array], shape: tuple[int, ...], axes: tuple[str, ...]
) -> jax.Array:
    """Declares a float32 parameter of `module` whose axes are named; to be called in `setup`."""
    if len(axes) != len(shape) or not AXES.issuperset(axes):
        raise ValueError(
            f"parameter {name!r} of shape {shape}: axes {axes} must name each dimension, from {sorted(AXES)}"
        )
    return module.param(name, lambda key: cast(Any, Named(init(key, shape, jnp.float32), axes)))


def is_named(leaf: Any) -> bool:
    return isinstance(leaf, Named)


def unboxed(tree: Any) -> Any:
    """The tree of plain arrays in a tree of `Named`."""
    return jax.tree.map(lambda box: box.value, tree, is_leaf=is_named)


def axes_of(tree: Any) -> Any:
    """The tree of axis names (a tuple of strings per parameter) in a tree of `Named`."""

    def names(path: Any, box: Any) -> tuple[str, ...]:
        if not isinstance(box, Named):
            raise TypeError(f"parameter {jax.tree_util.keystr(path)} has no axis names: declare it with parameter()")
        return box.axes

    return jax.tree_util.tree_map_with_path(names, tree, is_leaf=is_named)
