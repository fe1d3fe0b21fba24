"""One vector for a row, or one for each of its words, of a model's hidden states."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

Pooling = Literal["mean", "first", "last", "max", "pooled", "word", "none"]
"""pooled is the model's own vector, which is not made here; the others as `pooled` says."""


def pooled(hidden: jax.Array, real: jax.Array, words: jax.Array, how: Pooling) -> jax.Array:
    """hidden [B, T, D] of the positions that are `real` [B, T], with the number of each one's word [B, T] -> [B, D]:
    the mean, the first, the last or, by channel, the largest of the row; or [B, T, D] where `how` is none (as they are)
    or word (a row's first vectors are the means of its words)."""
    places = jnp.arange(hidden.shape[1])
    match how:
        case "mean":
            total = jnp.sum(jnp.where(real[..., None], hidden, 0), axis=1)
            return total / jnp.maximum(real.sum(1, keepdims=True), 1)  # a row of padding has none
        case "word":
            return jax.vmap(word_means)(hidden, words)
        case "max":
            largest = jnp.where(real[..., None], hidden, -jnp.inf).max(1)
            return jnp.where(real.any(1, keepdims=True), largest, 0)
        case "first":
            place = jnp.argmax(real, axis=1)
        case "last":
            place = jnp.max(jnp.where(real, places, 0), axis=1)
        case _:
            return hidden
    return jnp.take_along_axis(hidden, place[:, None, None], axis=1)[:, 0]


def word_means(hidden: jax.Array, words: jax.Array) -> jax.Array:
    """hidden [T, D], number of each position's word from 1 (0 = none) [T] -> [T, D]: the words' means, then zeros."""
    count = len(words) + 1
    total = jax.ops.segment_sum(hidden, words, count)
    tokens = jax.ops.segment_sum(jnp.ones_like(words), words, count)
    return (total / jnp.maximum(tokens, 1)[:, None])[1:]
