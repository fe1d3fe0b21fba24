"""Which blocks of queries and keys meet, for `kernels.flash`: who sees whom as one range of codes for each query."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ctx_jax.kernels import tiles
from ctx_jax.kernels.tiles import NOTHING, Facts, Part, Settings
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
        count = documents.shape[1]
        places = jnp.arange(count, dtype=jnp.int32)
        first = jnp.where(same, places, count).min(-1)  # by argmax, which carries two numbers, it takes twice as long
        return jnp.where(first == count, -1, first)

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


def bounds(facts: Facts, parts: Sequence[Part]) -> tuple[jax.Array, jax.Array]:
    """For each block of queries the first block of keys that it meets and the one after the last: all that see each
    other, and what lies between; and then the same two of the first blocks in a row where all see all,
    [B, T / BLOCK, 4].

    For each block of keys the same of each part's queries, [B, S / BLOCK, 4 parts].
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

    whole = extreme(lowest, every, False)[:, :, None] <= extreme(code, key_every, True)[:, None, :]
    whole &= extreme(highest, every, True)[:, :, None] >= extreme(code, key_every, False)[:, None, :]

    def ends(sees: jax.Array, whole: jax.Array, first: int = 0) -> jax.Array:
        count = sees.shape[-1]
        end = jnp.where(sees.any(-1), count - jnp.argmax(sees[..., ::-1], -1), 0)
        start = jnp.argmax(whole, -1)
        broken = ~whole & (jnp.arange(count) >= start[..., None])
        stop = jnp.where(broken.any(-1), jnp.argmax(broken, -1), count)
        return first + jnp.stack([jnp.argmax(sees, -1), end, start, stop], -1).astype(jnp.int32)

    blocks = ends(sees, whole)
    j = jnp.arange(sees.shape[2])
    met = (blocks[..., :1] <= j) & (j < blocks[..., 1:2])
    met, whole = met.swapaxes(1, 2), whole.swapaxes(1, 2)
    of_keys = [
        ends(met[..., own], whole[..., own], own.start) for own in (slice(part.block, part.end) for part in parts)
    ]
    return blocks, jnp.concatenate(of_keys, -1)


def beyond(blocks: jax.Array, settings: Settings) -> jax.Array:
    """Of `bounds`' blocks of keys [B, T / BLOCK, 4], those with any key nearer than the clamp to any of the queries."""
    assert settings.clamp is not None  # the caller knows
    places = settings.keys.size - settings.queries[0].size + tiles.BLOCK * jnp.arange(blocks.shape[1])
    far = jnp.maximum(places + 1 - settings.clamp, 0) // tiles.BLOCK
    return blocks.at[..., 0].set(jnp.clip(far, blocks[..., 0], blocks[..., 1]))


def spans(blocks: jax.Array, parts: Sequence[Part], most: int) -> jax.Array:
    """What the queries of a program with distances meet, [B, T / BLOCK, 4]: the first block of keys and the one after
    the last; and both less the number of a query's own block in its program, as distances go. `most` as for
    `tiles.stride`."""
    spans = []
    for part in parts:
        step = tiles.stride(part, most)
        own = blocks[:, part.block : part.end, :2].reshape(len(blocks), -1, step, 2)
        some = own[..., :1] < own[..., 1:]
        both = jnp.concatenate([own, own - jnp.arange(step)[:, None]], -1)
        first, end = jnp.where(some, both[..., ::2], 2**30), jnp.where(some, both[..., 1::2], -(2**30))
        ends = jnp.stack([first.min(2), end.max(2)], -1).reshape(len(blocks), -1, 4)
        spans.append(jnp.repeat(jnp.where(some.any(2), ends, 0), step, axis=1))
    return jnp.concatenate(spans, 1)
