"""Negative log-likelihood over a vocabulary, without ever holding the logits of the whole batch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ctx_jax.contract import NO_PENALTIES, Penalties, TokenScores
from ctx_jax.kernels import chose
from ctx_jax.kernels import losses as kernel
from ctx_jax.parallel.sharding import RULES, constrain

LOGITS = 2**28
"""Logits that one device holds at a time when the caller does not choose a chunk: 512 MiB in bf16."""


def vocabulary_logits(
    hidden: jax.Array, table: jax.Array, bias: jax.Array | None, dtype: DTypeLike | None = None
) -> jax.Array:
    """hidden [..., D], table [Vpad, D], bias [Vpad] -> [..., Vpad] in `dtype` (fp32); multiplied in hidden's dtype,
    summed in fp32."""
    dtype = dtype or jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("...d,vd->...v", hidden, table.astype(hidden.dtype), preferred_element_type=dtype)
    return logits if bias is None else (logits + bias).astype(dtype)


def token_scores(
    hidden: jax.Array,
    table: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    penalties: Penalties = NO_PENALTIES,
    *,
    vocabulary_size: int,
    chunk: int | None = None,
) -> TokenScores:
    """How well softmax(hidden table^T + bias) predicts the targets.

    hidden [B, K, D], table [Vpad, D], bias [Vpad], targets and weights [B, K]; of the table's rows only the first
    `vocabulary_size` are predicted. Scores are computed for `chunk` positions of every row at a time, so that a batch
    stays sharded over its rows; by default as many as fill `LOGITS`.

    `total` is differentiable by hidden, table, bias and weights. Its gradient is computed together with its value,
    chunk by chunk (the weights are known, only a scalar factor is not), so that no logits are kept or computed twice;
    without differentiation only the values are computed. A position of weight 0 adds exactly 0 to both, whatever its
    hidden vector holds.

    The penalties change `total` and its gradient, and nothing else: `nll` is without.
    """
    rows, positions, _ = hidden.shape
    shards = math.gcd(rows, batch_shards())
    longest = chunk or max(LOGITS * shards // (rows * table.shape[0]), 1)
    chunks = -(-positions // longest)
    even = -(-positions // chunks)  # chunks of about equal length: the least padding

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * even - positions), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(shards, rows // shards, *x.shape[1:])

    scores = _scores(split(hidden), table, bias, split(targets), split(weights), vocabulary_size, even, penalties)
    rest = (jax.lax.stop_gradient(x.reshape(rows, -1)[:, :positions]) for x in scores[1:])
    return TokenScores(scores.total, *rest)


def batch_shards() -> int:
    """Devices over which the rows of a batch are split."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in RULES["batch"] if axis in mesh.shape)


def _values(*arguments: Any) -> TokenScores:
    return _chunked(*arguments, differentiate=False)[0]


def _forward(*arguments: Any) -> tuple[TokenScores, Any]:
    return _chunked(*arguments, differentiate=True)


def _backward(*arguments: Any) -> Any:
    *_, gradients, cotangents = arguments
    hidden, table, bias, weights = jax.tree.map(lambda g: (g * cotangents.total).astype(g.dtype), gradients)
    return hidden, table, bias, None, weights


_scores = jax.custom_vjp(_values, nondiff_argnums=(5, 6, 7))
_scores.defvjp(_forward, _backward)


def _chunked(
    hidden: jax.Array,
    table: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    vocabulary_size: int,
    chunk: int,
    penalties: Penalties,
    *,
    differentiate: bool,
) -> tuple[TokenScores, Any]:
    """Scores and, if asked, the gradients of their total by hidden [N, R, K, D], table, bias and weights.

    Each of the N shards of the batch (R rows) sums its own gradient of the table, so that devices talk to each other
    once, after the last chunk, and not once a chunk.
    """
    evenly, z_loss = penalties.evenly(vocabulary_size), penalties.z_loss
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    columns = jnp.arange(table.shape[0])
    narrow_table = constrain(table.astype(hidden.dtype), ("logits", "table"))
    near_bias = None if bias is None else constrain(bias, ("logits",))
    table_axes, bias_axes = ("batch", "logits", "table"), ("batch", "logits")

    def of_logits(logits: jax.Array, t: jax.Array, w: jax.Array) -> tuple[Any, ...]:
        """Of each position: negative log-likelihood, that with penalties, log-normaliser, likeliest token, and the
        gradient by its logits if asked."""
        inside = columns < vocabulary_size
        logits = jnp.where(inside, logits.astype(wide), -jnp.inf)
        # compared, not gathered: stays local where the vocabulary is sharded
        target = columns == t[..., None]
        largest = logits.max(-1, keepdims=True)
        exponentials = jnp.exp(logits - largest)
        normalizer = exponentials.sum(-1, keepdims=True)
        log_normalizer = (largest + jnp.log(normalizer))[..., 0]
        nll = log_normalizer - jnp.where(target, logits, 0).sum(-1)
        cost, prediction = nll, logits.argmax(-1).astype(jnp.int32)
        if evenly:
            mean = jnp.where(inside, logits, 0).sum(-1) / vocabulary_size
            cost = (1 - evenly) * nll + evenly * (log_normalizer - mean)
        if z_loss:
            cost = cost + z_loss * log_normalizer**2
        if not differentiate:
            return nll, cost, log_normalizer, prediction, None
        probabilities, wanted, w = exponentials / normalizer, target, w[..., None]
        if evenly:
            wanted = jnp.where(inside, (1 - evenly) * target + evenly / vocabulary_size, 0)
        if z_loss:
            probabilities *= 1 + 2 * z_loss * log_normalizer[..., None]
        return nll, cost, log_normalizer, prediction, jnp.where(w != 0, w * (probabilities - wanted), 0)

    def step(gradients: Any, start: jax.Array) -> tuple[Any, tuple[TokenScores, jax.Array]]:
        h, t, w = (jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=2) for x in (hidden, targets, weights))
        # in training in hidden's dtype: they are written and read several times; all sums stay wide
        dtype = h.dtype if differentiate else wide
        obstacle = kernel.obstacle(jax.eval_shape(partial(vocabulary_logits, dtype=dtype), h, narrow_table, None))
        if differentiate:
            chose("cross-entropy", "Pallas kernel" if obstacle is None else f"XLA: {obstacle}")
        if differentiate and obstacle is None:
            logits = vocabulary_logits(h, narrow_table, None, dtype)
            results = kernel.cross_entropy(logits, near_bias, t, w, penalties, vocabulary_size=vocabulary_size)
        else:
            results = of_logits(vocabulary_logits(h, narrow_table, near_bias, dtype), t, w)
        nll, cost, log_normalizer, prediction, g = results
        scores = TokenScores(jnp.where(w != 0, w * cost, 0), nll, log_normalizer, prediction)
        if differentiate:
            g, h = g.astype(h.dtype), jnp.where(w[..., None] != 0, h, 0)
            by_hidden, by_table, by_bias = gradients
            by_hidden = jax.lax.dynamic_update_slice_in_dim(by_hidden, g @ narrow_table, start, axis=2)
            by_table += jnp.einsum("nrkv,nrkd->nvd", g, h, preferred_element_type=wide)
            by_bias = None if by_bias is None else constrain(by_bias + g.sum((1, 2), dtype=wide), bias_axes)
            gradients = by_hidden, constrain(by_table, table_axes), by_bias
        return gradients, (scores, cost)

    gradients = None
    if differentiate:
        zeros = partial(jnp.zeros, dtype=wide)
        by_table = constrain(zeros((hidden.shape[0], *table.shape)), table_axes)
        by_bias = None if bias is None else constrain(zeros((hidden.shape[0], *bias.shape)), bias_axes)
        gradients = jnp.zeros_like(hidden), by_table, by_bias
    gradients, parts = jax.lax.scan(step, gradients, jnp.arange(0, hidden.shape[2], chunk))
    scores, cost = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(targets.shape), parts)
    if gradients is not None:
        by_hidden, *sums = gradients
        sums = jax.tree.map(lambda g, x: g.sum(0).astype(x.dtype), sums, [table, bias])
        gradients = by_hidden, *sums, cost.astype(weights.dtype)
    return scores._replace(total=scores.total.sum(dtype=wide)), gradients
