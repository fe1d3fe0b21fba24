"""Who may attend to whom: boolean masks [B, 1, T, S] (or [1, 1, T, S]), True where the query sees the key.

Masks are combined with `&`. None of them depends on the width of the head axis, which is 1 and broadcasts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax


def same_document(query: jax.Array, key: jax.Array) -> jax.Array:
    """Packing ids [B, T] and [B, S] -> [B, 1, T, S]: keys of the query's own document, and never padding (id 0)."""
    return ((query[:, :, None] == key[:, None, :]) & (key != 0)[:, None, :])[:, None]


def within(ranks: jax.Array, lowest: jax.Array | None, highest: jax.Array) -> jax.Array:
    """Keys' ranks [B or 1, S] and each query's bounds [B or 1, T] -> [B or 1, 1, T, S]: lowest <= rank <= highest.

    Ranks are places in the window, or in a factorisation order (Yang et al. 2019, section 2.2): there the context that
    everybody sees has one rank, below the targets'; the content stream sees up to its own rank, the query stream, which
    must not see what it predicts, up to the rank before.
    """
    ranks = ranks[:, None, None, :]
    allowed = ranks <= highest[:, None, :, None]
    return allowed if lowest is None else allowed & (ranks >= lowest[:, None, :, None])


def causal(query: jax.Array, key: jax.Array, window: int | None = None) -> jax.Array:
    """Places [B or 1, T] and [B or 1, S] -> [B or 1, 1, T, S]: keys not after the query.

    With `window`, only the nearest `window` of them, the query's own place included: the local band of GPT-3, and
    Transformer-XL's `same_length` (every query has as many keys as the memory is long).
    """
    return within(key, None if window is None else query - (window - 1), query)


class Visibility(NamedTuple):
    """Who sees whom: a query sees the keys of its own document (never padding, id 0) whose rank lies within its bounds.

    Ranks are places in the window where attention is causal, places in the factorisation order where it is permuted,
    and all equal where it is bidirectional. All int32; ranks and bounds broadcast.
    """

    query_documents: jax.Array
    """[B, T]"""
    key_documents: jax.Array
    """[B, S]"""
    key_ranks: jax.Array
    """[B, S]"""
    lowest: jax.Array
    """[B, T]: the lowest rank that the query sees."""
    highest: jax.Array
    """[B, T]: the highest."""

    def mask(self) -> jax.Array:
        """[B, 1, T, S] bool."""
        ranked = within(self.key_ranks, self.lowest, self.highest)
        return same_document(self.query_documents, self.key_documents) & ranked


class Segments(NamedTuple):
    """XLNet's relative segment encoding: a key counts as of the query's segment or of another one."""

    query: jax.Array
    """[B, T] int32"""
    key: jax.Array
    """[B, S] int32"""
    embedding: jax.Array
    """[2, H, C]: the same segment, another one."""
    bias: jax.Array
    """[H, C]: w."""
