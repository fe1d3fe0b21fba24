"""The tiles of `kernels.flash`: what its programs compute, in Pallas, lowered through Triton.

The shift of the position term (Dai et al. 2019, appendix B) is the difficulty: a tile of `BLOCK` queries and `BLOCK`
keys needs the distances of 2 BLOCK - 1 diagonals, each row one further than the row before, and registers cannot be
read with an offset that depends on the row. Distances are therefore multiplied in blocks of their own: two of them
cover a tile, the lower triangle of one and the upper of the next, so that the product is one tile of which each row is
rotated by its number; shared memory, through which it goes once, undoes that.
Where the queries stand at arbitrary places (XLNet's query stream), the products with all distances come from outside,
as `Given.scores`, and are read at each row's offset.

In the backward pass the gradients by the scores of all pairs are in memory anyway, where a row may be read from any
place: no rotation there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ctx_jax.kernels.gather import take_along_axis
from ctx_jax.layers.dropout import keep

BLOCK = 64
"""Queries and keys of a tile."""
NOTHING = -(2**31)
"""Lowest code of a query that sees nothing."""
LOG2E = math.log2(math.e)
"""For powers of two: an exponential takes many instructions, a power of two one."""
UNIT = 16.0
"""In this unit, a power of two, a position term goes through float16, which ends at 65,504."""
HIDDEN, LOWEST = -1e30, -1e20
"""Score of what is not seen, and where a row's running maximum starts: below it, so that nothing seen sums to 0."""


class Fused(NamedTuple):
    """The position term of queries that are the last T of S places."""

    query: jax.Array
    """[B, T, H, C]: with the position bias, divided by UNIT."""
    relative: jax.Array
    """[N, P, H, C], by descending distance from S - 1 on."""
    direction: jax.Array
    """[B] int32: which of the N a row goes by."""


class Given(NamedTuple):
    """The position term of queries at any place."""

    scores: jax.Array
    """[H, B, T, P]: their products with all distances, descending from S - 1 on."""
    offsets: jax.Array
    """[B, T] int32: where a query's scores of the first key stand."""


class Facts(NamedTuple):
    """What the mask, the segment term and dropout depend on; no gradient."""

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
    segments: bool
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

    def by_distance(self, pairs: Any, i: Any, block: Any, first: Any, end: Any) -> jax.Array:
        """Of an array of all pairs [H, B, T, S]: those of a block of queries with the keys at a block of distances, 0
        where that is no key from block `first` to before block `end`."""
        query = self.by_query(i * BLOCK + self.iota)
        key = self.by_key(block * BLOCK + self.iota) - (self.query_facts.shape[-1] - 1) + query
        inside = (key >= first * BLOCK) & (key < end * BLOCK)
        return plgpu.load(pairs.at[self.h, self.b, jnp.broadcast_to(query, key.shape), key], mask=inside, other=0.0)

    def shift(self, x: jax.Array, index: jax.Array, dtype: Any) -> jax.Array:
        """Each query's part of the tile, read at `index` of its own; on its way in `dtype`."""
        axis = 0 if self.turned else 1
        return take_along_axis(x.astype(dtype), index & (BLOCK - 1), axis, interpret=self.settings.interpret)

    def inside(self) -> jax.Array:
        """Where a tile's first block of distances reaches: [a, t] with a + t >= BLOCK - 1; the second has the rest."""
        return self.by_query(self.iota) + self.by_key(self.iota) >= BLOCK - 1

    def same_segment(self, i: Any, j: Any) -> jax.Array:
        return self.by_query(self.query_fact(2, i)) == self.by_key(self.key_fact(1, j))

    def scores(
        self,
        content: jax.Array,
        position: jax.Array | None,
        gate: jax.Array,
        seen: tuple[jax.Array, jax.Array] | None,
        i: Any,
        j: Any,
    ) -> jax.Array:
        """Scores, not yet scaled, with HIDDEN where the mask is; `seen` are the queries' ranges of codes, None = read
        them where a tile needs them."""
        scores = content if position is None else content + position
        if self.settings.segments:
            scores += jnp.where(self.same_segment(i, j), self.by_query(gate), 0.0)

        def masked(scores: jax.Array) -> jax.Array:
            lowest, reach = self.seen(i) if seen is None else seen
            above = self.by_key(self.key_fact(0, j)) - self.by_query(lowest)
            inside = above.astype(jnp.uint32) <= self.by_query(reach).astype(jnp.uint32)  # 0 <= above <= reach
            return jnp.where(inside, scores, HIDDEN)

        return jax.lax.cond(self.whole[self.b, i, j] != 0, lambda x: x, masked, scores)

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


class PositionTerm:
    """The position term of the tiles of a program, if there is one, in order of keys: each block of distances is
    multiplied once, and its product carried to the tile that needs the other half of it."""

    def __init__(self, tile: Tile, operands: Any, i: Any) -> None:
        self.tile, self.operands, self.i = tile, operands, i
        self.fused, self.given = len(operands) == 3, len(operands) == 2
        if self.fused:
            self.query = operands[0][tile.b, pl.ds(i * BLOCK, BLOCK), tile.h, :]

    def block(self, j: Any) -> Any:
        """The first of the two blocks of distances of the tile with key block j."""
        return self.tile.query_facts.shape[-1] // BLOCK - 1 - self.i + j

    def relative(self, block: Any) -> jax.Array:
        _, relative, direction = self.operands
        return relative[direction[self.tile.b], pl.ds(block * BLOCK, BLOCK), self.tile.h, :]

    def product(self, j: Any) -> Any:
        """What the tile of key block j finds carried."""
        return self.tile.dot(self.query, self.relative(self.block(j))) if self.fused else ()

    def scores(self, carried: Any, j: Any) -> tuple[Any, Any]:
        """The tile's term, fp32, and what to carry on."""
        tile = self.tile
        if self.given:
            columns = self.columns(j)
            rows = jnp.broadcast_to(tile.by_query(self.i * BLOCK + tile.iota), columns.shape)
            return self.operands[0][tile.h, tile.b, rows, columns].astype(jnp.float32), carried
        if not self.fused:
            return None, carried
        second = self.product(j + 1)
        # row a meets key c at distance BLOCK - 1 - a + c of the two blocks
        index = tile.by_key(tile.iota) - tile.by_query(tile.iota) + BLOCK - 1
        narrow = jnp.float16 if self.query.dtype.itemsize == 2 else jnp.float32  # three bits more than bf16
        shifted = tile.shift(jnp.where(tile.inside(), carried, second), index, narrow)
        return shifted.astype(jnp.float32) * UNIT, second

    def columns(self, j: Any) -> jax.Array:
        """Where `Given` scores of the tile stand."""
        offsets = self.operands[1][self.tile.b, pl.ds(self.i * BLOCK, BLOCK)]
        return self.tile.by_query(offsets) + self.tile.by_key(j * BLOCK + self.tile.iota)


def forward_kernel(
    content, key, value, position, gate, facts, blocks, out, normalizer, *, settings: Settings
) -> None:  # fmt: skip
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own = pl.ds(i * BLOCK, BLOCK)
    query, bias = content[b, own, h, :], gate[b, h, own]
    position, seen, states = PositionTerm(tile, position, i), tile.seen(i), tile.row_states(i)
    first, end, zeros = blocks[b, i, 0], blocks[b, i, 1], unknown_zero(bias)[:, None]

    def step(j: Any, carry: Any) -> Any:
        largest, total, sums, carried = carry
        at = pl.ds(j * BLOCK, BLOCK)
        distances, carried = position.scores(carried, j)
        scores = tile.scores(tile.dot(query, key[b, at, h, :]), distances, bias, seen, i, j)
        new = jnp.maximum(largest, scores.max(1))
        exponentials = jnp.exp2(scores * settings.scale - (new * settings.scale)[:, None])
        shrink = jnp.exp2((largest - new) * settings.scale)
        total = total * shrink + exponentials.sum(1)
        dropped = tile.dropout(exponentials, zeros, states, j).astype(value.dtype)
        sums = sums * shrink[:, None] + dot(dropped, value[b, at, h, :])
        return new, total, sums, carried

    start = jnp.full(BLOCK, LOWEST, jnp.float32), jnp.zeros(BLOCK, jnp.float32), jnp.zeros(query.shape, jnp.float32)
    largest, total, sums, _ = jax.lax.fori_loop(first, end, step, (*start, position.product(first)))
    out[b, own, h, :] = (sums * (settings.kept / jnp.where(total == 0, 1.0, total))[:, None]).astype(out.dtype)
    normalizer[b, h, own] = jnp.where(total == 0, -HIDDEN, largest * settings.scale + jnp.log2(total))


def query_kernel(
    content, key, value, gate, facts, blocks, out_gradient, normalizer, delta, by_content, *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by the queries, where there is no position term."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own = pl.ds(i * BLOCK, BLOCK)
    query, gradient = content[b, own, h, :], out_gradient[b, own, h, :]
    bias, normalizers, deltas = gate[b, h, own], normalizer[b, h, own], delta[b, h, own]
    seen, states = tile.seen(i), tile.row_states(i)

    def step(j: Any, total: jax.Array) -> jax.Array:
        at = pl.ds(j * BLOCK, BLOCK)
        keys, values = key[b, at, h, :], value[b, at, h, :]
        scores = tile.scores(tile.dot(query, keys), None, bias, seen, i, j)
        probabilities = jnp.exp2(scores * settings.scale - normalizers[:, None])
        by_probabilities = tile.dot(gradient, values) * settings.kept - deltas[:, None]
        by_scores = probabilities * tile.dropout(by_probabilities, -deltas[:, None], states, j)
        return total + dot(by_scores.astype(keys.dtype), keys)

    total = jax.lax.fori_loop(blocks[b, i, 0], blocks[b, i, 1], step, jnp.zeros(query.shape, jnp.float32))
    by_content[b, own, h, :] = (total * settings.natural).astype(by_content.dtype)


def position_kernel(
    key, position, facts, blocks, by_pairs, zeros, by_content, by_gate, by_position, *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by the queries, from those by the scores of all pairs: `by_position` is that of the position term's
    queries or of its `Given` scores, which begin as `zeros`."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own = pl.ds(i * BLOCK, BLOCK)
    position = PositionTerm(tile, position, i)
    first, end = blocks[b, i, 0], blocks[b, i, 1]

    def step(j: Any, carry: Any) -> Any:
        content_sum, gate_sum = carry
        at = pl.ds(j * BLOCK, BLOCK)
        pairs = by_pairs[h, b, own, at]
        content_sum += dot(pairs, key[b, at, h, :])
        if settings.segments:
            gate_sum += jnp.where(tile.same_segment(i, j), pairs.astype(jnp.float32), 0.0).sum(1)
        if position.given:
            columns = position.columns(j)
            rows = jnp.broadcast_to((i * BLOCK + tile.iota)[:, None], columns.shape)
            plgpu.store(by_position.at[h, b, rows, columns], pairs)
        return content_sum, gate_sum

    def by_distance(block: Any, total: jax.Array) -> jax.Array:
        pairs = tile.by_distance(by_pairs, i, block, first, end)
        return total + dot(pairs, position.relative(block))

    no_queries = jnp.zeros((BLOCK, key.shape[-1]), jnp.float32)
    content_sum, gate_sum = jax.lax.fori_loop(first, end, step, (no_queries, jnp.zeros(BLOCK, jnp.float32)))
    by_content[b, own, h, :] = content_sum.astype(by_content.dtype)
    by_gate[b, h, own] = gate_sum
    if position.fused:
        last = jnp.where(first < end, position.block(end) + 1, position.block(first))
        position_sum = jax.lax.fori_loop(position.block(first), last, by_distance, no_queries)
        by_position[b, own, h, :] = (position_sum * UNIT).astype(by_position.dtype)


def relative_kernel(query, direction, facts, blocks, by_pairs, by_relative, *, settings: Settings) -> None:
    """Gradients by the keys of distances, [G, N, P, H, C] in fp32: each program sums every G-th row of those that go by
    its direction."""
    block, h, number = (pl.program_id(n) for n in range(3))
    groups, directions = by_relative.shape[:2]
    group, own = number // directions, number % directions
    rows, count = query.shape[0], query.shape[1] // BLOCK
    key_blocks = by_pairs.shape[-1] // BLOCK
    begin, stop = jnp.maximum(count - 1 - block, 0), jnp.minimum(count + key_blocks - block, count)

    def row(n: Any, total: jax.Array) -> jax.Array:
        b = n * groups + group
        tile = Tile(facts, b, h, settings, turned=False)

        def step(i: Any, total: jax.Array) -> jax.Array:
            pairs = tile.by_distance(by_pairs, i, block, blocks[b, i, 0], blocks[b, i, 1])
            return total + dot(pairs.T, query[b, pl.ds(i * BLOCK, BLOCK), h, :])

        return jax.lax.fori_loop(begin, jnp.where(direction[b] == own, stop, begin), step, total)

    total = jnp.zeros((BLOCK, query.shape[-1]), jnp.float32)
    total = jax.lax.fori_loop(0, (rows - group + groups - 1) // groups, row, total)
    by_relative[group, own, pl.ds(block * BLOCK, BLOCK), h, :] = total * UNIT


def key_kernel(
    content, key, value, position, gate, facts, blocks, out_gradient, normalizer, delta,
    by_key, by_value, by_pairs: Any = None, *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by keys and values and, if asked, by the scores of all pairs that meet."""
    j, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=True)
    own = pl.ds(j * BLOCK, BLOCK)
    keys, values = key[b, own, h, :], value[b, own, h, :]

    def step(i: Any, carry: Any) -> Any:
        key_sum, value_sum = carry
        at = pl.ds(i * BLOCK, BLOCK)
        query, gradient = content[b, at, h, :], out_gradient[b, at, h, :]
        term = PositionTerm(tile, position, i)
        distances, _ = term.scores(term.product(j), j)
        seen = tile.seen(i) if position else None  # these tiles are hardly ever whole
        scores = tile.scores(tile.dot(query, keys), distances, gate[b, h, at], seen, i, j)
        probabilities = jnp.exp2(scores * settings.scale - normalizer[b, h, at][None, :])
        states, deltas = tile.row_states(i), delta[b, h, at][None, :] * settings.natural
        by_probabilities = tile.dot(gradient, values) * (settings.kept * settings.natural) - deltas
        by_scores = (probabilities * tile.dropout(by_probabilities, -deltas, states, j)).astype(query.dtype)
        kept = tile.dropout(probabilities, unknown_zero(deltas), states, j)
        value_sum += dot(kept.astype(gradient.dtype), gradient)
        if by_pairs is not None:
            rows = jnp.broadcast_to((i * BLOCK + tile.iota)[None, :], by_scores.shape)
            columns = jnp.broadcast_to((j * BLOCK + tile.iota)[:, None], by_scores.shape)
            plgpu.store(by_pairs.at[h, b, rows, columns], by_scores)
        key_sum += dot(by_scores, query)
        return key_sum, value_sum

    zeros = jnp.zeros(keys.shape, jnp.float32)
    key_sum, value_sum = jax.lax.fori_loop(blocks[b, j, 0], blocks[b, j, 1], step, (zeros, zeros))
    by_key[b, own, h, :] = key_sum.astype(by_key.dtype)
    by_value[b, own, h, :] = (value_sum * settings.kept).astype(by_value.dtype)
