"""Embedding tables."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.layers.parameters import parameter


def padded(vocabulary_size: int, multiple: int) -> int:
    """Rows of a table whose size is a multiple of `multiple`; those past `vocabulary_size` are never predicted."""
    return -(-vocabulary_size // multiple) * multiple


def in_dtype(x: jax.Array, dtype: str) -> jax.Array:
    """x in a config's compute dtype: "bfloat16", or "float32" for the parameters' own (float64 in tests)."""
    return x.astype(jnp.bfloat16) if dtype == "bfloat16" else x


class Embedding(nn.Module):
    """One vector for each of `size` ids."""

    size: int
    width: int
    embedding_init: Callable[..., jax.Array]
    axes: tuple[str, str] = ("vocabulary", "table")
    """Names of the table's axes; the other tables have ("positions", "table") and ("segments", "table")."""

    def setup(self) -> None:
        self.embedding = parameter(self, "embedding", self.embedding_init, (self.size, self.width), self.axes)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[...] int -> [..., width] in fp32; NaN where an id is outside of the table, so that it cannot pass unseen.

        The table itself, for tied logits, is `.embedding`.
        """
        rows = jnp.take(self.embedding, ids, axis=0, mode="fill")
        return rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
