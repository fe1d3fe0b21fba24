"""Attention in one pass, forward and backward, for GPUs (Pallas, lowered through Triton); by relative position too.

What `layers.attention` and `layers.relative` compute by whole matrices of scores, here tile by tile (FlashAttention:
Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 2 with the schedule of arXiv 2307.08691): content, position and
segment term, mask, softmax and dropout stay on the chip; the backward pass computes the probabilities anew from each
row's log-normaliser.

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
from ctx_jax.kernels import tiles
from ctx_jax.kernels.tiles import NOTHING, Facts, Fused, Given, Settings
from ctx_jax.layers.dropout import mix, stirred, words
from ctx_jax.layers.masks import Segments, Visibility
from ctx_jax.parallel.sharding import RULES

WARPS = 4
"""Warps of a program."""
FEW, WIDEST = 16, 128
"""The least queries that are worth a kernel, and the most channels of a head that fit."""
GROUPS = 4
"""Into so many parts the rows are split where the gradient by distance sums over them."""
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
    return kernels.obstacle(query, kernels.HEADS)


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
    rows, queries, heads, _ = query.shape
    keys = key.shape[1]
    relative = position.relative if position.relative.ndim == 4 else position.relative[None]
    direction = jnp.zeros(rows, jnp.int32) if position.direction is None else position.direction
    content, turned = (query + bias.astype(query.dtype) for bias in (position.content_bias, position.position_bias))
    if position.places is None:
        term: Fused | Given = Fused(turned, relative, direction)
    else:
        distances = keys - 1 + -(-keys // tiles.BLOCK) * tiles.BLOCK
        relative = padded(relative, 1, max(relative.shape[1], -(-distances // tiles.BLOCK) * tiles.BLOCK))
        turned = padded(turned, 1, -(-queries // tiles.BLOCK) * tiles.BLOCK)
        if len(relative) > 1:  # one product for all directions, of which each row has one
            goes = jax.nn.one_hot(direction, len(relative), dtype=turned.dtype)
            turned = jnp.einsum("bthc,bn->bthnc", turned, goes).reshape(*turned.shape[:3], -1)
        relative = relative.transpose(1, 2, 0, 3).reshape(relative.shape[1], heads, -1)
        scores = jnp.einsum("bthc,phc->hbtp", turned, relative)
        term = Given(scores, keys - 1 - position.places)
    gate, query_segments, key_segments = None, jnp.zeros((rows, queries), jnp.int32), jnp.zeros((rows, keys), jnp.int32)
    if segments is not None:
        # softmax does not see what all keys of a query have in common
        same = segments.embedding[0] - segments.embedding[1]
        gate = ((query + segments.bias.astype(query.dtype)).astype(jnp.float32) * same).sum(-1).swapaxes(1, 2)
        query_segments, key_segments = segments.query, segments.key

    sides = query_segments, key_segments
    return over_mesh(content, key, value, term, gate, visibility, sides, rate, dropout_key, interpret)


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
    sides = jnp.zeros(query.shape[:2], jnp.int32), jnp.zeros(key.shape[:2], jnp.int32)
    return over_mesh(query, key, value, None, None, visibility, sides, rate, dropout_key, interpret)


def over_mesh(
    content: jax.Array,
    key: jax.Array,
    value: jax.Array,
    term: Fused | Given | None,
    gate: jax.Array | None,
    visibility: Visibility,
    segments: tuple[jax.Array, jax.Array],
    rate: float,
    dropout_key: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """`attend` on each device's rows and heads; nothing is moved. `segments` are those of queries and keys."""
    rows, queries, heads, _ = content.shape
    code, lowest, highest = codes(visibility)
    sees = lowest <= highest
    lowest, reach = jnp.where(sees, lowest, NOTHING), jnp.where(sees, highest - lowest, 0)
    of_queries = [jnp.broadcast_to(x, (rows, queries)) for x in (lowest, reach, segments[0])]
    of_keys = [jnp.broadcast_to(x, (rows, key.shape[1])) for x in (code, segments[1])]
    rate, states, columns = 0.0 if dropout_key is None else rate, None, None
    if dropout_key is not None and rate:
        states = stirred((rows, heads, queries, 1), *words(dropout_key))[..., 0]
        columns = mix(jnp.arange(key.shape[1], dtype=jnp.uint32))
    facts = Facts(jnp.stack(of_queries, 1).astype(jnp.int32), jnp.stack(of_keys, 1).astype(jnp.int32), states, columns)

    run = partial(attend, rate=rate, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(content, key, value, term, gate, facts)
    batch, head = RULES["batch"], RULES["heads"]
    array, scores, row = P(batch, None, head), P(batch, head), P(batch)
    terms: Any = None
    if term is not None:
        terms = (
            Fused._make((array, P(None, None, head), row))
            if isinstance(term, Fused)
            else Given._make((P(head, batch), row))
        )
    specs = (
        array,
        array,
        array,
        terms,
        None if gate is None else scores,
        Facts._make((row, row, *((scores, P()) if rate else (None, None)))),
    )
    split = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=array, check_vma=False)
    return split(content, key, value, term, gate, facts)


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

    `position` has its queries undivided. `gate` [B, H, T] fp32 is added to the products with the keys of a query's own
    segment. Any sizes: what the kernels need longer is padded. `interpret` runs them anywhere, slowly.
    """
    rows, queries, heads, channels = content.shape
    keys = key.shape[1]
    t, s = (-(-size // tiles.BLOCK) * tiles.BLOCK for size in (queries, keys))
    c = max(16, 1 << (channels - 1).bit_length())

    def wide(x: jax.Array, length: int) -> jax.Array:
        return padded(padded(x, -1, c), -3, length)

    query_facts = padded(facts.query, -1, t).at[:, 0, queries:].set(NOTHING)
    key_facts = padded(facts.key, -1, s, -1)
    if isinstance(position, Fused):
        # Row i of the padded queries meets key j at distance t - 1 - i + j. No further than what is seen is needed, and
        # the other half of its last tile.
        front = t - queries
        count = min(t + s, -(-(front + position.relative.shape[1]) // tiles.BLOCK) * tiles.BLOCK + tiles.BLOCK)
        relative = jnp.pad(position.relative, ((0, 0), (front, 0), (0, 0), (0, 0)))[:, :count]
        position = Fused(wide(position.query / tiles.UNIT, t), wide(relative, count), position.direction)
    elif isinstance(position, Given):
        position = Given(padded(position.scores, 2, t), padded(position.offsets, -1, t))
    settings = Settings(channels**-0.5, rate, gate is not None, interpret)
    gate = jnp.zeros((rows, heads, t), jnp.float32) if gate is None else padded(gate, -1, t)
    states, columns = (x if x is None else padded(x, -1, n) for x, n in ((facts.states, t), (facts.columns, s)))
    facts = Facts(query_facts, key_facts, states, columns)
    out = _attend(wide(content, t), wide(key, s), wide(value, s), position, gate, facts, settings)
    return out[:, :queries, :, :channels]


def bounds(facts: Facts) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each block of queries the first block of keys that it meets and the one after the last, [B, T / BLOCK, 2],
    and for each block of keys the blocks of queries that meet it: all that see each other, and what lies between.

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

    def ends(sees: jax.Array) -> jax.Array:
        end = jnp.where(sees.any(-1), sees.shape[-1] - jnp.argmax(sees[..., ::-1], -1), 0)
        return jnp.stack([jnp.argmax(sees, -1), end], -1).astype(jnp.int32)

    blocks = ends(sees)
    j = jnp.arange(sees.shape[2])
    met = (blocks[..., :1] <= j) & (j < blocks[..., 1:])
    whole = extreme(lowest, every, False)[:, :, None] <= extreme(code, key_every, True)[:, None, :]
    whole &= extreme(highest, every, True)[:, :, None] >= extreme(code, key_every, False)[:, None, :]
    return blocks, ends(met.swapaxes(1, 2)), whole.astype(jnp.int32)


def refs(position: Fused | Given | None) -> tuple[jax.Array, ...]:
    """What a kernel reads of the position term."""
    return () if position is None else tuple(position)


def call(
    kernel: Any, grid: tuple[int, int, int], settings: Settings, *operands: Any, outputs: list[Any], stages: int = 3
) -> list[jax.Array]:
    """Runs a program for each (block, head, row). Where the last operand is `position_kernel`'s zeros, its
    third output begins as that."""
    begun = kernel is tiles.position_kernel and not isinstance(operands[-1], tuple)
    return pl.pallas_call(
        partial(kernel, settings=settings),
        grid=grid,
        out_shape=outputs,
        interpret=settings.interpret,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=stages),
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 2} if begun else {},
        name=kernel.__name__,
    )(*operands)


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _forward(content: Any, key: Any, value: Any, position: Any, gate: Any, facts: Facts, settings: Settings) -> Any:
    blocks, _, whole = bounds(facts)
    rows, heads, _ = gate.shape
    out, normalizer = call(
        tiles.forward_kernel, (blocks.shape[1], heads, rows), settings, content, key, value, refs(position), gate,
        (*facts, whole), blocks, outputs=[like(content), like(gate)],
    )  # fmt: skip
    return out, (content, key, value, position, gate, facts, out, normalizer)


def _backward(settings: Settings, residuals: Any, gradient: jax.Array) -> Any:
    content, key, value, position, gate, facts, out, normalizer = residuals
    fused = isinstance(position, Fused)
    delta = jnp.einsum("bthc,bthc->bht", out, gradient, preferred_element_type=jnp.float32)
    blocks, key_blocks, whole = bounds(facts)
    known, rest = (*facts, whole), (gradient, normalizer, delta)
    rows, heads, _ = gate.shape
    by_query_block, by_key_block = (blocks.shape[1], heads, rows), (key_blocks.shape[1], heads, rows)
    outputs = [like(key), like(value)]
    if position is not None:
        outputs.append(jax.ShapeDtypeStruct((heads, rows, content.shape[1], key.shape[1]), content.dtype))
    by_key, by_value, *by_pairs = call(
        tiles.key_kernel, by_key_block, settings, content, key, value, refs(position), gate, known, key_blocks, *rest,
        outputs=outputs, stages=2 if fused else 3,  # more would leave room for one program alone
    )  # fmt: skip
    if position is None:
        [by_content] = call(
            tiles.query_kernel, by_query_block, settings, content, key, value, gate, known, blocks, *rest,
            outputs=[like(content)],
        )  # fmt: skip
        return by_content, by_key, by_value, None, jnp.zeros_like(gate), None
    given = isinstance(position, Given)
    zeros: Any = jnp.zeros_like(position.scores) if given else ()  # the kernel writes only what is seen
    by_content, by_gate, by_term = call(
        tiles.position_kernel, by_query_block, settings, key, refs(position), known, blocks, *by_pairs, zeros,
        outputs=[like(content), like(gate), like(position.scores if given else content)],
    )  # fmt: skip
    if given:
        return by_content, by_key, by_value, Given._make((by_term, None)), by_gate, None
    directions, distances, groups = *position.relative.shape[:2], min(rows, GROUPS)
    sums = jax.ShapeDtypeStruct((groups, *position.relative.shape), jnp.float32)
    [by_relative] = call(
        tiles.relative_kernel, (distances // tiles.BLOCK, heads, groups * directions), settings, position.query,
        position.direction, known, blocks, *by_pairs, outputs=[sums],
    )  # fmt: skip
    by_relative = by_relative.sum(0).astype(position.relative.dtype)
    return by_content, by_key, by_value, Fused._make((by_term, by_relative, None)), by_gate, None


_attend: Any = jax.custom_vjp(lambda *operands: _forward(*operands)[0], nondiff_argnums=(6,))
_attend.defvjp(_forward, _backward)
