"""Attention in one pass, forward and backward, for GPUs (Pallas, lowered through Triton); by relative position too.

What `layers.attention` and `layers.relative` compute by whole matrices of scores, here tile by tile (FlashAttention:
Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 2 with the schedule of arXiv 2307.08691): content, position and
segment term, mask, softmax and dropout stay on the chip, all but the position term, which is written where its keys
are; the backward pass computes the probabilities anew from each row's log-normaliser.

All blocks of a row that no query sees are skipped: those after a causal query, before a band, of other documents.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec as P

from ctx_jax import kernels
from ctx_jax.kernels import programs, tiles
from ctx_jax.kernels.blocks import RANKS, beyond, bounds, codes, in_blocks, padded, spans
from ctx_jax.kernels.tiles import NOTHING, Facts, Part, PositionTerm, SegmentTerm, Settings
from ctx_jax.layers.dropout import mix, stirred, words
from ctx_jax.layers.masks import Segments, Visibility
from ctx_jax.parallel.sharding import RULES

WARPS = 4
"""Of a program."""
STAGES = {"forward_kernel": 2, "relative_kernel": 2}
"""Tiles on their way to a program, 3 where a kernel is not named: with 2, three programs of those fit beside each other
instead of two."""
FEW, WIDEST = 16, 128
"""The least queries that are worth a kernel, and the most channels of a head that fit."""
KEPT = 3 * 2**27
"""Bytes of position terms, for each layer, that are kept for the backward pass; more are computed again in it."""


class Position(NamedTuple):
    """What the position term of `relative_attention` needs; the shapes are those of `layers.relative`."""

    relative: jax.Array
    content_bias: jax.Array
    position_bias: jax.Array
    direction: jax.Array | None
    places: jax.Array | None


class Gate(NamedTuple):
    """What the segment term needs, [H, C] each."""

    bias: jax.Array
    """w"""
    same: jax.Array
    """What a key of the query's segment has more than another."""


def obstacle(query: jax.Array, key: jax.Array) -> str | None:
    """Why the twin has to do it; None if nothing stands in the way."""
    if query.shape[1] < FEW:
        return f"fewer than {FEW} queries"
    if key.shape[1] > RANKS - 3:
        return f"{key.shape[1]} keys (the kernel takes {RANKS - 3})"
    if query.shape[-1] > WIDEST:
        return f"heads of {query.shape[-1]} channels (the kernel takes {WIDEST})"
    return kernels.obstacle(query, kernels.HEADS)


def relative_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    position: Position,
    visibility: Visibility,
    segments: Segments | None,
    rate: float,
    dropout_key: jax.Array | None,
    clamp: int | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """What `layers.relative.relative_attention` returns first, over the current mesh: rows and heads are split, as
    everywhere, and nothing is moved. Without `value`, `key` [B, S, H, 2, C] has both. `clamp` promises that all
    distances from it on are alike in `position.relative`."""
    (rows, queries), source = query.shape[:2], key.shape[1]
    key = key.reshape(rows, source, -1, key.shape[-1])
    relative = position.relative if position.relative.ndim == 4 else position.relative[None]
    direction = jnp.zeros(rows, jnp.int32) if position.direction is None else position.direction
    term = Position(relative, position.content_bias, position.position_bias, direction, position.places)
    gate, sides = None, (jnp.zeros((rows, queries), jnp.int32), jnp.zeros((rows, source), jnp.int32))
    if segments is not None:
        # softmax does not see what all keys of a query have in common
        gate, sides = Gate(segments.bias, segments.embedding[0] - segments.embedding[1]), (segments.query, segments.key)
    if position.direction is not None or position.places is not None or (clamp or 0) >= source:
        clamp = None
    return over_mesh(query, key, value, term, gate, visibility, sides, rate, dropout_key, clamp, interpret)


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
    """What `layers.attention.attention` returns first, over the current mesh; queries and keys may be of two texts."""
    sides = jnp.zeros(query.shape[:2], jnp.int32), jnp.zeros(key.shape[:2], jnp.int32)
    return over_mesh(query, key, value, None, None, visibility, sides, rate, dropout_key, None, interpret)


def self_attention(
    packed: jax.Array, visibility: Visibility, rate: float, dropout_key: jax.Array | None, *, interpret: bool = False
) -> jax.Array:
    """`attention` of queries, keys and values [B, T, H, 3, C], that are read where they are and whose gradients are
    written beside each other."""
    rows, length, heads, _, channels = packed.shape
    side = jnp.zeros((rows, length), jnp.int32)
    packed = packed.reshape(rows, length, 3 * heads, channels)
    return over_mesh(packed, None, None, None, None, visibility, (side, side), rate, dropout_key, None, interpret)


def over_mesh(
    query: jax.Array,
    key: jax.Array | None,
    value: jax.Array | None,
    position: Position | None,
    gate: Gate | None,
    visibility: Visibility,
    segments: tuple[jax.Array, jax.Array],
    rate: float,
    dropout_key: jax.Array | None,
    clamp: int | None,
    interpret: bool,
) -> jax.Array:
    """`attend` on each device's rows and heads; nothing is moved. `segments` are those of queries and keys."""
    (rows, queries), keys = segments[0].shape, segments[1].shape[1]
    heads = query.shape[2] // (3 if key is None else 1)
    code, lowest, highest = codes(visibility)
    sees = lowest <= highest
    lowest, reach = jnp.where(sees, lowest, NOTHING), jnp.where(sees, highest - lowest, 0)
    of_queries = [jnp.broadcast_to(x, (rows, queries)) for x in (lowest, reach, segments[0])]
    of_keys = [jnp.broadcast_to(x, (rows, keys)) for x in (code, segments[1])]
    rate, states, columns = 0.0 if dropout_key is None else rate, None, None
    if dropout_key is not None and rate:
        states = stirred((rows, heads, queries, 1), *words(dropout_key))[..., 0]
        columns = mix(jnp.arange(keys, dtype=jnp.uint32))
    facts = Facts(jnp.stack(of_queries, 1).astype(jnp.int32), jnp.stack(of_keys, 1).astype(jnp.int32), states, columns)

    run = partial(attend, rate=rate, clamp=clamp, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(query, key, value, position, gate, facts)
    batch, head = RULES["batch"], RULES["heads"]
    array, by_head, row = P(batch, None, head), P(head), P(batch)
    term: Any = None
    if position is not None:
        places = None if position.places is None else row
        term = Position._make((P(None, None, head), by_head, by_head, row, places))
    specs = (
        array,
        None if key is None else array,
        None if value is None else array,
        term,
        None if gate is None else Gate._make((by_head, by_head)),
        Facts._make((row, row, *((P(batch, head), P()) if rate else (None, None)))),
    )
    split = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=array, check_vma=False)
    return split(query, key, value, position, gate, facts)


def attend(
    query: jax.Array,
    key: jax.Array | None,
    value: jax.Array | None,
    position: Position | None,
    gate: Gate | None,
    facts: Facts,
    *,
    rate: float = 0.0,
    clamp: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of queries [B, T, H, C] to key and value [B, S, H, C] -> [B, T, H, C], by any sizes. Packed: keys
    and values as `key` [B, S, 2 H, C], or all three as `query` [B, T, 3 H, C]. `facts` are those of queries and keys
    alone, without what fills up their blocks. `interpret` runs the kernels anywhere, slowly."""
    queries, keys, channels = query.shape[1], facts.key.shape[2], query.shape[-1]
    packed = 3 if key is None else 2 if value is None else 1
    given = 0 if position is None or position.places is None else position.places.shape[1]
    last = Part(0, queries - given)
    parts = tuple(part for part in (last, Part(queries - given, given, last.end, False)) if part.size)
    settings = Settings(channels**-0.5, rate, parts, Part(0, keys), clamp, packed, interpret)
    facts = Facts(
        in_blocks(facts.query, parts).at[:, 0].set(in_blocks(facts.query[:, 0], parts, NOTHING)),
        in_blocks(facts.key, [settings.keys], -1),
        None if facts.states is None else in_blocks(facts.states, parts),
        None if facts.columns is None else in_blocks(facts.columns, [settings.keys]),
    )
    # the width of a tile is a power of two
    c = max(16, 1 << (channels - 1).bit_length())
    query, key, value, position, gate = jax.tree.map(
        lambda x: padded(x, -1, c) if jnp.issubdtype(x.dtype, jnp.inexact) else x, (query, key, value, position, gate)
    )
    return _attend(query, key, value, position, gate, facts, settings)[..., :channels]


def call(
    kernel: Any,
    grid: tuple[int, int, int],
    settings: Settings,
    *operands: Any,
    outputs: list[Any],
    aliases: dict[int, int] | None = None,
) -> list[jax.Array]:
    """Runs a program for each (block, head, row). `aliases` {operand: output} says which are the same memory."""
    return pl.pallas_call(
        partial(kernel, settings=settings),
        grid=grid,
        out_shape=outputs,
        input_output_aliases=aliases or {},
        interpret=settings.interpret,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES.get(kernel.__name__, 3)),
        name=kernel.__name__,
    )(*operands)


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class Terms(NamedTuple):
    """What the kernels read of the queries; None = there is no such term."""

    content: jax.Array
    """[B, T, H, C]: those of the content term, or what is packed. The others' differ by a vector for each head."""
    position: PositionTerm | None
    segment: SegmentTerm | None


def terms(query: jax.Array, position: Position | None, gate: Gate | None, settings: Settings) -> Terms:
    if position is None:
        return Terms(query, None, None)
    assert position.direction is not None  # relative_attention sees to it
    narrow = position.content_bias.astype(query.dtype)
    # with heads and channels as one axis, so that the product that gives the queries adds the bias itself
    content = (query.reshape(*query.shape[:2], -1) + narrow.reshape(-1)).reshape(query.shape)
    bias = narrow.astype(jnp.float32)
    order, offsets = jnp.argsort(position.direction).astype(jnp.int32), None
    numbers = jnp.arange(len(position.relative) + 1)[:, None]
    ends = (position.direction < numbers).sum(1, dtype=jnp.int32)
    if position.places is not None:
        offsets = in_blocks(settings.keys.size - 1 - position.places, [settings.queries[-1]._replace(first=0)])
    shift = position.position_bias.astype(jnp.float32) - bias
    own = PositionTerm(shift, position.relative, position.direction, order, ends, offsets)
    segment = None
    if gate is not None:
        segment = SegmentTerm(gate.bias.astype(jnp.float32) - bias, gate.same.astype(jnp.float32))
    return Terms(content, own, segment)


def _forward(query: Any, key: Any, value: Any, position: Any, gate: Any, facts: Facts, settings: Settings) -> Any:
    operands = terms(query, position, gate, settings)
    content, own, segment = operands
    blocks, _ = bounds(facts, settings.queries)
    rows, heads, count = len(blocks), query.shape[2] // (3 if settings.packed == 3 else 1), blocks.shape[1]
    near, far = blocks, None
    if own and settings.clamp is not None:
        row = own.relative[0, 0].astype(jnp.float32)
        near = beyond(blocks, settings)
        far = near[..., 0], own.shift, row
    written: Any = position_terms(operands, facts, near, settings) if own else (None, None)
    of_queries = jax.ShapeDtypeStruct((rows, heads, count * tiles.BLOCK), jnp.float32)
    like_queries = jax.ShapeDtypeStruct((*query.shape[:2], heads, query.shape[-1]), query.dtype)
    out, *normalizers = call(
        programs.forward_kernel, (count, heads, rows), settings, content, key, value, written[0], far, segment,
        facts, blocks, outputs=[like_queries, of_queries, *([of_queries] if segment else [])],
    )  # fmt: skip
    kept = written if sum(x.nbytes for x in jax.tree.leaves(written)) <= KEPT else None
    return out, (operands, key, value, position, gate, facts, out, normalizers, kept)


def _forward_in_training(
    query: Any, key: Any, value: Any, position: Any, gate: Any, facts: Facts, settings: Settings
) -> Any:
    """`_forward` where a backward pass follows, which wants the position term of all pairs."""
    return _forward(query, key, value, position, gate, facts, settings._replace(clamp=None))


def position_terms(operands: Terms, facts: Facts, blocks: jax.Array, settings: Settings) -> list[jax.Array]:
    """What `scores_kernel` writes."""
    rows, _, heads, channels = operands.content.shape
    size, keys = blocks.shape[1] * tiles.BLOCK, settings.keys.blocks * tiles.BLOCK
    dtype = operands.content.dtype
    pairs = jax.ShapeDtypeStruct((heads, rows, size, keys), tiles.narrow(dtype))
    queries = jax.ShapeDtypeStruct((rows, size, heads, channels), dtype)
    return call(
        programs.scores_kernel, (blocks.shape[1], heads, rows), settings, operands.content, operands.position, facts,
        blocks, spans(blocks, settings.queries, tiles.WRITTEN), outputs=[pairs, queries],
    )  # fmt: skip


def _backward(settings: Settings, residuals: Any, gradient: jax.Array) -> Any:
    operands, key, value, position, gate, facts, out, (normalizer, *gates), kept = residuals
    content, own, segment = operands
    delta = jnp.einsum("bthc,bthc->bht", out, gradient, preferred_element_type=jnp.float32)
    blocks, key_blocks = bounds(facts, settings.queries)
    rest = gradient, normalizer, in_blocks(delta, settings.queries)
    rows, heads, size = normalizer.shape
    by_query_block, by_key_block = (blocks.shape[1], heads, rows), (key_blocks.shape[1], heads, rows)
    scores, turned = kept or position_terms(operands, facts, blocks, settings)
    outputs = [like(content)] if settings.packed == 3 else [like(x) for x in (key, value) if x is not None]
    if own:
        outputs.append(jax.ShapeDtypeStruct((heads, rows, size, key_blocks.shape[1] * tiles.BLOCK), content.dtype))
    written = call(
        programs.key_kernel, by_key_block, settings, content, key, value, scores, *(gates or [None]), facts, key_blocks,
        *rest, outputs=outputs,
    )  # fmt: skip
    if not own:
        run = partial(call, programs.query_kernel, by_query_block, settings, outputs=[like(content)])
        operands = content, key, value, facts, blocks, *rest
        if settings.packed == 3:  # written beside what the keys' kernel has written
            [by_all] = run(*operands, *written, aliases={len(jax.tree.leaves(operands)): 0})
            return by_all, None, None, None, None, None
        return *run(*operands, None), *written, None, None, None
    *by_keys, by_pairs = written
    by_key, by_value = by_keys if value is not None else (by_keys[0], None)
    sums = jax.ShapeDtypeStruct((rows, blocks.shape[1], 3, *content.shape[2:]), jnp.float32)
    by_query, by_gate, sums = call(
        programs.position_kernel, by_query_block, settings, content, key, own, segment, facts,
        spans(blocks, settings.queries, tiles.READ), by_pairs,
        outputs=[like(content), like(normalizer), sums],
    )  # fmt: skip
    count, groups = position.relative.shape[1], tiles.stride(settings.queries[0], tiles.READ)
    distances = -(-(count + groups - 1) // tiles.BLOCK)
    shape = len(position.relative), distances * tiles.BLOCK + groups - 1, *position.relative.shape[2:]
    [by_distance] = call(
        programs.relative_kernel, (distances, heads, groups * shape[0]), settings, turned, own, by_pairs,
        outputs=[jax.ShapeDtypeStruct((groups, *shape), jnp.float32)],
    )  # fmt: skip
    by_position = Position(
        by_distance.sum(0)[:, groups - 1 : groups - 1 + count].astype(position.relative.dtype),
        sums[:, :, 0].sum((0, 1)).astype(position.content_bias.dtype),
        sums[:, :, 1].sum((0, 1)).astype(position.position_bias.dtype),
        None,
        None,
    )
    if gate is None:
        return by_query, by_key, by_value, by_position, None, None
    total = by_gate.sum((0, 2))[:, None]
    by_same = sums[:, :, 2].sum((0, 1)) + segment.shift * total
    by_segment = Gate((segment.same * total).astype(gate.bias.dtype), by_same.astype(gate.same.dtype))
    return by_query, by_key, by_value, by_position, by_segment, None


_attend: Any = jax.custom_vjp(lambda *operands: _forward(*operands)[0], nondiff_argnums=(6,))
_attend.defvjp(_forward_in_training, _backward)
