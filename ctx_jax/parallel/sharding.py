"""Logical axis -> mesh axes: one table, from which every parameter and activation sharding follows."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "vocabulary": ("tensor", "fsdp"),
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
    """Pins an activation to the mesh that `jax.set_mesh` made current; nothing outside one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.ndim != len(axes):
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))
