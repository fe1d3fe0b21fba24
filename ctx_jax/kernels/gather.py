"""A gather inside a Pallas kernel on a GPU: Triton has one (through shared memory), Pallas does not hand it on.

The one file that reaches behind JAX's public interface; `tests/kernels` names the versions that it was tried with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.triton import dialect
from jax._src.pallas.triton import lowering
from jax.extend.core import Primitive

gather = Primitive("triton_gather")


def take_along_axis(x: jax.Array, indices: jax.Array, axis: int, *, interpret: bool) -> jax.Array:
    """`jnp.take_along_axis` of a tile, [N, M] by int32 [N, M]; all indices must be inside."""
    if interpret:
        return jnp.take_along_axis(x, indices, axis)
    # over all elements at once: along one axis of two, Triton would rather shuffle inside its warps, which is slower
    other = jax.lax.broadcasted_iota(jnp.int32, indices.shape, 1 - axis)
    flat = other * x.shape[1] + indices if axis == 1 else indices * x.shape[1] + other
    return gather.bind(x.reshape(-1), flat.reshape(-1)).reshape(indices.shape)


@gather.def_abstract_eval
def _shape(x: Any, indices: Any) -> Any:
    return x.update(shape=indices.shape)


@lowering.register_lowering(gather)
def _lower(context: Any, x: Any, indices: Any) -> Any:
    del context
    kind = ir.RankedTensorType.get(ir.RankedTensorType(indices.type).shape, ir.RankedTensorType(x.type).element_type)
    return dialect.gather(x, indices, 0, efficient_layout=True, results=[kind])
