"""The tiles of `kernels.flash`: blocks of queries and keys, and what `kernels.programs` does with one.

The shift of the position term (Dai et al. 2019, appendix B) is the difficulty: a tile of queries and keys needs other
distances in each row, and registers cannot be read with an offset that depends on the row. Memory can: products of
queries with blocks of distances are written to where their keys are, once, and every tile reads the term in its place;
in the backward pass the gradients of the scores are written by key and read by distance.

By distance, rows that are one place apart start anywhere in memory, and go there by two bytes. A program that takes
queries some places apart has rows that start so many keys apart. Memory gives eight bytes at once nearly as fast as
more, and takes less than whole, aligned 32 bytes at a third of its speed: programs that write take queries farther
apart than those that read.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ctx_jax.layers.dropout import drawn, least

BLOCK = 64
"""Queries and keys of a tile."""
NOTHING = -(2**31)
"""Lowest code of a query that sees nothing."""
READ, WRITTEN = 4, 16
"""Keys that are read, or written, together, where there are enough queries; powers of two. The more they are, the more
distances a program meets in vain."""
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
        if self.short:
            places = self.places(block)
            store(array, b, places, h, x, places < self.first + self.size)
        else:
            array[b, pl.ds(self.first + (block - self.block) * BLOCK, BLOCK), h, :] = x.astype(array.dtype)


def store(array: Any, b: Any, places: jax.Array, h: Any, x: jax.Array, real: jax.Array | None) -> None:
    """Writes x [BLOCK, C] to places of [B, places, H, C]; `real` are those that are there, None = all."""
    rows = jnp.broadcast_to(places[:, None], x.shape)
    channels = jnp.broadcast_to(jnp.arange(x.shape[1])[None, :], x.shape)
    mask = None if real is None else jnp.broadcast_to(real[:, None], x.shape)
    plgpu.store(array.at[b, rows, h, channels], x.astype(array.dtype), mask=mask)


class PositionTerm(NamedTuple):
    """What the kernels read of the position term."""

    shift: jax.Array
    """[H, C]: what turns content queries into those of the position term, v - u."""
    relative: jax.Array
    """[N, P, H, C], by descending distance from S - 1 on."""
    direction: jax.Array
    """[B] int32: which of the N a row goes by."""
    order: jax.Array
    """[B] int32: the rows by their direction."""
    ends: jax.Array
    """[N + 1] int32: where in `order` each direction begins, and the end."""
    offsets: jax.Array | None
    """[B, K] int32, in whole blocks, of the queries at any place: the number of a query's distance to the first key,
    S - 1 less its place."""


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
    clamp: int | None
    """Keys that are so far before a query, or farther, have one position term; None = all differ. Only where the
    queries are the last places, all by one direction."""
    packed: int
    """How many of queries, keys and values are one array, a head's beside each other: 3 all, as [B, T, 3 H, C]; 2 keys
    and values, as [B, S, 2 H, C]; 1 none."""
    interpret: bool

    def of_head(self, h: Any) -> tuple[Any, Any, Any]:
        """Where a head's queries, keys and values are on the axis of heads."""
        return {1: (h, h, h), 2: (h, 2 * h, 2 * h + 1), 3: (3 * h, 3 * h + 1, 3 * h + 2)}[self.packed]

    def keys_and_values(self, content: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """The arrays that hold them; what is packed is given once, as the first of what it holds."""
        return {1: (key, value), 2: (key, key), 3: (content, content)}[self.packed]

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


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """2^x in fp32, 0 for what is below 2^-126: jnp.exp2 takes three instructions more to care for that."""
    if interpret:
        return jnp.exp2(x)
    like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    [y] = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[like]
    )
    return y


class Tile:
    """One tile of scores after the other: [queries, keys], where a block of queries stays, or [keys, queries], where a
    block of keys does, so that a product with it needs no transposition. The facts of what stays are read once, which
    the compiler would not do of itself in a loop that writes."""

    def __init__(
        self, facts: Any, b: Any, h: Any, settings: Settings, *, queries: Any = None, keys: Any = None
    ) -> None:
        """`queries` or `keys` is the block that stays, if one does."""
        self.query_facts, self.key_facts, self.states, self.columns = facts
        self.b, self.h, self.settings, self.turned = b, h, settings, keys is not None
        self.iota = jnp.arange(BLOCK, dtype=jnp.int32)
        self.own_queries = self.own_keys = None
        if queries is not None:
            self.own_queries = [self.query_fact(index, queries) for index in range(3)], self.row_states(queries)
        if keys is not None:
            self.own_keys = [self.key_fact(index, keys) for index in range(2)], self.mixed_columns(keys)

    def by_query(self, x: jax.Array) -> jax.Array:
        return x[None, :] if self.turned else x[:, None]

    def by_key(self, x: jax.Array) -> jax.Array:
        return x[:, None] if self.turned else x[None, :]

    def dot(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """[BLOCK, C] twice -> the tile of their products, fp32."""
        return dot(key, query.T) if self.turned else dot(query, key.T)

    def query_fact(self, index: int, block: Any) -> jax.Array:
        if self.own_queries is not None:
            return self.own_queries[0][index]
        return self.query_facts[self.b, index, pl.ds(block * BLOCK, BLOCK)]

    def key_fact(self, index: int, block: Any) -> jax.Array:
        if self.own_keys is not None:
            return self.own_keys[0][index]
        return self.key_facts[self.b, index, pl.ds(block * BLOCK, BLOCK)]

    def row_states(self, i: Any) -> jax.Array | None:
        if self.own_queries is not None:
            return self.own_queries[1]
        return None if self.states is None else self.states[self.b, self.h, pl.ds(i * BLOCK, BLOCK)]

    def mixed_columns(self, j: Any) -> jax.Array | None:
        if self.own_keys is not None:
            return self.own_keys[1]
        return None if self.columns is None else self.columns[pl.ds(j * BLOCK, BLOCK)]

    def same_segment(self, i: Any, j: Any) -> jax.Array:
        return self.by_query(self.query_fact(2, i)) == self.by_key(self.key_fact(1, j))

    def scores(
        self, content: jax.Array, position: jax.Array | None, gate: jax.Array | None, i: Any, j: Any, whole: Any
    ) -> jax.Array:
        """Scores, not yet scaled, with HIDDEN where the mask is; `whole` says that all queries see all keys."""
        scores = content if position is None else content + position
        if gate is not None:
            scores += jnp.where(self.same_segment(i, j), self.by_query(gate), 0.0)

        def masked(scores: jax.Array) -> jax.Array:
            above = self.by_key(self.key_fact(0, j)) - self.by_query(self.query_fact(0, i))
            reach = self.by_query(self.query_fact(1, i))
            inside = above.astype(jnp.uint32) <= reach.astype(jnp.uint32)  # 0 <= above <= reach
            return jnp.where(inside, scores, HIDDEN)

        if len(self.settings.queries) > 1:
            return masked(scores)  # in two streams few tiles are whole, and to ask takes a twentieth of the time
        return jax.lax.cond(whole, lambda x: x, masked, scores)

    def term(self, scores: Any, i: Any, j: Any) -> jax.Array:
        """The position term, fp32, as `scores_kernel` wrote it. By a product with the identity, which is exact: only
        what a product reads is brought while the tile before is computed, and it need not go through registers."""
        term = scores[self.h, self.b, pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)]
        identity = jnp.where(self.iota[:, None] == self.iota[None, :], UNIT, 0.0).astype(term.dtype)
        return dot(identity, term.T) if self.turned else dot(term, identity)

    def dropout(self, i: Any, j: Any, x: jax.Array, dropped: Any) -> jax.Array:
        """A tile with `dropped` in place of what dropout takes."""
        rows, columns = self.row_states(i), self.mixed_columns(j)
        if rows is None or columns is None:
            return x
        numbers, bound = drawn(self.by_query(rows), self.by_key(columns)), least(self.settings.rate)
        if self.settings.interpret:
            return jnp.where(numbers >= jnp.uint32(bound), x, dropped)
        # both at once: of itself the compiler compares all elements first, and packs what there are too few registers
        # for; and it would convert to bf16 before it chooses between x and a zero that it knows, which takes longer
        [y] = plgpu.elementwise_inline_asm(
            f"{{.reg .pred kept; setp.ge.u32 kept, $1, {bound}; selp.f32 $0, $2, $3, kept;}}",
            args=[numbers, x, jnp.broadcast_to(dropped, x.shape)],
            constraints="=f,r,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
        )
        return y


class Rows(NamedTuple):
    """The queries of a program, and the keys at their distances."""

    numbers: jax.Array
    """[BLOCK]: which they are, counted in whole blocks."""
    places: jax.Array
    """[BLOCK]: where they would stand in [B, T]."""
    last: int | None
    """The last place that is there; None = all are."""
    start: Any
    """The first distance of block 0 of distances."""
    keys: jax.Array
    """[BLOCK, BLOCK] int32: the key of each that is at each distance of block 0."""
    blocks: tuple[Any, Any]
    """The first and the one after the last block of distances with a key that one of them meets."""
    span: tuple[Any, Any]
    """The first block of keys that any of them meets, and the one after the last."""

    def read(self, array: Any, b: Any, h: Any) -> jax.Array:
        """Theirs of [B, T, H, C]; what is not there repeats the last one."""
        return array[b, self.places if self.last is None else jnp.minimum(self.places, self.last), h, :]

    def write(self, array: Any, b: Any, h: Any, x: jax.Array) -> None:
        store(array, b, self.places, h, x, None if self.last is None else self.places <= self.last)


class Distances:
    """The position term of a tile's queries."""

    def __init__(self, tile: Tile, term: PositionTerm, spans: Any, most: int) -> None:
        """`spans` are those of `kernels.blocks`; `most` as for `stride`."""
        self.tile, self.term, self.spans, self.most = tile, term, spans, most
        # not in a loop, where all that is read by it would have to wait for it
        self.direction = term.direction[tile.b]

    def rows(self, part: Part, i: Any) -> Rows:
        """Those of the program that writes, or reads, the i-th block of a part. Consecutive ones are `stride` apart, so
        that as many keys at neighbouring distances of each are where memory is read and written at once."""
        iota, step = self.tile.iota, stride(part, self.most)
        first, end, nearest, farthest = (self.spans[self.tile.b, i, n] for n in range(4))
        if part.consecutive:
            begin = i // step * step * BLOCK + i % step
            numbers, start = begin + step * iota, part.size - 1 - begin
            keys = step * iota[:, None] + iota[None, :]
            met = nearest - 1, farthest  # the keys of a block of distances lie in two blocks
        else:
            numbers, start = i * BLOCK + iota, 0
            assert self.term.offsets is not None  # as for every part at any place
            offsets = self.term.offsets[self.tile.b, pl.ds((i - part.block) * BLOCK, BLOCK)]
            keys = iota[None, :] - offsets[:, None]
            least, most = offsets.min() + first * BLOCK, offsets.max() + end * BLOCK - 1
            met = least // BLOCK, jnp.where(first < end, most // BLOCK + 1, 0)
        places = part.first + numbers - part.block * BLOCK
        last = part.first + part.size - 1 if part.short else None
        return Rows(numbers, places, last, start, keys, met, (first, end))

    def query(self, content: jax.Array) -> jax.Array:
        """Queries of the position term in UNIT, from those of the content term."""
        shift = self.term.shift[self.tile.h, :].astype(jnp.float32)
        return ((content.astype(jnp.float32) + shift[None, :]) / UNIT).astype(content.dtype)

    def relative(self, start: Any) -> jax.Array:
        """The keys of BLOCK distances from one on, [BLOCK, C]; what is not there belongs to keys that are not seen."""
        rows = jnp.clip(start + self.tile.iota, 0, self.term.relative.shape[1] - 1)
        return self.term.relative[self.direction, rows, self.tile.h, :]


def pairs(array: Any, b: Any, h: Any, numbers: jax.Array, keys: jax.Array) -> jax.Array:
    """Of an array of all pairs [H, B, T, S]: those of BLOCK queries with keys [BLOCK, BLOCK] or [1, BLOCK], 0 for keys
    that are not there."""
    keys = jnp.broadcast_to(keys, (BLOCK, BLOCK))
    rows = jnp.broadcast_to(numbers[:, None], keys.shape)
    return plgpu.load(array.at[h, b, rows, keys], mask=(keys >= 0) & (keys < array.shape[-1]), other=0.0)


def stride(part: Part, most: int) -> int:
    """How many places apart the queries are that a program with distances takes: at most `most` (READ or WRITTEN), and
    half of the part's blocks, since it meets the keys of as many blocks."""
    return max(1, math.gcd(2 * most, part.blocks) // 2) if part.consecutive else 1


def narrow(dtype: Any) -> Any:
    """In which position terms are kept: float16 has three bits more than bf16."""
    return jnp.float16 if jnp.dtype(dtype).itemsize == 2 else jnp.float32
