"""Which blocks of queries and keys meet, for `kernels.flash`: who sees whom as one range of codes for each query."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ctx_jax.kernels import tiles
from ctx_jax.kernels.tiles import NOTHING, Facts, Part
from ctx_jax.layers.masks import Visibility

RANKS = 2**15
"""A key's code is RANKS times the number of its document plus its rank: who sees whom is one range of codes."""


def codes(visibility: Visibility) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The keys' codes [B, S] and the queries' lowest and highest [B, T], for up to RANKS keys.

    A document's number is where its first key stands, so that blocks of keys have narrow ranges of codes. Ranks from 0
    to RANKS - 3 count; whatever is below 0 is one rank below them all.
    """
    documents = visibility.key_documents

    def number(x: jax.Array) -> jax.Array:
        same = (x[:, :, None] == documents[:, None, :]) & (documents != 0)[:, None, :]
        return jnp.where(same.any(-1), jnp.argmax(same, -1), -1).astype(jnp.int32)

    def code(number: jax.Array, rank: jax.Array) -> jax.Array:
        return number * RANKS + jnp.clip(rank, -1, RANKS - 2) + 1

    own, other = number(visibility.query_documents), number(documents)
    key = jnp.where(other < 0, -1, code(other, visibility.key_ranks))
    lowest = jnp.where(own < 0, 1, code(own, visibility.lowest))
    return key, lowest, jnp.where(own < 0, 0, code(own, visibility.highest))


def padded(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """x with `value` appended along an axis up to the size."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def in_blocks(x: jax.Array, parts: Sequence[Part], value: int = 0) -> jax.Array:
    """[..., places] -> [..., blocks]: with each part's last block filled up."""
    if not any(part.short for part in parts[:-1]):  # nothing moves
        return padded(x, -1, parts[-1].end * tiles.BLOCK, value)
    pieces = [x[..., part.first : part.first + part.size] for part in parts]
    sizes = [(part.end - part.block) * tiles.BLOCK for part in parts]
    return jnp.concatenate([padded(piece, -1, n, value) for piece, n in zip(pieces, sizes, strict=True)], -1)


def bounds(facts: Facts, parts: Sequence[Part]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each block of queries the first block of keys that it meets and the one after the last, [B, T / BLOCK, 2],
    and for each block of keys the blocks of each part's queries that meet it, [B, S / BLOCK, 2 parts]: all that see
    each other, and what lies between.

    Also [B, T / BLOCK, S / BLOCK] int32, 1 where all of a block of queries see all of a block of keys.
    """
    lowest, code = facts.query[:, 0], facts.key[:, 0]
    highest = lowest + facts.query[:, 1]

    def extreme(x: jax.Array, real: jax.Array, least: bool) -> jax.Array:
        x, real = (y.reshape(len(y), -1, tiles.BLOCK) for y in (x, real))
        return jnp.where(real, x, 2**30).min(-1) if least else jnp.where(real, x, -(2**30)).max(-1)

    real, key_real = lowest != NOTHING, code >= 0
    every, key_every = jnp.ones_like(real), jnp.ones_like(key_real)
    sees = extreme(lowest, real, True)[:, :, None] <= extreme(code, key_real, False)[:, None, :]
    sees &= extreme(highest, real, False)[:, :, None] >= extreme(code, key_real, True)[:, None, :]

    def ends(sees: jax.Array, first: int = 0) -> jax.Array:
        end = jnp.where(sees.any(-1), sees.shape[-1] - jnp.argmax(sees[..., ::-1], -1), 0)
        return first + jnp.stack([jnp.argmax(sees, -1), end], -1).astype(jnp.int32)

    blocks = ends(sees)
    j = jnp.arange(sees.shape[2])
    met = ((blocks[..., :1] <= j) & (j < blocks[..., 1:])).swapaxes(1, 2)
    of_keys = jnp.concatenate([ends(met[..., part.block : part.end], part.block) for part in parts], -1)
    whole = extreme(lowest, every, False)[:, :, None] <= extreme(code, key_every, True)[:, None, :]
    whole &= extreme(highest, every, True)[:, :, None] >= extreme(code, key_every, False)[:, None, :]
    return blocks, of_keys, whole.astype(jnp.int32)


def spans(blocks: jax.Array, parts: Sequence[Part], most: int) -> jax.Array:
    """The blocks of keys that the queries of a program with distances meet, [B, T / BLOCK, 2]; `most` as for
    `tiles.stride`."""
    spans = []
    for part in parts:
        step = tiles.stride(part, most)
        own = blocks[:, part.block : part.end].reshape(len(blocks), -1, step, 2)
        some = own[..., 0] < own[..., 1]
        first, end = jnp.where(some, own[..., 0], 2**30).min(-1), jnp.where(some, own[..., 1], 0).max(-1)
        spans.append(jnp.repeat(jnp.stack([jnp.minimum(first, end), end], -1), step, axis=1))
    return jnp.concatenate(spans, 1)
