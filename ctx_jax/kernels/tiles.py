"""The tiles of `kernels.flash`: what its programs compute, in Pallas, lowered through Triton.

The shift of the position term (Dai et al. 2019, appendix B) is the difficulty: a tile of `BLOCK` queries and `BLOCK`
keys needs the distances of 2 BLOCK - 1 diagonals, each row one further than the row before, and registers cannot be
read with an offset that depends on the row. Distances are therefore multiplied in blocks of their own: two of them
cover a tile, the lower triangle of one and the upper of the next, so that the product is one tile of which each row is
rotated by its number; shared memory, through which it goes once, undoes that.
Where the queries stand at arbitrary places (XLNet's query stream), the products with all distances come from outside
and are read at each row's offset.

In the backward pass arrays of all pairs lie in memory, where a row may be written to and read from any place: the terms
of the scores, which `scores_kernel` writes where their keys are, and the scores' gradients. No rotation there.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

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


class Part(NamedTuple):
    """Places that are handled in blocks of their own, the last of which may be short. All of it is known when the
    kernels are compiled."""

    first: int
    """The first place."""
    count: int
    block: int = 0
    """The number of the first block."""
    term: Literal["", "fused", "given"] = ""
    """The position term of these queries: none, by `Fused` or by `Given`."""

    @property
    def blocks(self) -> int:
        return -(-self.count // BLOCK)

    @property
    def end(self) -> int:
        """The number after the last block's."""
        return self.block + self.blocks

    @property
    def short(self) -> bool:
        return self.count % BLOCK > 0

    def places(self, block: Any) -> jax.Array:
        """Of a block, those that are not there included."""
        return self.first + (block - self.block) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)

    def read(self, array: Any, b: Any, block: Any, h: Any) -> jax.Array:
        """A block of [B, places, H, C]; what is not there repeats the last one."""
        if self.short:
            return array[b, jnp.minimum(self.places(block), self.first + self.count - 1), h, :]
        return array[b, pl.ds(self.first + (block - self.block) * BLOCK, BLOCK), h, :]

    def write(self, array: Any, b: Any, block: Any, h: Any, x: jax.Array) -> None:
        x = x.astype(array.dtype)
        if self.short:
            places = jnp.broadcast_to(self.places(block)[:, None], x.shape)
            channels = jnp.broadcast_to(jnp.arange(x.shape[1])[None, :], x.shape)
            plgpu.store(array.at[b, places, h, channels], x, mask=places < self.first + self.count)
        else:
            array[b, pl.ds(self.first + (block - self.block) * BLOCK, BLOCK), h, :] = x


class Fused(NamedTuple):
    """The position term of queries that are the last of the S places."""

    shift: jax.Array
    """[H, C]: what turns content queries into those of the position term, v - u."""
    relative: jax.Array
    """[N, P, H, C], by descending distance from S - 1 on."""
    direction: jax.Array
    """[B] int32: which of the N a row goes by."""


class Given(NamedTuple):
    """The position term of queries at any place."""

    scores: jax.Array
    """[H, B, blocks of queries, P]: their products with all distances, descending from S - 1 on."""
    offsets: jax.Array
    """[B, blocks of queries] int32: where a query's scores of the first key stand."""


class Segment(NamedTuple):
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
    """The distances that a block of the last places meets, in blocks: the tile with key block j has those of its
    `block(j)` and of the one after."""

    def __init__(self, tile: Tile, term: Any, i: Any) -> None:
        self.tile, self.i = tile, i
        self.shift, self.array, self.direction = term
        self.part = tile.settings.queries[0]

    def query(self, content: jax.Array) -> jax.Array:
        """Queries of the position term in UNIT, from those of the content term."""
        shift = self.shift[self.tile.h, :].astype(jnp.float32)
        return ((content.astype(jnp.float32) + shift[None, :]) / UNIT).astype(content.dtype)

    def block(self, j: Any) -> Any:
        return self.part.end - 1 - self.i + j

    def relative(self, block: Any) -> jax.Array:
        """The keys of a block of distances, [BLOCK, C]; what is not there belongs to keys that are not seen."""
        count, front = self.array.shape[1], self.part.end * BLOCK - self.part.count
        if count % BLOCK or front:
            rows: Any = jnp.clip(block * BLOCK - front + self.tile.iota, 0, count - 1)
        else:
            rows = pl.ds(jnp.minimum(block, count // BLOCK - 1) * BLOCK, BLOCK)
        return self.array[self.direction[self.tile.b], rows, self.tile.h, :]

    def product(self, query: jax.Array, block: Any) -> jax.Array:
        return dot(query, self.relative(block).T)

    def scores(self, query: jax.Array, carried: jax.Array, j: Any) -> tuple[jax.Array, jax.Array]:
        """The term of the tile with key block j, [queries, keys] in fp32, and what the next one finds carried: the
        product with the block of distances that both meet."""
        second, iota = self.product(query, self.block(j) + 1), self.tile.iota
        # row a meets key c at distance BLOCK - 1 - a + c of the two blocks; the first has those of a + c >= BLOCK - 1
        first = iota[:, None] + iota[None, :] >= BLOCK - 1
        index = (iota[None, :] - iota[:, None] + BLOCK - 1) & (BLOCK - 1)
        product = jnp.where(first, carried, second).astype(narrow(query.dtype))
        shifted = take_along_axis(product, index, 1, interpret=self.tile.settings.interpret)
        return shifted.astype(jnp.float32) * UNIT, second

    def keys(self, block: Any) -> tuple[jax.Array, jax.Array]:
        """Of each query and each distance of a block: the query's row and the key that it meets there, which need not
        exist."""
        rows = (self.i * BLOCK + self.tile.iota)[:, None]
        keys = (block * BLOCK + self.tile.iota)[None, :] - (self.part.end * BLOCK - 1) + rows
        return jnp.broadcast_to(rows, keys.shape), keys

    def pairs(self, array: Any, block: Any, first: Any, end: Any) -> jax.Array:
        """Of an array of all pairs [H, B, T, S]: those with the keys at a block of distances, 0 where that is no key
        from block `first` to before block `end`."""
        rows, keys = self.keys(block)
        inside = (keys >= first * BLOCK) & (keys < end * BLOCK)
        return plgpu.load(array.at[self.tile.h, self.tile.b, rows, keys], mask=inside, other=0.0)


def narrow(dtype: Any) -> Any:
    """In which a position term is carried: float16 has three bits more than bf16."""
    return jnp.float16 if jnp.dtype(dtype).itemsize == 2 else jnp.float32


def given_columns(tile: Tile, part: Part, term: Any, i: Any, j: Any) -> tuple[jax.Array, jax.Array]:
    """Where the `Given` scores of a tile stand."""
    rows = (i - part.block) * BLOCK + tile.iota
    offsets = term[1][tile.b, pl.ds((i - part.block) * BLOCK, BLOCK)]
    columns = tile.by_query(offsets) + tile.by_key(j * BLOCK + tile.iota)
    return jnp.broadcast_to(tile.by_query(rows), columns.shape), columns


def given_scores(tile: Tile, part: Part, term: Any, i: Any, j: Any) -> jax.Array:
    """The tile's term, fp32."""
    rows, columns = given_columns(tile, part, term, i, j)
    return term[0][tile.h, tile.b, rows, columns].astype(jnp.float32)


def of_part(settings: Settings, i: Any, run: Any) -> None:
    """Calls `run(part)` for the part that a block of queries belongs to."""
    if len(settings.queries) == 1:
        run(settings.queries[0])
        return
    for part in settings.queries:
        pl.when((part.block <= i) & (i < part.end))(lambda part=part: run(part))


def forward_kernel(
    content, key, value, fused, given, segment, facts, blocks, out, normalizer, gate: Any = None,
    *, settings: Settings,
) -> None:  # fmt: skip
    """Also gives the queries' segment term, if there is one."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own, keys = pl.ds(i * BLOCK, BLOCK), settings.keys

    def run(part: Part) -> None:
        query = part.read(content, b, i, h)
        bias = None
        if gate is not None:
            shift, same = (x[h, :].astype(jnp.float32)[None, :] for x in segment)
            bias = ((query.astype(jnp.float32) + shift) * same).sum(1)
            gate[b, h, own] = bias
        seen, states = tile.seen(i), tile.row_states(i)
        first, end, zeros = blocks[b, i, 0], blocks[b, i, 1], unknown_zero(seen[0].astype(jnp.float32))[:, None]
        distances = Distances(tile, fused, i) if part.term == "fused" else None
        turned = None if distances is None else distances.query(query)

        def step(j: Any, carry: Any) -> Any:
            largest, total, sums, carried = carry
            term = None
            if distances is not None:
                term, carried = distances.scores(turned, carried, j)
            elif part.term == "given":
                term = given_scores(tile, part, given, i, j)
            scores = tile.scores(tile.dot(query, keys.read(key, b, j, h)), term, bias, seen, i, j)
            new = jnp.maximum(largest, scores.max(1))
            exponentials = jnp.exp2(scores * settings.scale - (new * settings.scale)[:, None])
            shrink = jnp.exp2((largest - new) * settings.scale)
            total = total * shrink + exponentials.sum(1)
            dropped = tile.dropout(exponentials, zeros, states, j).astype(value.dtype)
            sums = sums * shrink[:, None] + dot(dropped, keys.read(value, b, j, h))
            return new, total, sums, carried

        start = jnp.full(BLOCK, LOWEST, jnp.float32), jnp.zeros(BLOCK, jnp.float32)
        carried = () if distances is None else distances.product(turned, distances.block(first))
        largest, total, sums, _ = jax.lax.fori_loop(
            first, end, step, (*start, jnp.zeros(query.shape, jnp.float32), carried)
        )
        part.write(out, b, i, h, sums * (settings.kept / jnp.where(total == 0, 1.0, total))[:, None])
        normalizer[b, h, own] = jnp.where(total == 0, -HIDDEN, largest * settings.scale + jnp.log2(total))

    of_part(settings, i, run)


def query_kernel(
    content, key, value, facts, blocks, out_gradient, normalizer, delta, by_content, *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by the queries, where there is neither a position nor a segment term."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own, [part], keys = pl.ds(i * BLOCK, BLOCK), settings.queries, settings.keys
    query, gradient = part.read(content, b, i, h), part.read(out_gradient, b, i, h)
    normalizers, deltas = normalizer[b, h, own], delta[b, h, own]
    seen, states = tile.seen(i), tile.row_states(i)

    def step(j: Any, total: jax.Array) -> jax.Array:
        key_block = keys.read(key, b, j, h)
        scores = tile.scores(tile.dot(query, key_block), None, None, seen, i, j)
        probabilities = jnp.exp2(scores * settings.scale - normalizers[:, None])
        by_probabilities = tile.dot(gradient, keys.read(value, b, j, h)) * settings.kept - deltas[:, None]
        by_scores = probabilities * tile.dropout(by_probabilities, -deltas[:, None], states, j)
        return total + dot(by_scores.astype(key_block.dtype), key_block)

    total = jax.lax.fori_loop(blocks[b, i, 0], blocks[b, i, 1], step, jnp.zeros(query.shape, jnp.float32))
    part.write(by_content, b, i, h, total * settings.natural)


def scores_kernel(content, fused, facts, blocks, scores, turned, *, settings: Settings) -> None:
    """The position term of all pairs that meet, and its queries, both in UNIT."""
    i, h, b = (pl.program_id(n) for n in range(3))
    distances = Distances(Tile(facts, b, h, settings, turned=False), fused, i)
    query = distances.query(settings.queries[0].read(content, b, i, h))
    turned[b, pl.ds(i * BLOCK, BLOCK), h, :] = query
    first, end = blocks[b, i, 0], blocks[b, i, 1]

    def step(block: Any, _: None) -> None:
        rows, keys = distances.keys(block)
        inside = (keys >= first * BLOCK) & (keys < end * BLOCK)
        product = distances.product(query, block).astype(scores.dtype)
        plgpu.store(scores.at[h, b, rows, jnp.where(inside, keys, scores.shape[-1])], product, mask=inside)

    jax.lax.fori_loop(distances.block(first), jnp.where(first < end, distances.block(end) + 1, 0), step, None)


def key_kernel(
    content, key, value, scores, given, gate, facts, blocks, out_gradient, normalizer, delta,
    by_key, by_value, by_pairs: Any = None, *, settings: Settings,
) -> None:  # fmt: skip
    """Gradients by keys and values and, if asked, by the scores of all pairs that meet. `scores` are those of
    `scores_kernel`, `gate` the forward kernel's."""
    j, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=True)
    keys, values = (settings.keys.read(x, b, j, h) for x in (key, value))
    carry = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(keys.shape, jnp.float32)
    for number, part in enumerate(settings.queries):

        def step(i: Any, carry: Any, part: Part = part, number: int = number) -> Any:
            key_sum, value_sum = carry
            at = pl.ds(i * BLOCK, BLOCK)
            query, gradient = part.read(content, b, i, h), part.read(out_gradient, b, i, h)
            term = None
            if part.term == "fused":
                term = scores[h, b, at, pl.ds(j * BLOCK, BLOCK)].T.astype(jnp.float32) * UNIT
            elif part.term == "given":
                term = given_scores(tile, part, given, i, j)
            bias = gate[b, h, at] if settings.segments else None
            seen = None if term is None else tile.seen(i)  # tiles with a position term are hardly ever whole
            product = tile.scores(tile.dot(query, keys), term, bias, seen, i, j)
            probabilities = jnp.exp2(product * settings.scale - normalizer[b, h, at][None, :])
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

        carry = jax.lax.fori_loop(blocks[b, j, 2 * number], blocks[b, j, 2 * number + 1], step, carry)
    key_sum, value_sum = carry
    settings.keys.write(by_key, b, j, h, key_sum)
    settings.keys.write(by_value, b, j, h, value_sum * settings.kept)


def position_kernel(
    content, key, fused, given, segment, facts, blocks, by_pairs, zeros,
    by_content, by_gate, sums, by_given: Any = None, *, settings: Settings,
) -> None:  # fmt: skip
    """Gradients by the queries, from those by the scores of all pairs: of content and segment term and, where it is
    fused, of the position term. `by_given` is that of the `Given` scores, which begin as `zeros`. `sums` [B, blocks, 3,
    H, C] are over a block's queries: the gradients of the content term's, of the position term's, and the content
    queries times their gate's."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own, first, end = pl.ds(i * BLOCK, BLOCK), blocks[b, i, 0], blocks[b, i, 1]
    nothing = jnp.zeros((BLOCK, key.shape[-1]), jnp.float32)

    def run(part: Part) -> None:
        def step(j: Any, carry: Any) -> Any:
            content_sum, gate_sum = carry
            pairs = by_pairs[h, b, own, pl.ds(j * BLOCK, BLOCK)]
            content_sum += dot(pairs, settings.keys.read(key, b, j, h))
            if segment:
                gate_sum += jnp.where(tile.same_segment(i, j), pairs.astype(jnp.float32), 0.0).sum(1)
            if part.term == "given":
                plgpu.store(by_given.at[h, b, *given_columns(tile, part, given, i, j)], pairs)
            return content_sum, gate_sum

        content_sum, gate_sum = jax.lax.fori_loop(first, end, step, (nothing, jnp.zeros(BLOCK, jnp.float32)))
        total = content_sum
        sums[b, i, 0, h, :] = content_sum.sum(0)
        if part.term == "fused":
            distances = Distances(tile, fused, i)

            def by_distance(block: Any, total: jax.Array) -> jax.Array:
                return total + dot(distances.pairs(by_pairs, block, first, end), distances.relative(block))

            last = jnp.where(first < end, distances.block(end) + 1, 0)
            position_sum = jax.lax.fori_loop(distances.block(first), last, by_distance, nothing)
            total += position_sum
            sums[b, i, 1, h, :] = position_sum.sum(0)
        if segment:
            total += gate_sum[:, None] * segment[1][h, :].astype(jnp.float32)[None, :]
            by_gate[b, h, own] = gate_sum
            sums[b, i, 2, h, :] = (part.read(content, b, i, h).astype(jnp.float32) * gate_sum[:, None]).sum(0)
        part.write(by_content, b, i, h, total)

    of_part(settings, i, run)


def relative_kernel(query, direction, facts, blocks, by_pairs, by_relative, *, settings: Settings) -> None:
    """Gradients by the keys of distances, [G, N, P, H, C] in fp32: each program sums every G-th row of those that go by
    its direction. `query` are `scores_kernel`'s."""
    block, h, number = (pl.program_id(n) for n in range(3))
    groups, directions = by_relative.shape[:2]
    group, own = number // directions, number % directions
    rows, count, key_blocks = query.shape[0], settings.queries[0].end, by_pairs.shape[-1] // BLOCK
    begin, stop = jnp.maximum(count - 1 - block, 0), jnp.minimum(count + key_blocks - block, count)

    def row(n: Any, total: jax.Array) -> jax.Array:
        b = n * groups + group
        tile = Tile(facts, b, h, settings, turned=False)

        def step(i: Any, total: jax.Array) -> jax.Array:
            distances = Distances(tile, (None, None, direction), i)
            pairs = distances.pairs(by_pairs, block, blocks[b, i, 0], blocks[b, i, 1])
            return total + dot(pairs.T, query[b, pl.ds(i * BLOCK, BLOCK), h, :])

        return jax.lax.fori_loop(begin, jnp.where(direction[b] == own, stop, begin), step, total)

    total = jnp.zeros((BLOCK, query.shape[-1]), jnp.float32)
    total = jax.lax.fori_loop(0, (rows - group + groups - 1) // groups, row, total)
    by_relative[group, own, pl.ds(block * BLOCK, BLOCK), h, :] = total * UNIT
