"""cuDNN's attention for GPUs, for rows that are one document and then padding.

`jax.nn.dot_product_attention` hands on all of it that is used here; what JAX keeps for itself, its dropout, has a seed
that is fixed at compilation, so that every step would drop the same: attention with dropout is `kernels.flash`'s.
"""

from __future__ import annotations

import jax


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, *, causal: bool, window: int | None
) -> jax.Array:
    """query, key, value [B, T, H, C]; each row's first `lengths` [B] places are its document -> [B, T, H, C]."""
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
