"""cuDNN's causal attention for GPUs, for rows that are one document: what comes after it, padding, is then never seen.

JAX hands on more of cuDNN than is used here. Its dropout has a seed that is fixed at compilation, so that every step
would drop the same; with lengths of rows, the graph of the backward pass failed to load (jax 0.11.2, cuDNN of CUDA 13):
both are `kernels.flash`'s.
"""

from __future__ import annotations

import jax


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """query, key, value [B, T, H, C] -> [B, T, H, C]."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
