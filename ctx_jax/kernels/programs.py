"""The programs of `kernels.flash`, which meet tiles (`kernels.tiles`): in Pallas, lowered through Triton."""

from __future__ import annotations

from functools import partial
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
    exp2,
    store,
)


def of_part(settings: Settings, i: Any, run: Any) -> None:
    """Calls `run(part)` for the part that a block of queries belongs to."""
    if len(settings.queries) == 1:
        run(settings.queries[0])
        return
    for part in settings.queries:
        pl.when((part.block <= i) & (i < part.end))(lambda part=part: run(part))


def scores_kernel(content, position, facts, blocks, spans, scores, turned, *, settings: Settings) -> None:
    """The position term of all pairs that meet [H, B, T, S], and its queries [B, T, H, C], both in UNIT."""
    i, h, b = (pl.program_id(n) for n in range(3))
    distances = Distances(Tile(facts, b, h, settings), position, spans, tiles.WRITTEN)

    def run(part: Part) -> None:
        rows = distances.rows(part, i)
        query = distances.query(rows.read(content, b, h))
        store(turned, b, rows.numbers, h, query, None)
        own = jax.lax.div(rows.numbers, tiles.BLOCK)
        first, end = (plgpu.load(blocks.at[b, own, n])[:, None] * tiles.BLOCK for n in (0, 1))

        def block(n: Any, _: None) -> None:
            keys = n * tiles.BLOCK + rows.keys
            inside = (keys >= first) & (keys < end)
            if settings.interpret:  # takes what is negative from the end, although it is not inside
                keys = jnp.where(inside, keys, scores.shape[-1])
            product = dot(query, distances.relative(rows.start + n * tiles.BLOCK).T).astype(scores.dtype)
            numbers = jnp.broadcast_to(rows.numbers[:, None], keys.shape)
            plgpu.store(scores.at[h, b, numbers, keys], product, mask=inside)

        jax.lax.fori_loop(*rows.blocks, block, None)

    of_part(settings, i, run)


def forward_kernel(
    content, key, value, scores, far, segment, facts, blocks, out, normalizer, gate: Any = None, *, settings: Settings
) -> None:  # fmt: skip
    """`scores` are those of `scores_kernel`, None without a position term; `far` is None, or where the blocks end that
    are beyond the clamp [B, T / BLOCK], `PositionTerm.shift`, and what `relative` is there, [H, C]. Also gives the
    queries' segment term, if there is one. Where they are packed, `content` holds all, here and in what follows."""
    i, h, b = (pl.program_id(n) for n in range(3))
    key, value = settings.keys_and_values(content, key, value)
    of_query, of_key, of_value = settings.of_head(h)
    tile = Tile(facts, b, h, settings, queries=i)
    own, keys = pl.ds(i * tiles.BLOCK, tiles.BLOCK), settings.keys

    def run(part: Part) -> None:
        query = part.read(content, b, i, of_query)
        bias = None
        if gate is not None:
            shift, same = (x[h, :].astype(jnp.float32)[None, :] for x in segment)
            bias = ((query.astype(jnp.float32) + shift) * same).sum(1)
            gate[b, h, own] = bias
        first, end, whole, broken = (blocks[b, i, n] for n in range(4))

        def step(j: Any, carry: Any, scores: Any = scores) -> Any:
            largest, total, sums = carry
            term = tile.term(scores, i, j) if scores is not None else None
            seen = (whole <= j) & (j < broken)
            product = tile.scores(tile.dot(query, keys.read(key, b, j, of_key)), term, bias, i, j, seen)
            new = jnp.maximum(largest, product.max(1))
            exponentials = exp2(product * settings.scale - (new * settings.scale)[:, None], settings.interpret)
            shrink = exp2((largest - new) * settings.scale, settings.interpret)
            total = total * shrink + exponentials.sum(1)
            kept = tile.dropout(i, j, exponentials, 0.0).astype(value.dtype)
            sums = sums * shrink[:, None] + dot(kept, keys.read(value, b, j, of_value))
            return new, total, sums

        start = (
            jnp.full(tiles.BLOCK, LOWEST, jnp.float32),
            jnp.zeros(tiles.BLOCK, jnp.float32),
            jnp.zeros(query.shape, jnp.float32),
        )
        if far is not None:
            # what all scores of a query have more only moves their maximum
            largest, *sums = jax.lax.fori_loop(first, far[0][b, i], partial(step, scores=None), start)
            shift, row = (x[h, :].astype(jnp.float32)[None, :] for x in far[1:])
            first, start = far[0][b, i], (largest + ((query.astype(jnp.float32) + shift) * row).sum(1), *sums)
        largest, total, sums = jax.lax.fori_loop(first, end, step, start)
        part.write(out, b, i, h, sums * (settings.kept / jnp.where(total == 0, 1.0, total))[:, None])
        normalizer[b, h, own] = jnp.where(total == 0, -HIDDEN, largest * settings.scale + jnp.log2(total))

    of_part(settings, i, run)


def query_kernel(
    content, key, value, facts, blocks, out_gradient, normalizer, delta, packed, by_content, *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by the queries, where there is neither a position nor a segment term. `packed` is None, or what
    `key_kernel` has written of the same array."""
    i, h, b = (pl.program_id(n) for n in range(3))
    key, value = settings.keys_and_values(content, key, value)
    of_query, of_key, of_value = settings.of_head(h)
    tile = Tile(facts, b, h, settings, queries=i)
    own, [part], keys = pl.ds(i * tiles.BLOCK, tiles.BLOCK), settings.queries, settings.keys
    query, gradient = part.read(content, b, i, of_query), part.read(out_gradient, b, i, h)
    normalizers, deltas = normalizer[b, h, own], delta[b, h, own]
    first, end, whole, broken = (blocks[b, i, n] for n in range(4))

    def step(j: Any, total: jax.Array) -> jax.Array:
        key_block = keys.read(key, b, j, of_key)
        seen = (whole <= j) & (j < broken)
        scores = tile.scores(tile.dot(query, key_block), None, None, i, j, seen)
        probabilities = exp2(scores * settings.scale - normalizers[:, None], settings.interpret)
        by_probabilities = tile.dot(gradient, keys.read(value, b, j, of_value)) * settings.kept - deltas[:, None]
        by_scores = probabilities * tile.dropout(i, j, by_probabilities, -deltas[:, None])
        return total + dot(by_scores.astype(key_block.dtype), key_block)

    total = jax.lax.fori_loop(first, end, step, jnp.zeros(query.shape, jnp.float32))
    part.write(by_content, b, i, of_query, total * settings.natural)


def key_kernel(
    content, key, value, scores, gate, facts, blocks, out_gradient, normalizer, delta,
    *outputs, settings: Settings,
) -> None:  # fmt: skip
    """Gradients by keys and values and, if asked, by the scores of all pairs, 0 where they do not meet. `scores` are
    `scores_kernel`'s, `gate` the forward kernel's."""
    j, h, b = (pl.program_id(n) for n in range(3))
    key, value = settings.keys_and_values(content, key, value)
    by_key, by_value = outputs[:2] if settings.packed == 1 else outputs[:1] * 2
    by_pairs = None if scores is None else outputs[-1]
    of_query, of_key, of_value = settings.of_head(h)
    tile = Tile(facts, b, h, settings, keys=j)
    keys, values = settings.keys.read(key, b, j, of_key), settings.keys.read(value, b, j, of_value)
    carry = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(keys.shape, jnp.float32)

    def write(i: Any, by_scores: jax.Array) -> None:
        if by_pairs is not None:
            rows = jnp.broadcast_to((i * tiles.BLOCK + tile.iota)[None, :], by_scores.shape)
            columns = jnp.broadcast_to((j * tiles.BLOCK + tile.iota)[:, None], by_scores.shape)
            plgpu.store(by_pairs.at[h, b, rows, columns], by_scores)

    def nothing(i: Any, _: None) -> None:
        write(i, jnp.zeros((tiles.BLOCK, tiles.BLOCK), content.dtype))

    for number, part in enumerate(settings.queries):
        first, end, whole, broken = (blocks[b, j, 4 * number + n] for n in range(4))

        def step(i: Any, carry: Any, part: Part = part, whole: Any = whole, broken: Any = broken) -> Any:
            key_sum, value_sum = carry
            at = pl.ds(i * tiles.BLOCK, tiles.BLOCK)
            query, gradient = part.read(content, b, i, of_query), part.read(out_gradient, b, i, h)
            term = tile.term(scores, i, j) if scores is not None else None
            bias = gate[b, h, at] if gate is not None else None
            seen = (whole <= i) & (i < broken)
            product = tile.scores(tile.dot(query, keys), term, bias, i, j, seen)
            probabilities = exp2(product * settings.scale - normalizer[b, h, at][None, :], settings.interpret)
            deltas = delta[b, h, at][None, :] * settings.natural
            by_probabilities = tile.dot(gradient, values) * (settings.kept * settings.natural) - deltas
            by_scores = (probabilities * tile.dropout(i, j, by_probabilities, -deltas)).astype(query.dtype)
            kept = tile.dropout(i, j, probabilities, 0.0)
            value_sum += dot(kept.astype(gradient.dtype), gradient)
            write(i, by_scores)
            key_sum += dot(by_scores, query)
            return key_sum, value_sum

        carry = jax.lax.fori_loop(first, end, step, carry)
        if by_pairs is not None:
            jax.lax.fori_loop(part.block, first, nothing, None)
            jax.lax.fori_loop(end, part.end, nothing, None)
    key_sum, value_sum = carry
    settings.keys.write(by_key, b, j, of_key, key_sum)
    settings.keys.write(by_value, b, j, of_value, value_sum * settings.kept)


def position_kernel(
    content, key, position, segment, facts, spans, by_pairs, by_content, by_gate, sums, *, settings: Settings
) -> None:  # fmt: skip
    """Gradients by the queries, from those by the scores of all pairs. `sums` [B, blocks, 3, H, C] are over a program's
    queries: the gradients of the content term's, of the position term's, and the content queries times their gate's."""
    i, h, b = (pl.program_id(n) for n in range(3))
    tile = Tile(facts, b, h, settings)
    distances = Distances(tile, position, spans, tiles.READ)
    nothing = jnp.zeros((tiles.BLOCK, key.shape[-1]), jnp.float32)
    _, of_key, _ = settings.of_head(h)

    def run(part: Part) -> None:
        rows = distances.rows(part, i)
        own_segment = None if segment is None else tile.query_facts[b, 2, rows.numbers]

        def by_key(j: Any, carry: Any) -> Any:
            content_sum, gate_sum = carry
            pairs = tiles.pairs(by_pairs, b, h, rows.numbers, j * tiles.BLOCK + tile.iota[None, :])
            content_sum += dot(pairs, settings.keys.read(key, b, j, of_key))
            if own_segment is not None:
                same = own_segment[:, None] == tile.key_fact(1, j)[None, :]
                gate_sum += jnp.where(same, pairs.astype(jnp.float32), 0.0).sum(1)
            return content_sum, gate_sum

        def by_distance(n: Any, total: jax.Array) -> jax.Array:
            pairs = tiles.pairs(by_pairs, b, h, rows.numbers, n * tiles.BLOCK + rows.keys)
            return total + dot(pairs, distances.relative(rows.start + n * tiles.BLOCK))

        content_sum, gate_sum = jax.lax.fori_loop(*rows.span, by_key, (nothing, jnp.zeros(tiles.BLOCK, jnp.float32)))
        position_sum = jax.lax.fori_loop(*rows.blocks, by_distance, nothing)
        sums[b, i, 0, h, :], sums[b, i, 1, h, :] = content_sum.sum(0), position_sum.sum(0)
        total = content_sum + position_sum
        if segment is not None:
            total += gate_sum[:, None] * segment.same[h, :].astype(jnp.float32)[None, :]
            by_gate[b, h, rows.numbers] = gate_sum
            sums[b, i, 2, h, :] = (rows.read(content, b, h).astype(jnp.float32) * gate_sum[:, None]).sum(0)
        rows.write(by_content, b, h, total)

    of_part(settings, i, run)


def relative_kernel(query, position, by_pairs, by_relative, *, settings: Settings) -> None:
    """Gradients by the keys of distances, [G, N, P, H, C] in fp32, the first of which is number G - 1. Of a block of
    distances and the rows of B that go by one direction, a program sums every G-th of the consecutive queries, and
    every G-th block of those at any place. `query` are `scores_kernel`'s."""
    block, h, number = (pl.program_id(n) for n in range(3))
    groups, directions = by_relative.shape[:2]
    group, direction = number // directions, number % directions
    begin, end = position.ends[direction], position.ends[direction + 1]
    iota, reach = jnp.arange(tiles.BLOCK, dtype=jnp.int32), groups * tiles.BLOCK
    # query n's distance to key 0 is size - 1 - n: blocks begin where that of the group's queries is a multiple of G
    size = settings.queries[0].size if settings.queries[0].consecutive else 1
    most = -(-size // groups)
    behind = group + (most * groups - size + 1)
    start = block * tiles.BLOCK - behind % groups

    def add(total: jax.Array, n: Any, numbers: jax.Array, keys: Any) -> jax.Array:
        # what is read by what was read is brought late: rows that all go by one direction are in their own order
        b = n if directions == 1 else position.order[n]
        pairs = tiles.pairs(by_pairs, b, h, numbers, keys(b))
        return total + dot(pairs.T, query[b, numbers, h, :])

    def consecutive(part: Part, total: jax.Array) -> jax.Array:
        key = block * tiles.BLOCK + (behind // groups - most) * groups  # of the group's first query, at `start`
        farthest = key + (groups + 1) * (tiles.BLOCK - 1)
        first = jax.lax.div(jnp.maximum(reach - 1 - farthest, 0), reach)
        stop = jax.lax.div(jnp.maximum(settings.keys.blocks * tiles.BLOCK - 1 - key + reach, 0), reach)
        count = jnp.maximum(jnp.minimum(stop, part.blocks // groups) - first, 0)

        def step(n: Any, total: jax.Array) -> jax.Array:
            numbers = (first + n % count) * reach + group + groups * iota
            keys = key + (first + n % count) * reach + groups * iota[:, None] + iota[None, :]
            return add(total, begin + n // count, numbers, lambda _: keys)

        return jax.lax.fori_loop(0, (end - begin) * count, step, total)

    def placed(part: Part, total: jax.Array) -> jax.Array:
        def step(n: Any, total: jax.Array) -> jax.Array:
            n = n * groups + group
            i = n % part.blocks

            def keys(b: Any) -> jax.Array:
                return start + iota[None, :] - position.offsets[b, pl.ds(i * tiles.BLOCK, tiles.BLOCK)][:, None]

            return add(total, begin + n // part.blocks, (part.block + i) * tiles.BLOCK + iota, keys)

        return jax.lax.fori_loop(0, ((end - begin) * part.blocks - group + groups - 1) // groups, step, total)

    total = jnp.zeros((tiles.BLOCK, query.shape[-1]), jnp.float32)
    for part in settings.queries:
        total = consecutive(part, total) if part.consecutive else placed(part, total)
    by_relative[group, direction, pl.ds(start + groups - 1, tiles.BLOCK), h, :] = total * UNIT
