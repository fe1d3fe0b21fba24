"""Attention in one pass, forward and backward, for GPUs (Pallas, lowered through Triton); by relative position too.

What `layers.attention` and `layers.relative` compute by whole matrices of scores, here tile by tile (FlashAttention:
Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 2 with the schedule of arXiv 2307.08691): content, position and
segment term, mask, softmax and dropout stay on the chip; the backward pass computes the probabilities anew from each
row's log-normaliser.

The shift of the position term (Dai et al. 2019, appendix B) is the difficulty: a tile of `BLOCK` queries and `BLOCK`
keys needs the distances of 2 BLOCK - 1 diagonals, each row one further than the row before, and registers cannot be
read with an offset that depends on the row. Distances are therefore multiplied in blocks of their own: two of them
cover a tile, the lower triangle of one and the upper of the next, so that the product is one tile of which each row is
rotated by its number; shared memory, through which it goes once, undoes that. The gradient takes the same way back.
Where the queries stand at arbitrary places (XLNet's query stream), the products with all distances come from outside,
as `Given.scores`, and are read at each row's offset.

The gradient of the distances' keys alone is not summed here, where every program would add to the same sums: the
kernel writes the gradient of each row's distances, and one matrix product sums them.

All blocks of a row that no query sees are skipped: those after a causal query, before a band, of other documents.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec as P

from ctx_jax import kernels
from ctx_jax.kernels.gather import take_along_axis
from ctx_jax.layers.dropout import keep, stir, words
from ctx_jax.layers.masks import Segments, Visibility
from ctx_jax.parallel.sharding import RULES

BLOCK = 64
"""Queries and keys of a tile."""
WARPS = 4
"""Warps of a program."""
FEW, WIDEST = 16, 128
"""The least queries that are worth a kernel, and the most channels of a head that fit."""
LOG2E = math.log2(math.e)
HIDDEN, LOWEST = -1e30, -1e20
"""Score of what is not seen, and where a row's running maximum starts: below it, so that nothing seen sums to 0."""


class Fused(NamedTuple):
    """The position term of queries that are the last T of S places."""

    query: jax.Array
    """[B, T, H, C]: with the position bias."""
    relative: jax.Array
    """[N, P, H, C], by descending distance from S - 1 on."""
    direction: jax.Array
    """[B] int32: which of the N a row goes by."""


class Given(NamedTuple):
    """The position term of queries at any place."""

    scores: jax.Array
    """[H, B, T, P]: their products with all distances, descending from S - 1 on."""
    places: jax.Array
    """[B, T] int32"""


class Facts(NamedTuple):
    """What the mask, the segment term and dropout depend on; no gradient."""

    query: jax.Array
    """[B, 4, T] int32: lowest and highest code that is seen, segment, and place or, for `Given`, offset of the scores."""
    key: jax.Array
    """[B, 2, S] int32: code, segment."""
    seeds: jax.Array
    """[B, H, 2] uint32, of dropout: the number of the first row of scores, plus the key's first word; its second word."""


RANKS = 2**15
"""A key's code is RANKS times the number of its document plus its rank: who sees whom is one range of codes."""


def codes(visibility: Visibility) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The keys' codes [B, S] and the queries' lowest and highest [B, T], for up to 2**16 keys.

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


class Settings(NamedTuple):
    """What is fixed when the kernels are compiled."""

    natural: float
    """Of the scores: 1 / sqrt(C)."""
    rate: float
    segments: bool
    interpret: bool


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Summed in fp32."""
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def padded(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """x with `value` appended along an axis up to the size."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def attend(
    content: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position: Fused | Given | None,
    gate: jax.Array | None,
    facts: Facts,
    *,
    rate: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """Attention of content queries [B, T, H, C] (with their bias) to key and value [B, S, H, C] -> [B, T, H, C].

    `gate` [B, H, T] fp32 is added to the scores of the keys of a query's own segment. Any sizes: what the kernels need
    longer is padded. `interpret` runs them anywhere, slowly.
    """
    rows, queries, heads, channels = content.shape
    keys = key.shape[1]
    t, s = (-(-size // BLOCK) * BLOCK for size in (queries, keys))
    c = max(16, 1 << (channels - 1).bit_length())

    def wide(x: jax.Array, length: int) -> jax.Array:
        return padded(padded(x, -1, c), -3, length)

    query_facts = padded(facts.query, -1, t)
    query_facts = query_facts.at[:, 0, queries:].set(1)
    key_facts = padded(facts.key, -1, s, -1)
    if isinstance(position, Fused):
        # Row i of the padded queries meets key j at distance t - 1 - i + j. No further than what is seen is needed, and
        # the other half of its last tile.
        front = t - queries
        count = min(t + s, -(-(front + position.relative.shape[1]) // BLOCK) * BLOCK + BLOCK)
        relative = jnp.pad(position.relative, ((0, 0), (front, 0), (0, 0), (0, 0)))[:, :count]
        position = Fused(wide(position.query, t), wide(relative, count), position.direction)
    elif isinstance(position, Given):
        position = Given(padded(position.scores, 2, t), padded(position.places, -1, t))
        query_facts = query_facts.at[:, 3].set(keys - 1 - position.places)
    settings = Settings(channels**-0.5, rate, gate is not None, interpret)
    gate = jnp.zeros((rows, heads, t), jnp.float32) if gate is None else padded(gate * LOG2E * channels**-0.5, -1, t)
    facts = Facts(query_facts, key_facts, facts.seeds)
    out = _attend(wide(content, t), wide(key, s), wide(value, s), position, gate, facts, settings)
    return out[:, :queries, :, :channels]


class Position(NamedTuple):
    """What the position term of `relative_attention` needs; the shapes are those of `layers.relative`."""

    relative: jax.Array
    content_bias: jax.Array
    position_bias: jax.Array
    direction: jax.Array | None
    places: jax.Array | None


def obstacle(query: jax.Array, key: jax.Array) -> str | None:
    """Why the twin has to do it; None if nothing stands in the way."""
    if query.shape[1] < FEW:
        return f"fewer than {FEW} queries"
    if key.shape[1] > RANKS - 3:
        return f"{key.shape[1]} keys (the kernel takes {RANKS - 3})"
    if query.shape[-1] > WIDEST:
        return f"heads of {query.shape[-1]} channels (the kernel takes {WIDEST})"
    return kernels.obstacle(query)


def relative_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position: Position,
    visibility: Visibility,
    segments: Segments | None,
    rate: float,
    dropout_key: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """What `layers.relative.relative_attention` returns first, over the current mesh: rows and heads are split, as
    everywhere, and nothing is moved."""
    rows, queries, heads, channels = query.shape
    keys = key.shape[1]
    relative = position.relative if position.relative.ndim == 4 else position.relative[None]
    direction = jnp.zeros(rows, jnp.int32) if position.direction is None else position.direction
    content, turned = (query + bias.astype(query.dtype) for bias in (position.content_bias, position.position_bias))
    if position.places is None:
        places = jnp.broadcast_to(jnp.arange(keys - queries, keys), (rows, queries))
        term: Fused | Given = Fused(turned, relative, direction)
    else:
        places = position.places
        distances = keys - 1 + -(-keys // BLOCK) * BLOCK
        relative = padded(relative, 1, max(relative.shape[1], -(-distances // BLOCK) * BLOCK))
        turned = padded(turned, 1, -(-queries // BLOCK) * BLOCK)
        if len(relative) > 1:  # one product for all directions, of which each row has one
            goes = jax.nn.one_hot(direction, len(relative), dtype=turned.dtype)
            turned = jnp.einsum("bthc,bn->bthnc", turned, goes).reshape(*turned.shape[:3], -1)
        relative = relative.transpose(1, 2, 0, 3).reshape(relative.shape[1], heads, -1)
        scores = jnp.einsum("bthc,phc->hbtp", turned, relative)
        term = Given(scores, places)
    gate, query_segments, key_segments = None, jnp.zeros((rows, queries), jnp.int32), jnp.zeros((rows, keys), jnp.int32)
    if segments is not None:
        biased = query + segments.bias.astype(query.dtype)
        either = jnp.einsum(
            "bthc,nhc->nbht", biased, segments.embedding.astype(query.dtype), preferred_element_type=jnp.float32
        )
        # softmax does not see what all keys of a query have in common
        gate, query_segments, key_segments = either[0] - either[1], segments.query, segments.key

    extra = (query_segments, places), (key_segments,)
    return over_mesh(content, key, value, term, gate, visibility, extra, rate, dropout_key, interpret)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
    rate: float,
    dropout_key: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """What `layers.attention.attention` returns first, over the current mesh."""
    zeros = [jnp.zeros(x.shape[:2], jnp.int32) for x in (query, key)]
    extra = (zeros[0], zeros[0]), (zeros[1],)
    return over_mesh(query, key, value, None, None, visibility, extra, rate, dropout_key, interpret)


def over_mesh(
    content: jax.Array,
    key: jax.Array,
    value: jax.Array,
    term: Fused | Given | None,
    gate: jax.Array | None,
    visibility: Visibility,
    extra: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]],
    rate: float,
    dropout_key: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """`attend` on each device's rows and heads; nothing is moved. `extra` are the facts beside the codes."""
    rows, queries, heads, _ = content.shape
    code, lowest, highest = codes(visibility)
    of_queries = [jnp.broadcast_to(x, (rows, queries)) for x in (lowest, highest, *extra[0])]
    of_keys = [jnp.broadcast_to(x, (rows, key.shape[1])) for x in (code, *extra[1])]
    rate = 0.0 if dropout_key is None else rate
    first, second = (jnp.uint32(0), jnp.uint32(0)) if dropout_key is None else words(dropout_key)
    number = jax.lax.broadcasted_iota(jnp.uint32, (rows, heads), 0) * jnp.uint32(heads)
    number += jax.lax.broadcasted_iota(jnp.uint32, (rows, heads), 1)
    seeds = jnp.stack([number * jnp.uint32(queries) + first, jnp.broadcast_to(second, number.shape)], -1)
    facts = Facts(jnp.stack(of_queries, 1).astype(jnp.int32), jnp.stack(of_keys, 1).astype(jnp.int32), seeds)

    run = partial(attend, rate=rate, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(content, key, value, term, gate, facts)
    batch, head = RULES["batch"], RULES["heads"]
    array, scores, row = P(batch, None, head), P(batch, head), P(batch)
    terms: Any = None
    if term is not None:
        terms = Fused(array, P(None, None, head), row) if isinstance(term, Fused) else Given(P(head, batch), row)
    specs = (array, array, array, terms, None if gate is None else scores, Facts(row, row, scores))
    split = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=array, check_vma=False)
    return split(content, key, value, term, gate, facts)


def bounds(facts: Facts) -> tuple[jax.Array, jax.Array]:
    """For each block of queries the first block of keys that it meets and the one after the last, [B, T / BLOCK, 2],
    and for each block of keys the blocks of queries that meet it: all that see each other, and what lies between."""

    lowest, highest, code = facts.query[:, 0], facts.query[:, 1], facts.key[:, 0]

    def extreme(x: jax.Array, real: jax.Array, least: bool) -> jax.Array:
        x, real = (y.reshape(len(y), -1, BLOCK) for y in (x, real))
        return jnp.where(real, x, 2**30).min(-1) if least else jnp.where(real, x, -(2**30)).max(-1)

    real, key_real = lowest <= highest, code >= 0
    sees = extreme(lowest, real, True)[:, :, None] <= extreme(code, key_real, False)[:, None, :]
    sees &= extreme(highest, real, False)[:, :, None] >= extreme(code, key_real, True)[:, None, :]

    def ends(sees: jax.Array) -> jax.Array:
        end = jnp.where(sees.any(-1), sees.shape[-1] - jnp.argmax(sees[..., ::-1], -1), 0)
        return jnp.stack([jnp.argmax(sees, -1), end], -1).astype(jnp.int32)

    blocks = ends(sees)
    j = jnp.arange(sees.shape[2])
    met = (blocks[..., :1] <= j) & (j < blocks[..., 1:])
    return blocks, ends(met.swapaxes(1, 2))


class Tile:
    """One tile of scores: [queries, keys], or the other way round if `turned`, so that a product with it needs no
    transposition."""

    def __init__(self, facts: Any, b: Any, h: Any, settings: Settings, *, turned: bool) -> None:
        self.query_facts, self.key_facts, self.seeds = facts
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
        position: jax.Array,
        gate: jax.Array,
        seen: tuple[jax.Array, jax.Array],
        i: Any,
        j: Any,
    ) -> jax.Array:
        """Base-2 scores with HIDDEN where the mask is; `seen` are the queries' ranges of codes."""
        scores = (content + position) * (self.settings.natural * LOG2E)
        if self.settings.segments:
            scores += jnp.where(self.same_segment(i, j), self.by_query(gate), 0.0)
        code = self.by_key(self.key_fact(0, j))
        return jnp.where((code >= self.by_query(seen[0])) & (code <= self.by_query(seen[1])), scores, HIDDEN)

    def seen(self, i: Any) -> tuple[jax.Array, jax.Array]:
        return self.query_fact(0, i), self.query_fact(1, i)

    def dropout(self, x: jax.Array, i: Any, j: Any) -> jax.Array:
        """The tile of the probabilities (or of their gradient) after dropout."""
        rate = self.settings.rate
        if rate == 0.0:
            return x
        rows = stir(
            (i * BLOCK + self.iota).astype(jnp.uint32), self.seeds[self.b, self.h, 0], self.seeds[self.b, self.h, 1]
        )
        columns = (j * BLOCK + self.iota).astype(jnp.uint32)
        return jnp.where(keep(self.by_query(rows), self.by_key(columns), rate), x * (1.0 / (1.0 - rate)), 0.0)


class PositionTerm:
    """The position term of the tiles of a program, if there is one, in order of keys: each block of distances is multiplied once, and
    its product carried to the tile that needs the other half of it."""

    def __init__(self, tile: Tile, operands: Any, i: Any) -> None:
        self.tile, self.operands, self.i = tile, operands, i
        self.fused, self.given = len(operands) == 3, len(operands) == 1
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
            return 0.0, carried
        second = self.product(j + 1)
        # row a meets key c at distance BLOCK - 1 - a + c of the two blocks
        index = tile.by_key(tile.iota) - tile.by_query(tile.iota) + BLOCK - 1
        narrow = jnp.float16 if self.query.dtype.itemsize == 2 else jnp.float32  # three bits more than bf16
        return tile.shift(jnp.where(tile.inside(), carried, second), index, narrow).astype(jnp.float32), second

    def columns(self, j: Any) -> jax.Array:
        """Where `Given` scores of the tile stand."""
        return self.tile.by_query(self.tile.query_fact(3, self.i)) + self.tile.by_key(j * BLOCK + self.tile.iota)


def forward_kernel(
    content, key, value, position, gate, facts, blocks, out, normalizer, *, settings: Settings
) -> None:  # fmt: skip
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own = pl.ds(i * BLOCK, BLOCK)
    query, bias = content[b, own, h, :], gate[b, h, own]
    position, seen = PositionTerm(tile, position, i), tile.seen(i)
    first, end = blocks[b, i, 0], blocks[b, i, 1]

    def step(j: Any, carry: Any) -> Any:
        largest, total, sums, carried = carry
        at = pl.ds(j * BLOCK, BLOCK)
        distances, carried = position.scores(carried, j)
        scores = tile.scores(tile.dot(query, key[b, at, h, :]), distances, bias, seen, i, j)
        new = jnp.maximum(largest, scores.max(1))
        exponentials = jnp.exp2(scores - new[:, None])
        shrink = jnp.exp2(largest - new)
        total = total * shrink + exponentials.sum(1)
        dropped = tile.dropout(exponentials, i, j).astype(value.dtype)
        sums = sums * shrink[:, None] + dot(dropped, value[b, at, h, :])
        return new, total, sums, carried

    start = jnp.full(BLOCK, LOWEST, jnp.float32), jnp.zeros(BLOCK, jnp.float32), jnp.zeros(query.shape, jnp.float32)
    largest, total, sums, _ = jax.lax.fori_loop(first, end, step, (*start, position.product(first)))
    out[b, own, h, :] = (sums / jnp.where(total == 0, 1.0, total)[:, None]).astype(out.dtype)
    normalizer[b, h, own] = jnp.where(total == 0, -HIDDEN, largest + jnp.log2(total))


def query_kernel(
    content, key, value, gate, facts, blocks, out_gradient, normalizer, delta, by_content, *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by the queries, where there is no position term."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own = pl.ds(i * BLOCK, BLOCK)
    query, gradient = content[b, own, h, :], out_gradient[b, own, h, :]
    bias, normalizers, deltas = gate[b, h, own], normalizer[b, h, own], delta[b, h, own]
    seen = tile.seen(i)

    def step(j: Any, total: jax.Array) -> jax.Array:
        at = pl.ds(j * BLOCK, BLOCK)
        keys, values = key[b, at, h, :], value[b, at, h, :]
        scores = tile.scores(tile.dot(query, keys), 0.0, bias, seen, i, j)
        probabilities = jnp.exp2(scores - normalizers[:, None])
        by_scores = probabilities * (tile.dropout(tile.dot(gradient, values), i, j) - deltas[:, None])
        return total + dot(by_scores.astype(keys.dtype), keys)

    total = jax.lax.fori_loop(blocks[b, i, 0], blocks[b, i, 1], step, jnp.zeros(query.shape, jnp.float32))
    by_content[b, own, h, :] = (total * settings.natural).astype(by_content.dtype)


def position_kernel(
    key, position, facts, blocks, by_pairs, zeros, by_content, by_gate, by_scores, by_position=None,
    *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by the queries and, for each of them and each distance, by the position term, from those by the scores
    of all pairs."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own = pl.ds(i * BLOCK, BLOCK)
    position = PositionTerm(tile, position, i)
    first, end = blocks[b, i, 0], blocks[b, i, 1]
    no_block = jnp.zeros((BLOCK, BLOCK), by_pairs.dtype)

    def fill(n: Any, _: Any) -> Any:
        by_scores[h, b, own, pl.ds(n * BLOCK, BLOCK)] = no_block
        return _

    def step(j: Any, carry: Any) -> Any:
        content_sum, position_sum, gate_sum, begun = carry
        at = pl.ds(j * BLOCK, BLOCK)
        pairs = by_pairs[h, b, own, at]
        content_sum += dot(pairs, key[b, at, h, :])
        if settings.segments:
            gate_sum += jnp.where(tile.same_segment(i, j), pairs.astype(jnp.float32), 0.0).sum(1)
        if position.given:
            columns = position.columns(j)
            rows = jnp.broadcast_to((i * BLOCK + tile.iota)[:, None], columns.shape)
            plgpu.store(by_scores.at[h, b, rows, columns], pairs)
            return content_sum, position_sum, gate_sum, begun
        turned = tile.shift(pairs, tile.by_key(tile.iota) + tile.by_query(tile.iota) + 1, pairs.dtype)
        whole = jnp.where(tile.inside(), turned, begun)
        position_sum += dot(whole, position.relative(position.block(j)))
        by_scores[h, b, own, pl.ds(position.block(j) * BLOCK, BLOCK)] = whole
        return content_sum, position_sum, gate_sum, jnp.where(tile.inside(), no_block, turned)

    start, gates = jnp.zeros((BLOCK, key.shape[-1]), jnp.float32), jnp.zeros(BLOCK, jnp.float32)
    carry = (start, start, gates, no_block) if position.fused else (start, (), gates, ())
    content_sum, position_sum, gate_sum, begun = jax.lax.fori_loop(first, end, step, carry)
    if position.fused:
        last = position.block(end)
        position_sum += dot(begun, position.relative(last))
        by_scores[h, b, own, pl.ds(last * BLOCK, BLOCK)] = begun
        jax.lax.fori_loop(0, position.block(first), fill, 0)
        jax.lax.fori_loop(last + 1, by_scores.shape[-1] // BLOCK, fill, 0)
        by_position[b, own, h, :] = (position_sum * settings.natural).astype(by_position.dtype)
    by_content[b, own, h, :] = (content_sum * settings.natural).astype(by_content.dtype)
    by_gate[b, h, own] = gate_sum / LOG2E


def key_kernel(
    content, key, value, position, gate, facts, blocks, out_gradient, normalizer, delta,
    by_key, by_value, by_pairs=None, *, settings: Settings
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
        scores = tile.scores(tile.dot(query, keys), distances, gate[b, h, at], tile.seen(i), i, j)
        probabilities = jnp.exp2(scores - normalizer[b, h, at][None, :])
        value_sum += dot(tile.dropout(probabilities, i, j).astype(gradient.dtype), gradient)
        by_scaled = tile.dropout(tile.dot(gradient, values), i, j) - delta[b, h, at][None, :]
        by_scores = (probabilities * by_scaled).astype(query.dtype)
        if by_pairs is not None:
            rows = jnp.broadcast_to((i * BLOCK + tile.iota)[None, :], by_scores.shape)
            columns = jnp.broadcast_to((j * BLOCK + tile.iota)[:, None], by_scores.shape)
            plgpu.store(by_pairs.at[h, b, rows, columns], by_scores)
        key_sum += dot(by_scores, query)
        return key_sum, value_sum

    zeros = jnp.zeros(keys.shape, jnp.float32)
    key_sum, value_sum = jax.lax.fori_loop(blocks[b, j, 0], blocks[b, j, 1], step, (zeros, zeros))
    by_key[b, own, h, :] = (key_sum * settings.natural).astype(by_key.dtype)
    by_value[b, own, h, :] = value_sum.astype(by_value.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(content, key, value, position, gate, facts, settings):  # noqa: ANN
    return _forward(content, key, value, position, gate, facts, settings)[0]


def refs(position: Fused | Given | None) -> tuple[jax.Array, ...]:
    """What a kernel reads of the position term; the places of `Given` are among the facts."""
    if position is None:
        return ()
    return tuple(position) if isinstance(position, Fused) else (position.scores,)


def call(
    kernel: Any, blocks: int, settings: Settings, facts: Facts, *operands: Any, outputs: list[Any], stages: int = 3
) -> list[jax.Array]:
    """Runs a program for each block of each head of each row. Where the last operand is `position_kernel`'s zeros, its
    third output begins as that."""
    rows, heads, _ = facts.seeds.shape
    begun = kernel is position_kernel and not isinstance(operands[-1], tuple)
    return pl.pallas_call(
        partial(kernel, settings=settings),
        grid=(blocks, heads, rows),
        out_shape=outputs,
        interpret=settings.interpret,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=stages),
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 2} if begun else {},
        name=kernel.__name__,
    )(*operands)


def like(x: jax.Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def _forward(content, key, value, position, gate, facts, settings):  # noqa: ANN
    blocks, _ = bounds(facts)
    normalizer = like(gate)
    out, normalizer = call(
        forward_kernel, blocks.shape[1], settings, facts, content, key, value, refs(position), gate, tuple(facts), blocks,
        outputs=[like(content), normalizer],
    )  # fmt: skip
    return out, (content, key, value, position, gate, facts, out, normalizer)


def _backward(settings, residuals, gradient):  # noqa: ANN
    content, key, value, position, gate, facts, out, normalizer = residuals
    fused = isinstance(position, Fused)
    delta = jnp.einsum("bthc,bthc->bht", out, gradient, preferred_element_type=jnp.float32)
    blocks, key_blocks = bounds(facts)
    rest = gradient, normalizer, delta
    rows, heads, _ = facts.seeds.shape
    outputs = [like(key), like(value)]
    if position is not None:
        # heads first: what the gradient by distance sums over, rows and queries, is then one axis in memory
        outputs.append(jax.ShapeDtypeStruct((heads, rows, content.shape[1], key.shape[1]), content.dtype))
    by_key, by_value, *by_pairs = call(
        key_kernel, key_blocks.shape[1], settings, facts, content, key, value, refs(position), gate, tuple(facts),
        key_blocks, *rest, outputs=outputs, stages=2 if fused else 3,  # more would leave room for one program alone
    )  # fmt: skip
    if position is None:
        [by_content] = call(
            query_kernel, blocks.shape[1], settings, facts, content, key, value, gate, tuple(facts), blocks, *rest,
            outputs=[like(content)],
        )  # fmt: skip
        return by_content, by_key, by_value, None, jnp.zeros_like(gate), None
    outputs = [like(content), like(gate)]
    if isinstance(position, Given):
        zeros: Any = jnp.zeros_like(position.scores)  # the kernel writes only what is seen
        outputs.append(like(zeros))
    else:
        zeros = ()
        outputs += [
            jax.ShapeDtypeStruct((heads, rows, content.shape[1], position.relative.shape[1]), content.dtype),
            like(content),
        ]
    by_content, by_gate, by_scores, *by_query = call(
        position_kernel, blocks.shape[1], settings, facts, key, refs(position), tuple(facts), blocks, *by_pairs, zeros,
        outputs=outputs,
    )  # fmt: skip
    if isinstance(position, Given):
        by_scores = (by_scores * settings.natural).astype(by_scores.dtype)
        return by_content, by_key, by_value, Given(by_scores, None), by_gate, None
    # each direction sums the rows that go by it
    goes = jax.nn.one_hot(position.direction, len(position.relative), dtype=content.dtype)
    query = jnp.einsum("bthc,bn->bthnc", position.query, goes) if len(position.relative) > 1 else position.query
    by_relative = jnp.einsum(
        "hbtp,bthnc->nphc",
        by_scores,
        query.reshape(*query.shape[:3], -1, query.shape[-1]),
        preferred_element_type=jnp.float32,
    )
    by_relative = (by_relative * settings.natural).astype(position.relative.dtype)
    return by_content, by_key, by_value, Fused(*by_query, by_relative, None), by_gate, None


_attend.defvjp(_forward, _backward)
