"""Adaptive input and softmax: frequent words get wide vectors and cheap scores (Grave et al. 2017, arXiv 1609.04309;
Baevski and Auli 2019, arXiv 1809.10853, section 3), with the tied tables and projections of Transformer-XL's code.

Ids are sorted by frequency; `cutoffs` split them into bands, 0 the head and 1, 2, ... the tails:

    log P(w) = log softmax_head(w)                              for w in the head
             = log softmax_head(tail i) + log softmax_i(w)      for w in tail i

A tail is computed only at the positions that need it: they are sorted to the front, and a loop stops after the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from ctx_jax.contract import NO_PENALTIES, Penalties, TokenScores
from ctx_jax.layers.embeddings import in_dtype, padded
from ctx_jax.layers.linear import Linear
from ctx_jax.layers.losses import token_scores, vocabulary_logits
from ctx_jax.layers.parameters import parameter

PARTS = 16
"""A tail is computed for a sixteenth of the positions at a time."""


class Band(NamedTuple):
    """What scores a range of ids: a softmax over the first `size` rows of a table."""

    hidden: jax.Array
    """[B, K, W]: the hidden vectors, projected to the band's width."""
    table: jax.Array
    """[rows, W]"""
    bias: jax.Array
    """[rows]"""
    size: int

    def logits(self) -> jax.Array:
        """[B, K, size] in fp32."""
        return vocabulary_logits(self.hidden, self.table, self.bias)[..., : self.size]

    def constant(self) -> Band:
        """The same, without a gradient."""
        hidden, table, bias = jax.lax.stop_gradient(self[:3])
        return Band(hidden, table, bias, self.size)


def with_tails(head: Band, tails: Band) -> Band:
    """The head's softmax: its own tokens, then one column for each tail, in the padding of its table if they fit."""
    size = head.size + tails.size
    more = max(0, size - len(head.bias))
    table, bias = (
        jnp.pad(own, ((0, more), *((0, 0),) * (own.ndim - 1))).at[head.size : size].set(columns)
        for own, columns in zip(head[1:3], tails[1:3], strict=True)
    )
    return Band(head.hidden, table, bias, size)


def adaptive_log_probabilities(bands: list[Band], tails: Band) -> jax.Array:
    """log P of every id, [B, K, V] in fp32; `tails` are the head's columns for bands[1:], in their order."""
    head = jax.nn.log_softmax(with_tails(bands[0], tails).logits(), axis=-1)
    parts = [head[..., : bands[0].size]]
    for column, band in enumerate(bands[1:], start=bands[0].size):
        parts.append(head[..., column, None] + jax.nn.log_softmax(band.logits(), axis=-1))
    return jnp.concatenate(parts, axis=-1)


def adaptive_scores(bands: list[Band], tails: Band, targets: jax.Array, weights: jax.Array) -> TokenScores:
    """Scores of targets [B, K] by `adaptive_log_probabilities`, which are never held.

    As `losses.token_scores`, and as exact: `total` is differentiable by everything, `best` is of the whole vocabulary.
    `log_normalizer` is the head's.
    """
    starts = list(itertools.accumulate(band.size for band in bands[:-1]))
    number = (targets[..., None] >= jnp.array(starts)).sum(-1)
    head = with_tails(bands[0], tails)
    columns = jnp.where(number == 0, targets, bands[0].size + number - 1)
    scores = token_scores(*head[:3], columns, weights, vocabulary_size=head.size)
    total, nll = scores.total, scores.nll
    for index, (start, band) in enumerate(zip(starts, bands[1:], strict=True), start=1):
        tail = needed_scores(band, targets - start, weights, number == index)
        total, nll = total + tail.total, nll + tail.nll
    return TokenScores(total, nll, scores.log_normalizer, adaptive_best(bands, tails, scores))


def adaptive_best(bands: list[Band], tails: Band, head: TokenScores) -> jax.Array:
    """The most probable id of the whole vocabulary, int32 [B, K].

    It is the head's wherever a token leads there, since no token of a tail is more probable than the tail. Elsewhere a
    tail is looked into if its probability exceeds that of the best token so far.
    """
    start = bands[0].size
    undecided = head.best >= start
    shares = tails.constant().logits() - head.log_normalizer[..., None]
    nothing = jnp.zeros_like(head.nll)

    def leader(band: Band, needed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The band's best row, its logit and the band's normalizer, where needed."""
        band = band.constant()
        scores = needed_scores(band, jnp.zeros_like(head.best), nothing, needed)
        rows = band.table[scores.best].astype(band.hidden.dtype)
        logit = jnp.einsum("bkw,bkw->bk", band.hidden, rows, preferred_element_type=nothing.dtype)
        return scores.best, logit + band.bias[scores.best], scores.log_normalizer

    best, logit, _ = leader(bands[0], undecided)
    value = logit - head.log_normalizer
    for index, band in enumerate(bands[1:]):
        needed = undecided & (shares[..., index] > value)
        row, logit, normalizer = leader(band, needed)
        candidate = shares[..., index] + logit - normalizer
        better = needed & (candidate > value)
        value, best = jnp.where(better, candidate, value), jnp.where(better, start + row, best)
        start += band.size
    return jnp.where(undecided, best, head.best)


def needed_scores(band: Band, targets: jax.Array, weights: jax.Array, needed: jax.Array) -> TokenScores:
    """`losses.token_scores` in one band at the positions that `needed` [B, K] names, and 0 elsewhere.

    Each row's needed positions are sorted to its front, and only as many parts are computed as the fullest row has.
    """
    order = jnp.argsort(~needed, axis=1)

    def forward(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)

    weights = jnp.where(needed, weights, 0)
    scores = _leading(
        forward(band.hidden), *band[1:3], forward(targets), forward(weights), needed.sum(1).max(), band.size
    )
    place = jnp.argsort(order, axis=1)
    rest = (jax.lax.stop_gradient(jnp.where(needed, jnp.take_along_axis(x, place, axis=1), 0)) for x in scores[1:])
    return TokenScores(scores.total, *rest)


def _computed(
    hidden: jax.Array,
    table: jax.Array,
    bias: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    count: jax.Array,
    size: int,
    *,
    differentiate: bool,
) -> tuple[TokenScores, Any]:
    """Scores of the first `count` positions [B, K] (0 after their part) and, if asked, the gradients of their total."""
    positions = targets.shape[1]
    part = -(-positions // PARTS)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    hidden, targets, weights = (
        jnp.pad(x, ((0, 0), (0, -positions % part), *((0, 0),) * (x.ndim - 2))) for x in (hidden, targets, weights)
    )

    def total(hidden: jax.Array, table: jax.Array, bias: jax.Array, weights: jax.Array, targets: jax.Array) -> Any:
        scores = token_scores(hidden, table, bias, targets, weights, vocabulary_size=size)
        return scores.total, scores

    def step(index: jax.Array, carry: Any) -> Any:
        scores, gradients = carry
        start = index * part
        h, t, w = (jax.lax.dynamic_slice_in_dim(x, start, part, axis=1) for x in (hidden, targets, weights))
        place = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        if differentiate:
            (_, new), by = jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(h, table, bias, w, t)
            by_hidden, by_table, by_bias, by_weights = gradients
            gradients = place(by_hidden, by[0]), by_table + by[1], by_bias + by[2], place(by_weights, by[3])
        else:
            _, new = total(h, table, bias, w, t)
        return TokenScores(scores.total + new.total, *map(place, scores[1:], new[1:])), gradients

    zeros = jnp.zeros(targets.shape, wide)
    scores = TokenScores(jnp.zeros((), wide), zeros, zeros, jnp.zeros(targets.shape, jnp.int32))
    gradients = jax.tree.map(jnp.zeros_like, (hidden, table, bias, weights)) if differentiate else None
    scores, gradients = jax.lax.fori_loop(0, -(-count // part), step, (scores, gradients))
    if differentiate:
        by_hidden, by_table, by_bias, by_weights = gradients
        gradients = by_hidden[:, :positions], by_table, by_bias, by_weights[:, :positions]
    return TokenScores(scores.total, *(x[:, :positions] for x in scores[1:])), gradients


def _values(*arguments: Any) -> TokenScores:
    return _computed(*arguments, differentiate=False)[0]


def _forward(*arguments: Any) -> tuple[TokenScores, Any]:
    return _computed(*arguments, differentiate=True)


def _backward(size: int, gradients: Any, cotangents: TokenScores) -> Any:
    hidden, table, bias, weights = jax.tree.map(lambda g: (g * cotangents.total).astype(g.dtype), gradients)
    return hidden, table, bias, None, weights, None


_leading = jax.custom_vjp(_values, nondiff_argnums=(6,))
_leading.defvjp(_forward, _backward)


class Table(nn.Module):
    """A vector and an output bias for each of `size` ids."""

    size: int
    width: int
    embedding_init: Callable[..., jax.Array]
    axes: tuple[str, str] = ("vocabulary", "table")

    def setup(self) -> None:
        self.embedding = parameter(self, "embedding", self.embedding_init, (self.size, self.width), self.axes)
        self.bias = parameter(self, "bias", nn.initializers.zeros, (self.size,), self.axes[:1])

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[...] int -> [..., width] in fp32; NaN where an id is outside of the table, so that it cannot pass unseen."""
        return jnp.take(self.embedding, ids, axis=0, mode="fill")


class AdaptiveVocabulary(nn.Module):
    """Input embedding and output softmax over one set of tables; without cutoffs, the plain tied ones.

    Band i has vectors of `embedding_width // divisor**i` channels and, to and from the model's width, projections:

    - one matrix for all bands if `divisor` is 1 and the widths differ, none if they do not;
    - else one for each band, unless its width is the model's and `project_equal` is False.

    With `tie_projections` the softmax uses the embedding's projections transposed, except in the head (WikiText-103);
    without, its own throughout (One Billion Word). The head's columns for the tails come in the tails' order, as in the
    TensorFlow code; the PyTorch code has them in reverse.
    """

    vocabulary_size: int
    vocabulary_multiple: int
    width: int
    embedding_width: int
    cutoffs: tuple[int, ...]
    divisor: int
    tie_projections: bool
    project_equal: bool
    embedding_init: Callable[..., jax.Array]
    projection_init: Callable[..., jax.Array]
    dtype: str = "float32"

    def setup(self) -> None:
        bounds = (0, *self.cutoffs, self.vocabulary_size)
        self.sizes = [end - start for start, end in itertools.pairwise(bounds)]
        bands = range(len(self.sizes))
        widths = [self.embedding_width // self.divisor**band for band in bands]
        rows = [padded(size, self.vocabulary_multiple) for size in self.sizes]
        self.tables = [Table(rows[band], widths[band], self.embedding_init) for band in bands]
        if self.cutoffs:
            self.tails = Table(len(self.cutoffs), self.embedding_width, self.embedding_init, ("classes", "table"))

        equal_projected = self.divisor != 1 and self.project_equal
        projected = [equal_projected or width != self.width for width in widths]
        inner, outer = ("table", "width"), (self.width,)

        def projection(width: int) -> Linear:
            return Linear((width,), outer, inner, self.projection_init, use_bias=False)

        own = [self.divisor != 1 or band == 0 for band in bands]
        self.input_projections = [projection(widths[i]) if projected[i] and own[i] else None for i in bands]
        tied = [self.tie_projections and band > 0 for band in bands]
        self.output_projections = [projection(widths[i]) if projected[i] and not tied[i] else None for i in bands]

    def input_projection(self, band: int) -> Linear | None:
        return self.input_projections[0 if self.divisor == 1 else band]

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[...] int -> [..., D] in the compute dtype; NaN where an id is outside of the vocabulary's table."""
        total, start = None, 0
        for band, (table, size) in enumerate(zip(self.tables, self.sizes, strict=True)):
            last = band == len(self.sizes) - 1
            inside = (ids >= start) & (last | (ids < start + size))
            x = in_dtype(table(jnp.where(inside, ids - start, 0)), self.dtype)
            projection = self.input_projection(band)
            x = jnp.where(inside[..., None], x if projection is None else projection(x), 0)
            total, start = x if total is None else total + x, start + size
        assert total is not None
        return total

    def bands(self, hidden: jax.Array) -> list[Band]:
        """Each band's view of hidden [..., D]."""
        bands = []
        for band, (table, size) in enumerate(zip(self.tables, self.sizes, strict=True)):
            projection = self.output_projections[band] or self.input_projection(band)
            x = hidden if projection is None else hidden @ projection.kernel.T.astype(hidden.dtype)
            bands.append(Band(x, table.embedding, table.bias, size))
        return bands

    def score(
        self, hidden: jax.Array, targets: jax.Array, weights: jax.Array, penalties: Penalties = NO_PENALTIES
    ) -> TokenScores:
        """hidden [B, K, D], targets and weights [B, K]. Raises ValueError for cutoffs with penalties: smoothing would
        need every tail at every position, and there is no one denominator."""
        head, *tails = self.bands(hidden)
        if not tails:
            return token_scores(*head[:3], targets, weights, penalties, vocabulary_size=head.size)
        if any(penalties):
            raise ValueError(f"an adaptive softmax takes no {penalties}: choose 0 for both, or no cutoffs")
        return adaptive_scores([head, *tails], self.columns(head), targets, weights)

    def columns(self, head: Band) -> Band:
        """What scores the tails as wholes."""
        return Band(head.hidden, self.tails.embedding, self.tails.bias, len(self.cutoffs))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] in fp32: with cutoffs log-probabilities."""
        head, *tails = self.bands(hidden)
        return adaptive_log_probabilities([head, *tails], self.columns(head)) if tails else head.logits()
