"""The programs of `kernels.flash`, which meet tiles (`kernels.tiles`): in Pallas, lowered through Triton."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ctx_jax.kernels import tiles
from ctx_jax.kernels.tiles import (
    HIDDEN,
    LOWEST,
    UNIT,
    Distances,
    Part,
    Settings,
    Tile,
    dot,
    stride,
    strided_programs,
    unknown_zero,
)


def of_part(settings: Settings, i: Any, run: Any) -> None:
    """Calls `run(part)` for the part that a block of queries belongs to."""
    if len(settings.queries) == 1:
        run(settings.queries[0])
        return
    for part in settings.queries:
        pl.when((part.block <= i) & (i < part.end))(lambda part=part: run(part))


def scores_kernel(content, position, facts, blocks, spans, scores, turned, *, settings: Settings) -> None:
    """The position term of all pairs that meet [H, B, T, S], and its queries [B, T, H, C], both in UNIT. `spans` are
    the key blocks [B, programs, 2] that the consecutive queries of a program meet."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    count = strided_programs(settings.queries[0]) if settings.queries[0].consecutive else 0

    def write(distances: Distances, start: Any, query: jax.Array, rows: Any, keys: Any, first: Any, end: Any) -> None:
        inside = (keys >= first * tiles.BLOCK) & (keys < end * tiles.BLOCK)
        if settings.interpret:  # takes what is negative from the end, although it is not inside
            keys = jnp.where(inside, keys, scores.shape[-1])
        product = dot(query, distances.relative(start).T).astype(scores.dtype)
        plgpu.store(scores.at[h, b, jnp.broadcast_to(rows[:, None], keys.shape), keys], product, mask=inside)

    def consecutive() -> None:
        part, step = settings.queries[0], stride(settings.queries[0])
        begin = i // step * step * tiles.BLOCK + i % step
        rows = begin + step * tile.iota
        distances = Distances(tile, position)
        channels = jnp.arange(content.shape[-1])
        at = jnp.minimum(rows, part.size - 1)
        query = distances.query(content[b, at, h, :])
        real = jnp.broadcast_to((rows < part.blocks * tiles.BLOCK)[:, None], query.shape)
        shape = query.shape
        plgpu.store(
            turned.at[b, jnp.broadcast_to(rows[:, None], shape), h, jnp.broadcast_to(channels[None, :], shape)],
            query,
            mask=real,
        )
        first, end = spans[b, i, 0], spans[b, i, 1]

        def block(n: Any, _: None) -> None:
            keys = n * tiles.BLOCK + step * tile.iota[:, None] + tile.iota[None, :]
            write(distances, n * tiles.BLOCK + part.size - 1 - begin, query, rows, keys, first, end)

        jax.lax.fori_loop(first - step, end, block, None)

    def placed() -> None:
        part, own = settings.queries[-1], i - count + settings.queries[-1].block
        rows = pl.ds(own * tiles.BLOCK, tiles.BLOCK)
        distances = Distances(tile, position)
        offsets = distances.offsets(own)
        query = distances.query(part.read(content, b, own, h))
        turned[b, rows, h, :] = query
        first, end = blocks[b, own, 0], blocks[b, own, 1]

        def block(n: Any, _: None) -> None:
            keys = n * tiles.BLOCK + tile.iota[None, :] - offsets[:, None]
            write(distances, n * tiles.BLOCK, query, own * tiles.BLOCK + tile.iota, keys, first, end)

        jax.lax.fori_loop(*distances.blocks(offsets, first, end), block, None)

    if count:
        pl.when(i < count)(consecutive)
    if not settings.queries[-1].consecutive:
        pl.when(i >= count)(placed)


def forward_kernel(
    content, key, value, scores, segment, facts, blocks, out, normalizer, gate: Any = None, *, settings: Settings
) -> None:  # fmt: skip
    """`scores` are those of `scores_kernel`, None without a position term. Also gives the queries' segment term, if
    there is one."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own, keys = pl.ds(i * tiles.BLOCK, tiles.BLOCK), settings.keys

    def run(part: Part) -> None:
        query = part.read(content, b, i, h)
        bias = None
        if gate is not None:
            shift, same = (x[h, :].astype(jnp.float32)[None, :] for x in segment)
            bias = ((query.astype(jnp.float32) + shift) * same).sum(1)
            gate[b, h, own] = bias
        seen, states = tile.seen(i), tile.row_states(i)
        first, end, zeros = blocks[b, i, 0], blocks[b, i, 1], unknown_zero(seen[0].astype(jnp.float32))[:, None]

        def step(j: Any, carry: Any) -> Any:
            largest, total, sums = carry
            term = tile.term(scores, i, j) if scores is not None else None
            product = tile.scores(tile.dot(query, keys.read(key, b, j, h)), term, bias, seen, i, j)
            new = jnp.maximum(largest, product.max(1))
            exponentials = jnp.exp2(product * settings.scale - (new * settings.scale)[:, None])
            shrink = jnp.exp2((largest - new) * settings.scale)
            total = total * shrink + exponentials.sum(1)
            dropped = tile.dropout(exponentials, zeros, states, j).astype(value.dtype)
            sums = sums * shrink[:, None] + dot(dropped, keys.read(value, b, j, h))
            return new, total, sums

        start = (
            jnp.full(tiles.BLOCK, LOWEST, jnp.float32),
            jnp.zeros(tiles.BLOCK, jnp.float32),
            jnp.zeros(query.shape, jnp.float32),
        )
        largest, total, sums = jax.lax.fori_loop(first, end, step, start)
        part.write(out, b, i, h, sums * (settings.kept / jnp.where(total == 0, 1.0, total))[:, None])
        normalizer[b, h, own] = jnp.where(total == 0, -HIDDEN, largest * settings.scale + jnp.log2(total))

    of_part(settings, i, run)


def query_kernel(
    content, key, value, facts, blocks, out_gradient, normalizer, delta, by_content, *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by the queries, where there is neither a position nor a segment term."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own, [part], keys = pl.ds(i * tiles.BLOCK, tiles.BLOCK), settings.queries, settings.keys
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


def key_kernel(
    content, key, value, scores, gate, facts, blocks, out_gradient, normalizer, delta,
    by_key, by_value, by_pairs: Any = None, *, settings: Settings,
) -> None:  # fmt: skip
    """Gradients by keys and values and, if asked, by the scores of all pairs that meet. `scores` are those of
    `scores_kernel`, `gate` the forward kernel's."""
    j, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=True)
    keys, values = (settings.keys.read(x, b, j, h) for x in (key, value))
    carry = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(keys.shape, jnp.float32)
    for number, part in enumerate(settings.queries):

        def step(i: Any, carry: Any, part: Part = part) -> Any:
            key_sum, value_sum = carry
            at = pl.ds(i * tiles.BLOCK, tiles.BLOCK)
            query, gradient = part.read(content, b, i, h), part.read(out_gradient, b, i, h)
            term = tile.term(scores, i, j) if scores is not None else None
            bias = gate[b, h, at] if gate is not None else None
            seen = None if term is None else tile.seen(i)  # tiles with a position term are hardly ever whole
            product = tile.scores(tile.dot(query, keys), term, bias, seen, i, j)
            probabilities = jnp.exp2(product * settings.scale - normalizer[b, h, at][None, :])
            states, deltas = tile.row_states(i), delta[b, h, at][None, :] * settings.natural
            by_probabilities = tile.dot(gradient, values) * (settings.kept * settings.natural) - deltas
            by_scores = (probabilities * tile.dropout(by_probabilities, -deltas, states, j)).astype(query.dtype)
            kept = tile.dropout(probabilities, unknown_zero(deltas), states, j)
            value_sum += dot(kept.astype(gradient.dtype), gradient)
            if by_pairs is not None:
                rows = jnp.broadcast_to((i * tiles.BLOCK + tile.iota)[None, :], by_scores.shape)
                columns = jnp.broadcast_to((j * tiles.BLOCK + tile.iota)[:, None], by_scores.shape)
                plgpu.store(by_pairs.at[h, b, rows, columns], by_scores)
            key_sum += dot(by_scores, query)
            return key_sum, value_sum

        carry = jax.lax.fori_loop(blocks[b, j, 2 * number], blocks[b, j, 2 * number + 1], step, carry)
    key_sum, value_sum = carry
    settings.keys.write(by_key, b, j, h, key_sum)
    settings.keys.write(by_value, b, j, h, value_sum * settings.kept)


def position_kernel(
    content, key, position, segment, facts, blocks, by_pairs, by_content, by_gate, sums, *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by the queries, from those by the scores of all pairs. `sums` [B, blocks, 3, H, C] are over a block's
    queries: the gradients of the content term's, of the position term's, and the content queries times their gate's."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings, turned=False)
    own, first, end = pl.ds(i * tiles.BLOCK, tiles.BLOCK), blocks[b, i, 0], blocks[b, i, 1]
    distances = Distances(tile, position)
    offsets = distances.offsets(i)
    nothing = jnp.zeros((tiles.BLOCK, key.shape[-1]), jnp.float32)

    def by_key(j: Any, carry: Any) -> Any:
        content_sum, gate_sum = carry
        pairs = by_pairs[h, b, own, pl.ds(j * tiles.BLOCK, tiles.BLOCK)]
        content_sum += dot(pairs, settings.keys.read(key, b, j, h))
        if segment is not None:
            gate_sum += jnp.where(tile.same_segment(i, j), pairs.astype(jnp.float32), 0.0).sum(1)
        return content_sum, gate_sum

    def by_distance(block: Any, total: jax.Array) -> jax.Array:
        pairs = distances.pairs(by_pairs, i, offsets, block, first, end)
        return total + dot(pairs, distances.relative(block * tiles.BLOCK))

    content_sum, gate_sum = jax.lax.fori_loop(first, end, by_key, (nothing, jnp.zeros(tiles.BLOCK, jnp.float32)))
    position_sum = jax.lax.fori_loop(*distances.blocks(offsets, first, end), by_distance, nothing)
    sums[b, i, 0, h, :], sums[b, i, 1, h, :] = content_sum.sum(0), position_sum.sum(0)

    def run(part: Part) -> None:
        total = content_sum + position_sum
        if segment is not None:
            total += gate_sum[:, None] * segment.same[h, :].astype(jnp.float32)[None, :]
            by_gate[b, h, own] = gate_sum
            sums[b, i, 2, h, :] = (part.read(content, b, i, h).astype(jnp.float32) * gate_sum[:, None]).sum(0)
        part.write(by_content, b, i, h, total)

    of_part(settings, i, run)


def relative_kernel(query, position, facts, blocks, by_pairs, by_relative, *, settings: Settings) -> None:
    """Gradients by the keys of distances, [G, N, P, H, C] in fp32: each program sums every G-th row of those that go by
    its direction. `query` are `scores_kernel`'s."""
    block, h, number = (pl.program_id(n) for n in range(3))
    groups, directions = by_relative.shape[:2]
    group, own = number // directions, number % directions
    rows, key_blocks = query.shape[0], by_pairs.shape[-1] // tiles.BLOCK

    def row(n: Any, total: jax.Array) -> jax.Array:
        b = n * groups + group
        distances = Distances(Tile(facts, b, h, settings, turned=False), position)

        def step(i: Any, total: jax.Array) -> jax.Array:
            pairs = distances.pairs(by_pairs, i, distances.offsets(i), block, blocks[b, i, 0], blocks[b, i, 1])
            return total + dot(pairs.T, query[b, pl.ds(i * tiles.BLOCK, tiles.BLOCK), h, :])

        for part in settings.queries:
            begin, stop = jnp.int32(part.block), jnp.int32(part.end)
            if part.consecutive:
                # query block i meets the distances from size - (i + 1) BLOCK on to size - 1 - i BLOCK + all keys
                begin = jnp.maximum((part.size - tiles.BLOCK) // tiles.BLOCK - block, 0)
                stop = jnp.minimum((part.size - 2) // tiles.BLOCK + 1 + key_blocks - block, part.end)
            total = jax.lax.fori_loop(begin, jnp.where(position.direction[b] == own, stop, begin), step, total)
        return total

    total = jnp.zeros((tiles.BLOCK, query.shape[-1]), jnp.float32)
    total = jax.lax.fori_loop(0, (rows - group + groups - 1) // groups, row, total)
    by_relative[group, own, pl.ds(block * tiles.BLOCK, tiles.BLOCK), h, :] = total * UNIT
