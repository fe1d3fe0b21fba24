"""Residual connection, dropout and LayerNorm in one pass for GPUs (Pallas, lowered through Triton).

What `layers.norm.add_norm` computes. Its passes over memory are the fewest there are: the forward pass reads what it
adds and writes the sum and its normalisation; the backward pass reads the sum and the gradients, computes mean,
variance and dropout anew, and writes the gradients. Those by gain and bias are summed for SPAN rows by each program,
and then over the programs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ctx_jax import kernels
from ctx_jax.layers.dropout import keep, mix
from ctx_jax.parallel.sharding import over_rows

SPAN = 16
"""Rows that a program goes through in the backward pass, one after the other."""
WIDEST = 4096
"""Channels that fit."""


class Settings(NamedTuple):
    """What is fixed when the kernels are compiled."""

    epsilon: float
    rate: float
    both: bool
    """Whether the sum has a use of its own, and so a gradient."""
    interpret: bool


def obstacle(x: jax.Array) -> str | None:
    """Why the twin has to do it; None if nothing stands in the way."""
    if x.ndim < 2:
        return "a single row"
    if x.shape[-1] > WIDEST:
        return f"{x.shape[-1]} channels (the kernel takes {WIDEST})"
    if (size := x.size // kernels.shards("batch")) >= 2**31:
        return f"{size} values (the kernel takes {2**31 - 1})"
    return kernels.obstacle(x, ("batch",))


class Row:
    """A row of arrays [N, D], as a tile [D rounded up to a power of two]."""

    def __init__(self, like: Any, number: Any) -> None:
        count, self.width = like.shape
        self.number = number
        self.column = jnp.arange(1 << (self.width - 1).bit_length(), dtype=jnp.int32)
        self.inside = self.column < self.width
        if count % SPAN:
            self.inside &= number < count

    def load(self, ref: Any) -> jax.Array:
        """fp32, 0 where there is nothing."""
        return plgpu.load(ref.at[self.number, self.column], mask=self.inside, other=0.0).astype(jnp.float32)

    def store(self, ref: Any, x: jax.Array) -> None:
        plgpu.store(ref.at[self.number, self.column], x.astype(ref.dtype), mask=self.inside)

    def vector(self, ref: Any) -> jax.Array:
        """Of an array [D]: [D rounded up]."""
        return plgpu.load(ref.at[self.column], mask=self.column < self.width, other=0.0).astype(jnp.float32)

    def dropout(self, x: jax.Array, states: Any, rate: float) -> jax.Array:
        """`states` are the rows' stirred numbers, uint32 [N, 1]."""
        if rate == 0.0:
            return x
        state = states[jnp.minimum(self.number, states.shape[0] - 1), 0]
        kept = keep(state, mix(self.column.astype(jnp.uint32)), rate)
        return jnp.where(kept, x * (1.0 / (1.0 - rate)), 0.0)

    def normal(self, x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
        """Of mean 0 and variance 1, and what the distance to the mean was multiplied by."""
        centred = jnp.where(self.inside, x - self.mean(x), 0.0)
        inverse = jax.lax.rsqrt(self.mean(centred * centred) + epsilon)
        return centred * inverse, inverse

    def mean(self, x: jax.Array) -> jax.Array:
        return x.sum() * (1.0 / self.width)


def forward_kernel(x, branch, states, scale, bias, out, total: Any = None, *, settings: Settings) -> None:
    """`branch` and `states` are () where there are none."""
    row = Row(x, pl.program_id(0))
    added = row.load(x)
    if not isinstance(branch, tuple):
        added += row.dropout(row.load(branch), states, settings.rate)
        added = added.astype(x.dtype).astype(jnp.float32)  # what the backward pass finds
        row.store(total, added)
    normal, _ = row.normal(added, settings.epsilon)
    row.store(out, normal * row.vector(scale) + row.vector(bias))


def backward_kernel(
    total, states, scale, by_out, by_total, by_x, by_scale, by_bias, by_branch: Any = None, *, settings: Settings
) -> None:
    """`by_total` is () where the sum has no use of its own; `by_branch` is None where it is `by_x`."""
    program = pl.program_id(0)

    def step(n: Any, sums: Any) -> Any:
        row = Row(total, program * SPAN + n)
        normal, inverse = row.normal(row.load(total), settings.epsilon)
        gradient = row.load(by_out)
        scaled = gradient * gain
        by_sum = inverse * (scaled - row.mean(scaled) - normal * row.mean(scaled * normal))
        if not isinstance(by_total, tuple):
            by_sum += row.load(by_total)
        row.store(by_x, by_sum)
        if by_branch is not None:
            row.store(by_branch, row.dropout(by_sum, states, settings.rate))
        return sums[0] + gradient * normal, sums[1] + gradient

    first = Row(total, program * SPAN)
    gain, zeros = first.vector(scale), jnp.zeros(first.column.shape, jnp.float32)
    sums = jax.lax.fori_loop(0, SPAN, step, (zeros, zeros))
    for ref, x in zip((by_scale, by_bias), sums, strict=True):
        plgpu.store(ref.at[program, first.column], x, mask=first.column < first.width)


def call(kernel: Any, programs: int, settings: Settings, *operands: Any, outputs: list[Any]) -> list[jax.Array]:
    # one for each 1,024 channels: of several, each would wait for the others' sums in every row
    warps = max(1, (1 << (operands[0].shape[1] - 1).bit_length()) // 1024)
    return pl.pallas_call(
        partial(kernel, settings=settings),
        grid=(programs,),
        out_shape=outputs,
        interpret=settings.interpret,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        name=f"norm_{kernel.__name__}",
    )(*operands)


def flat(*arrays: jax.Array | None) -> list[Any]:
    """[..., D] -> [N, D]; None -> ()."""
    return [() if x is None else x.reshape(-1, x.shape[-1]) for x in arrays]


def add_norm(
    x: jax.Array,
    branch: jax.Array | None,
    states: jax.Array | None,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float,
    rate: float,
    both: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x and branch [..., D] -> their sum and its normalisation; `states` [..., 1] are the stirred numbers of the rows,
    if there is dropout. `both` says whether the sum has a use of its own."""
    rate = 0.0 if branch is None or states is None else rate
    settings = Settings(epsilon, rate, both, interpret)
    return _add_norm(x, branch, states if rate else None, scale, bias, settings)


def _forward(x: Any, branch: Any, states: Any, scale: Any, bias: Any, settings: Settings) -> Any:
    def run(rows: Any, vectors: Any) -> Any:
        operands = flat(*rows)
        shape, own = rows[0].shape, jax.ShapeDtypeStruct(operands[0].shape, rows[0].dtype)
        programs = own.shape[0]
        outputs = [own] if branch is None else [own, own]
        out, *total = call(forward_kernel, programs, settings, *operands, *vectors, outputs=outputs)
        return out.reshape(shape), total[0].reshape(shape) if total else rows[0]

    out, total = over_rows(run, (x, branch, states), (scale, bias))
    return (total, out), (total, states, scale, bias, branch is None)


def _backward(settings: Settings, kept: Any, gradients: Any) -> Any:
    total, states, scale, bias, alone = kept
    by_total, by_out = gradients

    def run(rows: Any, vectors: Any) -> Any:
        total, states, by_out, by_total = flat(*rows)
        shape, own = rows[0].shape, jax.ShapeDtypeStruct(total.shape, total.dtype)
        programs = -(-own.shape[0] // SPAN)
        sums = jax.ShapeDtypeStruct((programs, own.shape[1]), jnp.float32)
        outputs = [own, sums, sums, *([own] if settings.rate else [])]
        by_x, by_scale, by_bias, *by_branch = call(
            backward_kernel, programs, settings, total, states, *vectors, by_out, by_total, outputs=outputs
        )
        return by_x.reshape(shape), by_scale, by_bias, (by_branch or [by_x])[0].reshape(shape)

    rows = total, states, by_out, by_total if settings.both else None
    by_x, by_scale, by_bias, by_branch = over_rows(run, rows, (scale,))
    sums = by_scale.sum(0).astype(scale.dtype), by_bias.sum(0).astype(bias.dtype)
    return by_x, None if alone else by_branch, None, *sums


_add_norm: Any = jax.custom_vjp(lambda *operands: _forward(*operands)[0], nondiff_argnums=(5,))
_add_norm.defvjp(_forward, _backward)
