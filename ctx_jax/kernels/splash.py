"""JAX's splash attention for TPUs (Pallas): attention that skips the blocks of its mask that nobody sees.

It takes the documents of a row as they are. It has no dropout, so that attention with dropout is the twin's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as shapes
from jax.sharding import PartitionSpec as P

from ctx_jax import kernels
from ctx_jax.parallel.sharding import RULES

LANES = 128
"""Lengths and channels are padded to multiples of it."""


def obstacle(query: jax.Array, key: jax.Array, random: bool) -> str | None:
    """Why the twin has to do it; None if nothing stands in the way. `random`: whether there is dropout."""
    if jax.default_backend() != "tpu":
        return f"no kernel for {jax.default_backend()}"
    if random:
        return "dropout (the kernel has none)"
    if query.shape[1] != key.shape[1] or query.shape[1] < LANES:
        return f"{query.shape[1]} queries of {key.shape[1]} keys (the kernel takes as many, {LANES} or more)"
    return kernels.uneven(query, kernels.HEADS)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array,
    *,
    causal: bool,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """query, key, value [B, T, H, C], documents [B, T] -> [B, T, H, C], over the current mesh: what
    `layers.attention.attention` returns first. Padding gives what it would give as a document."""
    length, channels = query.shape[1], query.shape[3]
    t, c = (-(-size // LANES) * LANES for size in (length, channels))
    query = query * channels**-0.5

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array) -> jax.Array:
        if causal and window is not None:
            mask: shapes.Mask = shapes.LocalMask((t, t), (window - 1, 0), 0)
        else:
            mask = shapes.CausalMask((t, t)) if causal else shapes.FullMask((t, t))
        block = next(size for size in (512, 256, LANES) if t % size == 0)
        kernel: Any = splash.make_splash_mha(
            shapes.MultiHeadMask([mask] * query.shape[2]),
            block_sizes=splash.BlockSizes(
                block_q=block,
                block_kv=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )

        def row(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
            return kernel(query, key, value, segment_ids=splash.SegmentIds(ids, ids))

        def wide(x: jax.Array) -> jax.Array:
            return jnp.pad(x, ((0, 0), (0, t - length), (0, 0), (0, c - channels))).swapaxes(1, 2)

        ids = jnp.pad(documents, ((0, 0), (0, t - length)))
        return jax.vmap(row)(wide(query), wide(key), wide(value), ids).swapaxes(1, 2)[:, :length, :, :channels]

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend(query, key, value, documents)
    array, row = P(RULES["batch"], None, RULES["heads"]), P(RULES["batch"])
    split = jax.shard_map(attend, mesh=mesh, in_specs=(array, array, array, row), out_specs=array, check_vma=False)
    return split(query, key, value, documents)
