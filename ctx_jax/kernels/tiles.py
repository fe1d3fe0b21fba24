"""The tiles of `kernels.flash`: blocks of queries and keys, and what `kernels.programs` does with one.

The shift of the position term (Dai et al. 2019, appendix B) is the difficulty: a tile of queries and keys needs other
distances in each row, and registers cannot be read with an offset that depends on the row. Memory can: products of
queries with blocks of distances are written to where their keys are, once, and every tile reads the term in its place;
in the backward pass the gradients of the scores are written by key and read by distance.

Written so, rows that are one place apart would start anywhere, and go to memory by two bytes. A program that takes
every STRIDE-th row writes rows that are STRIDE keys apart: sixteen bytes at once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ctx_jax.layers.dropout import keep

BLOCK = 64
"""Queries and keys of a tile."""
NOTHING = -(2**31)
"""Lowest code of a query that sees nothing."""
STRIDE = 8
"""Keys that go to memory together, in whole blocks of rows; a power of two."""
LOG2E = math.log2(math.e)
"""For powers of two: an exponential takes many instructions, a power of two one."""
UNIT = 16.0
"""In this unit, a power of two, a position term goes through float16, which ends at 65,504."""
HIDDEN, LOWEST = -1e30, -1e20
"""Score of what is not seen, and where a row's running maximum starts: below it, so that nothing seen sums to 0."""


class Part(NamedTuple):
    """Places that are handled in blocks of their own, the last of which may be short. All of it is known when the
    kernels are compiled."""

    first: int
    """The first place."""
    size: int
    block: int = 0
    """The number of the first block."""
    consecutive: bool = True
    """Whether they are the last of all places; if not, they may be any."""

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK)

    @property
    def end(self) -> int:
        """The number after the last block's."""
        return self.block + self.blocks

    @property
    def short(self) -> bool:
        return self.size % BLOCK > 0

    def places(self, block: Any) -> jax.Array:
        """Of a block, those that are not there included."""
        return self.first + (block - self.block) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)

    def read(self, array: Any, b: Any, block: Any, h: Any) -> jax.Array:
        """A block of [B, places, H, C]; what is not there repeats the last one."""
        if self.short:
            return array[b, jnp.minimum(self.places(block), self.first + self.size - 1), h, :]
        return array[b, pl.ds(self.first + (block - self.block) * BLOCK, BLOCK), h, :]

    def write(self, array: Any, b: Any, block: Any, h: Any, x: jax.Array) -> None:
        x = x.astype(array.dtype)
        if self.short:
            places = jnp.broadcast_to(self.places(block)[:, None], x.shape)
            channels = jnp.broadcast_to(jnp.arange(x.shape[1])[None, :], x.shape)
            plgpu.store(array.at[b, places, h, channels], x, mask=places < self.first + self.size)
        else:
            array[b, pl.ds(self.first + (block - self.block) * BLOCK, BLOCK), h, :] = x


class PositionTerm(NamedTuple):
    """What the kernels read of the position term."""

    shift: jax.Array
    """[H, C]: what turns content queries into those of the position term, v - u."""
    relative: jax.Array
    """[N, P, H, C], by descending distance from S - 1 on."""
    direction: jax.Array
    """[B] int32: which of the N a row goes by."""
    offsets: jax.Array
    """[B, blocks of queries] int32: the number of a query's distance to the first key, S - 1 less its place."""


class SegmentTerm(NamedTuple):
    """The segment term: what a key of a query's own segment has more than another."""

    shift: jax.Array
    """[H, C]: what turns content queries into those of this term, w - u."""
    same: jax.Array
    """[H, C]"""


class Facts(NamedTuple):
    """What the mask, the segment term and dropout depend on, in whole blocks; no gradient."""

    query: jax.Array
    """[B, 3, T] int32: lowest code that is seen, how far the highest is from it, segment."""
    key: jax.Array
    """[B, 2, S] int32: code, segment."""
    states: jax.Array | None
    """[B, H, T] uint32: stirred numbers of the rows of scores; None = no dropout."""
    columns: jax.Array | None
    """[S] uint32: mixed numbers of the keys; None = no dropout."""


class Settings(NamedTuple):
    """What is fixed when the kernels are compiled."""

    natural: float
    """Of the scores: 1 / sqrt(C)."""
    rate: float
    queries: tuple[Part, ...]
    """Those that are the last places, if there are any, and then those at any place."""
    keys: Part
    interpret: bool

    @property
    def scale(self) -> float:
        """Turns scores into exponents of 2."""
        return self.natural * LOG2E

    @property
    def kept(self) -> float:
        """What is not dropped out is multiplied by this."""
        return 1.0 / (1.0 - self.rate)


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Summed in fp32."""
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def unknown_zero(x: jax.Array) -> jax.Array:
    """Zeros of which the compiler does not know that they are: with known ones it would convert to bf16 before it
    chooses between them and something else, which takes twice the instructions."""
    return x * 0.0


class Tile:
    """One tile of scores: [queries, keys], or the other way round if `turned`, so that a product with it needs no
    transposition."""

    def __init__(self, facts: Any, b: Any, h: Any, settings: Settings, *, turned: bool) -> None:
        """`facts` are those of `Facts` and, [B, T / BLOCK, S / BLOCK] int32, 1 where all queries of a block see all
        keys of the other."""
        self.query_facts, self.key_facts, self.states, self.columns, self.whole = facts
        self.b, self.h, self.settings, self.turned = b, h, settings, turned
        self.iota = jnp.arange(BLOCK, dtype=jnp.int32)

    def by_query(self, x: jax.Array) -> jax.Array:
        return x[None, :] if self.turned else x[:, None]

    def by_key(self, x: jax.Array) -> jax.Array:
        return x[:, None] if self.turned else x[None, :]

    def dot(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """[BLOCK, C] twice -> the tile of their products, fp32."""
        return dot(key, query.T) if self.turned else dot(query, key.T)

    def query_fact(self, index: int, block: Any) -> jax.Array:
        return self.query_facts[self.b, index, pl.ds(block * BLOCK, BLOCK)]

    def key_fact(self, index: int, block: Any) -> jax.Array:
        return self.key_facts[self.b, index, pl.ds(block * BLOCK, BLOCK)]

    def same_segment(self, i: Any, j: Any) -> jax.Array:
        return self.by_query(self.query_fact(2, i)) == self.by_key(self.key_fact(1, j))

    def scores(
        self,
        content: jax.Array,
        position: jax.Array | None,
        gate: jax.Array | None,
        seen: tuple[jax.Array, jax.Array] | None,
        i: Any,
        j: Any,
    ) -> jax.Array:
        """Scores, not yet scaled, with HIDDEN where the mask is; `seen` are the queries' ranges of codes, None = read
        them where a tile needs them."""
        scores = content if position is None else content + position
        if gate is not None:
            scores += jnp.where(self.same_segment(i, j), self.by_query(gate), 0.0)

        def masked(scores: jax.Array) -> jax.Array:
            lowest, reach = self.seen(i) if seen is None else seen
            above = self.by_key(self.key_fact(0, j)) - self.by_query(lowest)
            inside = above.astype(jnp.uint32) <= self.by_query(reach).astype(jnp.uint32)  # 0 <= above <= reach
            return jnp.where(inside, scores, HIDDEN)

        return jax.lax.cond(self.whole[self.b, i, j] != 0, lambda x: x, masked, scores)

    def term(self, scores: Any, i: Any, j: Any) -> jax.Array:
        """The position term, fp32, as `scores_kernel` wrote it."""
        term = scores[self.h, self.b, pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)]
        return (term.T if self.turned else term).astype(jnp.float32) * UNIT

    def seen(self, i: Any) -> tuple[jax.Array, jax.Array]:
        return self.query_fact(0, i), self.query_fact(1, i)

    def row_states(self, i: Any) -> jax.Array | None:
        return None if self.states is None else self.states[self.b, self.h, pl.ds(i * BLOCK, BLOCK)]

    def dropout(self, x: jax.Array, dropped: jax.Array, rows: jax.Array | None, j: Any) -> jax.Array:
        """A tile with `dropped` in place of what dropout takes; `rows` are `row_states`."""
        if rows is None:
            return x
        columns = self.columns[pl.ds(j * BLOCK, BLOCK)]
        return jnp.where(keep(self.by_query(rows), self.by_key(columns), self.settings.rate), x, dropped)


class Distances:
    """The position term of a tile's queries."""

    def __init__(self, tile: Tile, term: PositionTerm) -> None:
        self.tile, self.term = tile, term

    def query(self, content: jax.Array) -> jax.Array:
        """Queries of the position term in UNIT, from those of the content term."""
        shift = self.term.shift[self.tile.h, :].astype(jnp.float32)
        return ((content.astype(jnp.float32) + shift[None, :]) / UNIT).astype(content.dtype)

    def relative(self, start: Any) -> jax.Array:
        """The keys of a block of distances, [BLOCK, C]; what is not there belongs to keys that are not seen."""
        rows = jnp.clip(start + self.tile.iota, 0, self.term.relative.shape[1] - 1)
        return self.term.relative[self.term.direction[self.tile.b], rows, self.tile.h, :]

    def offsets(self, i: Any) -> jax.Array:
        return self.term.offsets[self.tile.b, pl.ds(i * BLOCK, BLOCK)]

    def blocks(self, offsets: jax.Array, first: Any, end: Any) -> tuple[Any, Any]:
        """The first and the one after the last block of distances that queries of these offsets meet in keys from block
        `first` to before block `end`."""
        least, most = offsets.min() + first * BLOCK, offsets.max() + end * BLOCK - 1
        return least // BLOCK, jnp.where(first < end, most // BLOCK + 1, 0)

    def pairs(self, array: Any, i: Any, offsets: jax.Array, block: Any, first: Any, end: Any) -> jax.Array:
        """Of an array of all pairs [H, B, T, S]: those of query block i, of these offsets, with the keys at a block of
        distances, 0 where that is no key from block `first` to before block `end`."""
        keys = (block * BLOCK + self.tile.iota)[None, :] - offsets[:, None]
        rows = jnp.broadcast_to((i * BLOCK + self.tile.iota)[:, None], keys.shape)
        inside = (keys >= first * BLOCK) & (keys < end * BLOCK)
        return plgpu.load(array.at[self.tile.h, self.tile.b, rows, keys], mask=inside, other=0.0)


def stride(part: Part) -> int:
    """How many rows apart those are that a program of `scores_kernel` takes."""
    return max(1, min(STRIDE, 1 << (part.blocks.bit_length() - 1)))


def strided_programs(part: Part) -> int:
    """Of `scores_kernel`, for consecutive queries."""
    return -(-part.blocks // stride(part)) * stride(part)


def narrow(dtype: Any) -> Any:
    """In which position terms are kept: float16 has three bits more than bf16."""
    return jnp.float16 if jnp.dtype(dtype).itemsize == 2 else jnp.float32
