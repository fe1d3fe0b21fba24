"""Attention by relative position (Transformer-XL: Dai et al. 2019, arXiv 1901.02860, section 3.3) and by relative
segment (XLNet: Yang et al. 2019, arXiv 1906.08237, section 2.5), over keys that start with a memory.

    score_ij = ((q_i + u) k_j + (q_i + v) r_{i-j} + (q_i + w) e_{same or different segment}) / sqrt(C)

with r_n = W_r R_n, R_n = [sin | cos] of the distance n from query to key, positive where the key comes first.
`relative_attention` is the one place where this is computed: its inputs are what the scores depend on, never a mask or
a score per pair, so that the fused kernel (`kernels.flash`) can stand in for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.contract import Batch, Memory
from ctx_jax.kernels import chose, flash
from ctx_jax.layers.attention import Past, masked_softmax
from ctx_jax.layers.dropout import dropout
from ctx_jax.layers.linear import Linear, side_by_side
from ctx_jax.layers.masks import Segments, Visibility
from ctx_jax.layers.parameters import parameter
from ctx_jax.layers.positions import sinusoids


def distances(queries: int, keys: int, *, causal: bool = False, clamp: int | None = None) -> jax.Array:
    """Distances from query to key in descending order, int32 [P]: keys - 1, ..., 0 and, unless causal, to 1 - queries.

    `clamp` cuts them at that absolute value: what is further away looks equally far.
    """
    n = jnp.arange(keys - 1, -1 if causal else -queries, -1)
    return n if clamp is None else jnp.clip(n, -clamp, clamp)


def encode(n: jax.Array, width: int, dtype: Any) -> jax.Array:
    """R of distances [P] -> [P, width], computed in fp32 at least."""
    return sinusoids(n.astype(jnp.promote_types(dtype, jnp.float32)), width).astype(dtype)


def shift(scores: jax.Array, keys: int) -> jax.Array:
    """[..., T, P] by distance -> [..., T, S] by key, for the last T of S places (appendix B), without a gather.

    Distances descend from S - 1, so row i is wanted from column T - 1 - i on: one column more in front and read with
    rows one shorter, each row starts one further to the left than the row before. Where P = S (causal), what belongs to
    later keys is arbitrary.
    """
    *lead, queries, count = scores.shape
    flat = jnp.pad(scores, [(0, 0)] * (len(lead) + 1) + [(1, 0)]).reshape(*lead, queries * (count + 1))
    return flat[..., queries:].reshape(*lead, queries, count)[..., :keys]


def position_scores(query: jax.Array, relative: jax.Array, keys: int, places: jax.Array | None = None) -> jax.Array:
    """q_i r_{i-j} for every key j: query [B, T, H, C], relative [P, H, C] (or [B, P, H, C]) -> [B, H, T, S].

    `relative` goes by descending distance from S - 1 on. The last queries stand at `places` [B, K], of which P must
    reach the distance of the first from the last key; those before, all if `places` is None, are the last of the S
    places.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    rows = "b" if relative.ndim == 4 else ""
    scores = jnp.einsum(f"bthc,{rows}phc->bhtp", query, relative, preferred_element_type=wide)
    if places is None:
        return shift(scores, keys)
    last = query.shape[1] - places.shape[1]
    slices = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, keys, axis=-1), (1, 0), 1)
    placed = jax.vmap(slices)(scores[:, :, last:], keys - 1 - places)
    return jnp.concatenate([shift(scores[:, :, :last], keys), placed], axis=2) if last else placed


def relative_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    relative: jax.Array,
    content_bias: jax.Array,
    position_bias: jax.Array,
    visibility: Visibility,
    *,
    direction: jax.Array | None = None,
    places: jax.Array | None = None,
    segments: Segments | None = None,
    rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    clamp: int | None = None,
    collect: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of query [B, T, H, C] to key and value [B, S, H, C] -> [B, T, H, C]. Without value, key [B, S, H, 2, C]
    has both, as `side_by_side` makes them.

    relative [P, H, C] by descending distance from S - 1 on (`distances`), or [N, P, H, C], where row b goes by
    `direction[b]`; content_bias u and position_bias v [H, C]. The last K queries stand at `places` [B, K], those before
    (all if it is None) are the last of the S places. `rate` is the dropout on the probabilities; `clamp` says
    that all distances from it on are alike in `relative`. A query that sees nothing gives 0.

    Also returns the probabilities before dropout, [B, H, T, S] in fp32, if they are to be collected; if not, a kernel
    does the work where there is one.
    """
    if not collect:
        reason = flash.obstacle(query, key)
        chose("relative attention", "Pallas kernel" if reason is None else f"XLA: {reason}")
        if reason is None:
            position = flash.Position(relative, content_bias, position_bias, direction, places)
            y = flash.relative_attention(query, key, value, position, visibility, segments, rate, dropout_key, clamp)
            return y, None
    if value is None:
        key, value = cached(key)
    if direction is not None:
        relative = relative[direction]
    wide = jnp.promote_types(query.dtype, jnp.float32)

    def biased(bias: jax.Array) -> jax.Array:
        return query + bias.astype(query.dtype)

    scores = jnp.einsum("bthc,bshc->bhts", biased(content_bias), key, preferred_element_type=wide)
    scores += position_scores(biased(position_bias), relative, key.shape[1], places)
    if segments is not None:
        embedding = segments.embedding.astype(query.dtype)
        either = jnp.einsum("bthc,nhc->nbht", biased(segments.bias), embedding, preferred_element_type=wide)
        same = segments.query[:, None, :, None] == segments.key[:, None, None, :]
        scores += jnp.where(same, either[0, ..., None], either[1, ..., None])
    probabilities = masked_softmax(scores * query.shape[-1] ** -0.5, visibility.mask())
    dropped = dropout(probabilities, rate, dropout_key).astype(value.dtype)
    return jnp.einsum("bhts,bshc->bthc", dropped, value), probabilities


def empty_memory(rows: int, layers: int, length: int, width: int, dtype: Any) -> Memory:
    """A memory that holds nothing: documents 0, so that no query sees it."""
    return Memory(jnp.zeros((rows, layers, length, width), dtype), jnp.zeros((rows, length), jnp.int32))


def remember(memory: jax.Array, window: jax.Array, length: int, reuse: int | None = None) -> jax.Array:
    """The last `length` of [memory | the window's first `reuse` places (all of them)], without a gradient.

    memory [B, M, ...], window [B, T, ...] -> [B, length, ...]; zeros, an empty memory's, stand in front of what is too
    short.
    """
    kept = jnp.concatenate([memory, window[:, :reuse]], axis=1)
    kept = kept[:, max(0, kept.shape[1] - length) :]
    short = length - kept.shape[1]
    return jax.lax.stop_gradient(jnp.pad(kept, ((0, 0), (short, 0), *((0, 0),) * (kept.ndim - 2))))


class Cached(NamedTuple):
    """One layer's part of a `Cache`."""

    past: Past
    """Keys and values, [B, S, H, C]."""
    relative: jax.Array
    """[1, 2 S - 1, H, C]"""


class Cache(NamedTuple):
    """What generation needs of the tokens so far: a window of S slots that fills up, the same ones in every row."""

    past: Past
    """Keys and values, [B, L, S, H, C]."""
    relative: jax.Array
    """[1, L, 2 S - 1, H, C]: r of every distance in the window."""
    documents: jax.Array
    """[B, S] int32: packing ids; 0 = padding of the prompt, or not yet used."""
    used: jax.Array
    """Scalar int32: slots used, by padding too."""

    def take(self) -> Cache:
        """The cache with one slot more, for a token of each row's last document; its keys and values are to follow."""
        last = jax.lax.dynamic_slice_in_dim(self.documents, self.used - 1, 1, axis=1)
        documents = jax.lax.dynamic_update_slice_in_dim(self.documents, jnp.maximum(last, 1), self.used, axis=1)
        return self._replace(documents=documents, used=self.used + 1)

    def rows(self, rows: jax.Array) -> Cache:
        """The cache of these rows."""
        past, documents = jax.tree.map(lambda x: x[rows], (self.past, self.documents))
        return self._replace(past=past, documents=documents)

    def drop(self, count: jax.Array) -> Cache:
        """The cache without its first slots: so many are free at its end."""
        left = jnp.arange(self.documents.shape[1]) < self.documents.shape[1] - count
        documents = jnp.where(left, jnp.roll(self.documents, -count, axis=1), 0)
        past = jax.tree.map(lambda x: jnp.roll(x, -count, axis=2), self.past)
        return self._replace(past=past, documents=documents, used=self.used - count)


def cached(attendable: jax.Array) -> Past:
    """Keys and values [B, S, H, 2, C], for a cache."""
    return Past(attendable[..., 0, :], attendable[..., 1, :])


def write(past: Past, new: Past, slot: jax.Array | int, axis: int) -> Past:
    """The past with new keys and values in `slot` of that axis."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, axis), past, new)


def slots(batch: Batch, length: int) -> tuple[jax.Array, jax.Array]:
    """Tokens and documents of prompts [B, T] in a window of `length` slots: padding, prompt, what is to come.

    Padding may be on either side; all prompts end in slot T - 1. Raises ValueError if `length` is below T.
    """
    tokens, documents = jnp.asarray(batch["tokens"]), jnp.asarray(batch["documents"])
    width = documents.shape[1]
    if length < width:
        raise ValueError(f"length {length} is shorter than the prompts: choose {width} or more")
    columns = jnp.arange(width)
    last = jnp.where(documents != 0, columns, -1).max(1, keepdims=True)
    source = (columns + last + 1) % width
    aligned = (jnp.take_along_axis(x, source, axis=1) for x in (tokens, documents))
    tokens, documents = (jnp.pad(x, ((0, 0), (0, length - width))) for x in aligned)
    return tokens, documents


class RelativeAttention(nn.Module):
    """Projections without biases to `heads` heads, relative attention, projection back."""

    width: int
    heads: int
    kernel_init: Callable[..., jax.Array]
    biases: bool = True
    """Whether u and v are the layer's own; if not, the caller gives them."""
    segments: bool = False
    """Whether there is a segment encoding."""
    dropout: float = 0.0
    """Rate on the probabilities."""

    def setup(self) -> None:
        head = (self.heads, self.width // self.heads)
        into, back = ("width", "heads", "channels"), ("heads", "channels", "width")
        self.query, self.key, self.value, self.position = (
            Linear((self.width,), head, into, self.kernel_init, use_bias=False) for _ in range(4)
        )
        self.output = Linear(head, (self.width,), back, self.kernel_init, use_bias=False)
        if self.biases:
            self.content_bias = parameter(self, "content_bias", self.kernel_init, head, into[1:])
            self.position_bias = parameter(self, "position_bias", self.kernel_init, head, into[1:])
        if self.segments:
            self.segment_bias = parameter(self, "segment_bias", self.kernel_init, head, into[1:])
            axes = ("segments", *into[1:])
            self.segment_embedding = parameter(self, "segment_embedding", self.kernel_init, (2, *head), axes)

    def attendable(self, source: jax.Array) -> jax.Array:
        """[B, S, D] -> its keys and values, [B, S, H, 2, C]."""
        return side_by_side((self.key, self.value), source)

    def __call__(
        self,
        x: jax.Array,
        past: jax.Array | Past,
        relative: jax.Array,
        visibility: Visibility,
        key: jax.Array | None = None,
        *,
        biases: tuple[jax.Array, jax.Array] | None = None,
        direction: jax.Array | None = None,
        places: jax.Array | None = None,
        segments: tuple[jax.Array, jax.Array] | None = None,
        clamp: int | None = None,
        collect: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Queries x [B, T, D] -> [B, T, D] and, to be collected, the probabilities [B, H, T, S]; key None = no dropout.

        `past` are all S keys and values, those of the window included, as of `attendable` or of a cache; `relative`
        is `self.position` of the encoded distances; `biases` are u and v where they are not the layer's own, `segments`
        those of queries [B, T] and keys [B, S].
        """
        content_bias, position_bias = biases or (self.content_bias, self.position_bias)
        y, probabilities = relative_attention(
            self.query(x),
            *(past if isinstance(past, Past) else (past, None)),
            relative,
            content_bias,
            position_bias,
            visibility,
            direction=direction,
            places=places,
            segments=segments and Segments(*segments, self.segment_embedding, self.segment_bias),
            rate=self.dropout,
            dropout_key=key,
            clamp=clamp,
            collect=collect,
        )
        return self.output(y), probabilities
