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
from ctx_jax.kernels.tiles import LOG2E, exp2
from ctx_jax.parallel.sharding import over_rows

WIDTH = 2048
"""Logits that a program holds at a time."""
TOGETHER = 8
"""Of them, those beside each other that one thread reads at once, of which it keeps one maximum and one sum."""
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
    logits, bias, targets, weights, nll, cost, normalizer, prediction, gradient,
    *, size: int, penalties: Penalties, interpret: bool,
) -> None:  # fmt: skip
    """logits and gradient [N, Vpad] are one array; bias [Vpad] or (); the others [N]."""
    row = pl.program_id(0)
    padded, evenly, z_loss = logits.shape[1], penalties.evenly(size), penalties.z_loss
    shape = WIDTH // TOGETHER, TOGETHER
    thread, each = (jax.lax.broadcasted_iota(jnp.int32, shape, n) for n in range(2))
    lanes = thread * TOGETHER + each
    whole, steps = size // WIDTH, -(-padded // WIDTH)

    def load(column: jax.Array, last: bool) -> jax.Array:
        """The logits of columns; in the `last` steps not all of them are inside the vocabulary."""
        inside = column < padded if last else None  # a multiple of what one load takes, as the size is not
        other = 0.0 if last else None
        x = plgpu.load(logits.at[row, column], mask=inside, other=other).astype(jnp.float32)
        if not isinstance(bias, tuple):
            x += plgpu.load(bias.at[column], mask=inside, other=other)
        return jnp.where(column < size, x, -jnp.inf) if last else x

    def exponential(x: jax.Array) -> jax.Array:
        return exp2(x * LOG2E, interpret)

    def go(step: Any, carry: Any) -> Any:
        carry = jax.lax.fori_loop(0, whole, partial(step, last=False), carry)
        return jax.lax.fori_loop(whole, steps, partial(step, last=True), carry)

    def look(n: Any, carry: Any, last: bool) -> Any:
        """Of each row of the tile the largest logit, in which step it was, the sum of exponentials relative to it and,
        if it is needed, of the logits."""
        largest, best, total, plain = carry
        column = n * WIDTH + lanes
        x = load(column, last)
        top = x.max(1)
        best, new = jnp.where(top > largest, n, best), jnp.maximum(largest, top)
        total = total * exponential(largest - new) + exponential(x - new[:, None]).sum(1)
        if evenly:
            plain += (jnp.where(column < size, x, 0.0) if last else x).sum(1)
        return new, best, total, plain

    zeros = jnp.zeros(shape[0], jnp.float32)
    start = jnp.full(shape[0], LOWEST, jnp.float32), jnp.zeros(shape[0], jnp.int32), zeros, zeros if evenly else ()
    largest, best, total, plain = go(look, start)
    top = largest.max()
    normal = (total * exponential(largest - top)).sum()
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
    candidates = best[:, None] * WIDTH + lanes
    likeliest = (load(candidates, True) == top) & (largest == top)[:, None]
    prediction[row] = jnp.where(likeliest, candidates, padded).min()

    # relative to the largest logit: where logits are large, few digits of their normaliser are left
    slope = weight * ((1.0 + 2.0 * z_loss * log_normalizer) / normal)

    def write(n: Any, carry: Any, last: bool) -> Any:
        column = n * WIDTH + lanes
        by_logits = exponential(load(column, last) - top) * slope
        if evenly:
            spread = weight * (evenly / size)
            by_logits -= jnp.where(column < size, spread, 0.0) if last else spread
        inside = column < padded if last else None
        plgpu.store(gradient.at[row, column], by_logits.astype(gradient.dtype), mask=inside)
        return carry

    def erase(n: Any, carry: Any, last: bool) -> Any:
        column = n * WIDTH + lanes
        nothing = jnp.zeros(shape, gradient.dtype)
        plgpu.store(gradient.at[row, column], nothing, mask=column < padded if last else None)
        return carry

    # whatever the logits hold
    jax.lax.cond(weight != 0.0, lambda: go(write, 0), lambda: go(erase, 0))
    if not interpret:
        plgpu.debug_barrier()  # another thread has written there

    @pl.when((weight != 0.0) & (target == at))
    def _() -> None:
        wanted = weight * (1.0 - evenly + evenly / size)
        gradient[row, at] = (jnp.exp(logit - top) * slope - wanted).astype(gradient.dtype)


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
            partial(cross_entropy_kernel, size=vocabulary_size, penalties=penalties, interpret=interpret),
            grid=(targets.size,),
            out_shape=[each, each, each, best, own],
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
            input_output_aliases={0: 4},
            name=cross_entropy_kernel.__name__,
        )(flat, () if bias is None else bias, targets.reshape(-1), weights.reshape(-1))
        return *(x.reshape(lead) for x in results[:4]), results[4].reshape(logits.shape)

    return over_rows(run, (logits, targets, weights), bias)
