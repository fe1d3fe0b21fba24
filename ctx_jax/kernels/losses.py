"""Softmax cross-entropy over a vocabulary and its gradient in one pass for GPUs (Pallas, lowered through Triton).

What `layers.losses` computes of a chunk of logits in training: a program goes twice through the logits of one position,
the second time while they are still in the cache, and leaves the gradient in their place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ctx_jax import kernels
from ctx_jax.contract import NO_PENALTIES, Penalties
from ctx_jax.kernels.tiles import LOG2E
from ctx_jax.parallel.sharding import over_rows

WIDTH = 2048
"""Logits that a program holds at a time."""
WARPS = 8
"""Warps of a program."""
LOWEST = -1e30
"""Where a running maximum starts."""


def obstacle(logits: jax.Array) -> str | None:
    """Why the twin has to do it; None if nothing stands in the way."""
    if kernels.shards("logits") > 1:
        return f"the vocabulary is split over {kernels.shards('logits')} devices"
    if (size := logits.size // kernels.shards("batch")) >= 2**31:
        return f"{size} logits at a time (the kernel takes {2**31 - 1})"
    return kernels.obstacle(logits, ("batch",))


def cross_entropy_kernel(
    logits, bias, targets, weights, nll, cost, normalizer, prediction, gradient, *, size: int, penalties: Penalties
) -> None:  # fmt: skip
    """logits and gradient [N, Vpad] are one array; bias [Vpad] or (); the others [N]."""
    row = pl.program_id(0)
    padded, evenly, z_loss = logits.shape[1], penalties.evenly(size), penalties.z_loss
    lanes = jnp.arange(WIDTH, dtype=jnp.int32)
    whole, steps = size // WIDTH, -(-padded // WIDTH)

    def load(n: Any, last: bool) -> tuple[jax.Array, jax.Array]:
        """Columns and logits; in the `last` steps not all of them are inside the vocabulary."""
        column = n * WIDTH + lanes
        inside = column < padded if last else None  # a multiple of what one load takes, as the size is not
        other = 0.0 if last else None
        x = plgpu.load(logits.at[row, column], mask=inside, other=other).astype(jnp.float32)
        if not isinstance(bias, tuple):
            x += plgpu.load(bias.at[column], mask=inside, other=other)
        return column, jnp.where(column < size, x, -jnp.inf) if last else x

    def go(step: Any, carry: Any) -> Any:
        carry = jax.lax.fori_loop(0, whole, partial(step, last=False), carry)
        return jax.lax.fori_loop(whole, steps, partial(step, last=True), carry)

    def look(n: Any, carry: Any, last: bool) -> Any:
        """Each lane's largest logit, where it was, the sum of exponentials relative to it and, if it is needed, of the
        logits."""
        largest, best, total, plain = carry
        column, x = load(n, last)
        higher = x > largest
        shrink = jnp.exp2(jnp.abs(x - largest) * -LOG2E)
        total = jnp.where(higher, total * shrink + 1.0, total + shrink)
        if evenly:
            plain += jnp.where(column < size, x, 0.0) if last else x
        return jnp.where(higher, x, largest), jnp.where(higher, column, best), total, plain

    zeros = jnp.zeros(WIDTH, jnp.float32)
    start = jnp.full(WIDTH, LOWEST, jnp.float32), jnp.zeros(WIDTH, jnp.int32), zeros, zeros if evenly else ()
    largest, best, total, plain = go(look, start)
    top = largest.max()
    normal = (total * jnp.exp2((largest - top) * LOG2E)).sum()
    log_normalizer = top + jnp.log(normal)
    target, weight = targets[row], weights[row]
    at = jnp.clip(target, 0, size - 1)
    logit = logits[row, at].astype(jnp.float32)
    if not isinstance(bias, tuple):
        logit += bias[at]
    penalized = log_normalizer - logit
    nll[row] = penalized
    if evenly:
        penalized += evenly * (logit - plain.sum() / size)
    if z_loss:
        penalized += z_loss * log_normalizer * log_normalizer
    cost[row] = penalized
    normalizer[row] = log_normalizer
    prediction[row] = jnp.where(largest == top, best, padded).min()

    # relative to the largest logit: where logits are large, few digits of their normaliser are left
    slope = (1.0 + 2.0 * z_loss * log_normalizer) / normal

    def write(n: Any, carry: Any, last: bool) -> Any:
        column, x = load(n, last)
        probabilities = jnp.exp2((x - top) * LOG2E) * slope
        by_logits = weight * (probabilities - jnp.where(column == target, 1.0 - evenly, 0.0))
        if evenly:
            spread = weight * (evenly / size)
            by_logits -= jnp.where(column < size, spread, 0.0) if last else spread
        by_logits = jnp.where(weight != 0.0, by_logits, 0.0).astype(gradient.dtype)
        plgpu.store(gradient.at[row, column], by_logits, mask=column < padded if last else None)
        return carry

    go(write, 0)


def cross_entropy(
    logits: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    penalties: Penalties = NO_PENALTIES,
    *,
    vocabulary_size: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """logits [..., Vpad] without their bias [Vpad], targets and weights [...] -> negative log-likelihoods, those with
    the penalties, log-normalisers, the likeliest tokens, and the gradient of the weighted sum of the second by the
    logits, in their dtype."""

    def run(rows: Any, bias: Any) -> Any:
        logits, targets, weights = rows
        lead, padded = targets.shape, logits.shape[-1]
        each = jax.ShapeDtypeStruct((targets.size,), jnp.float32)
        flat = logits.reshape(-1, padded)
        best, own = jax.ShapeDtypeStruct(each.shape, jnp.int32), jax.ShapeDtypeStruct(flat.shape, flat.dtype)
        results = pl.pallas_call(
            partial(cross_entropy_kernel, size=vocabulary_size, penalties=penalties),
            grid=(targets.size,),
            out_shape=[each, each, each, best, own],
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
            input_output_aliases={0: 4},
            name=cross_entropy_kernel.__name__,
        )(flat, () if bias is None else bias, targets.reshape(-1), weights.reshape(-1))
        return *(x.reshape(lead) for x in results[:4]), results[4].reshape(logits.shape)

    return over_rows(run, (logits, targets, weights), bias)
