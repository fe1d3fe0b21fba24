"""Kernels for accelerators. Each has a twin of plain JAX in `layers`, which says what it computes and against which it
is tested; the layers ask here which of the two runs.

Where no kernel can run, the twin does, and the log says once why.
"""

from __future__ import annotations

import logging
import math

import jax
import jax.numpy as jnp

from ctx_jax.parallel.sharding import RULES

log = logging.getLogger(__name__)
_paths: dict[str, str] = {}  # what has been logged


def paths() -> dict[str, str]:
    """What runs for each operation that has been traced so far, and why it is no kernel if it is none."""
    return dict(_paths)


def chose(operation: str, path: str) -> None:
    """Logs which path an operation takes, when it changes."""
    if _paths.get(operation) != path:
        _paths[operation] = path
        log.info("%s: %s", operation, path)


def obstacle(query: jax.Array) -> str | None:
    """Why no GPU kernel takes this query [B, T, H, C]; None if one can."""
    if jax.default_backend() != "gpu":
        return f"no kernel for {jax.default_backend()}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{query.dtype} (the kernels take bfloat16: set model.dtype)"
    capability = jax.local_devices()[0].compute_capability
    if float(capability) < 8:
        return f"compute capability {capability} (the kernels need 8.0)"
    mesh = jax.sharding.get_abstract_mesh()
    for axis, size in (("batch", query.shape[0]), ("heads", query.shape[2])):
        shards = math.prod(mesh.shape[name] for name in RULES[axis] if name in mesh.shape)
        if size % shards:
            return f"{size} {axis} over {shards} devices"
    return None
