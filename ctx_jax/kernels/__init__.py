"""Kernels for accelerators. Each has a twin of plain JAX in `layers`, which says what it computes and against which it
is tested; the layers ask here which of the two runs.

Where no kernel can run, the twin does; a run says at its start which it was, and why.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ctx_jax.parallel.sharding import RULES

HEADS = ("batch", "", "heads")
"""Logical axes of queries, keys and values [B, T, H, C]."""

_paths: dict[str, str] = {}  # for people only: nothing depends on it


def paths() -> dict[str, str]:
    """What runs for each operation that has been traced so far, and why it is no kernel if it is none."""
    return dict(_paths)


def chose(operation: str, path: str) -> None:
    """Notes which path an operation takes."""
    _paths[operation] = path


def obstacle(x: jax.Array, axes: tuple[str, ...]) -> str | None:
    """Why no GPU kernel takes this operand; None if one can. `axes` are the logical ones that a mesh splits, one name
    for each axis of x, "" for those that stay whole."""
    if jax.default_backend() != "gpu":
        return f"no kernel for {jax.default_backend()}"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{x.dtype} (the kernels take bfloat16: set model.dtype)"
    device = jax.local_devices()[0]
    major = str(device.compute_capability).partition(".")[0]  # AMD's are names
    if not major.isdecimal() or int(major) < 8:
        return f"{device.device_kind} of compute capability {device.compute_capability} (the kernels need NVIDIA's 8.0)"
    return uneven(x, axes)


def uneven(x: jax.Array, axes: tuple[str, ...]) -> str | None:
    """Which axis of x does not divide evenly over the current mesh; None if all do."""
    for axis, size in zip(axes, x.shape, strict=False):
        if size % shards(axis):
            return f"the {axis} axis of {size} does not divide over {shards(axis)} devices"
    return None


def shards(axis: str) -> int:
    """Parts into which the current mesh splits a logical axis; 1 for "" and where no mesh is."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in RULES.get(axis, ()) if name in mesh.shape)
