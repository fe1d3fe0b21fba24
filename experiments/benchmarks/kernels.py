"""The kernels beside their twins of plain JAX, on this device: are they right, and how fast are they?

    python experiments/benchmarks/kernels.py
    python experiments/benchmarks/kernels.py --cases txl --tiny

Fresh random inputs in bf16, dropout on where the model has it. One JSON line for each case:

    errors          [kernel's, twin's] of outputs and gradients: |x - exact| / |exact|, exact being the twin in fp32
    kernel_ms, twin_ms      forward and backward pass of each (evaluation: forward alone), both in bf16; median of
                            --repeats. With the copy that packs what the models have packed: of queries, keys and values
    device          its kind

Exit code 1 if an error of the kernel is not a number, or above 1e-2 and five times its twin's (the kernel's backward
pass rounds the gradient of each score, the twin's does not). `--tiny` interprets the kernels, on a CPU, in small sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ctx_jax.contract import Penalties
from ctx_jax.kernels import flash, losses, norm
from ctx_jax.layers import attention, relative
from ctx_jax.layers.dropout import dropout, stirred, words
from ctx_jax.layers.masks import Segments, Visibility
from ctx_jax.layers.norm import layer_norm

LARGEST = 1e-2
Function = Callable[..., dict[str, jax.Array]]


class Case(NamedTuple):
    """Sizes in a published training: of one layer's attention; of its LayerNorm, of `heads` times CHANNELS channels; of
    the cross-entropy of all queries over `keys` tokens."""

    rows: int
    queries: int
    keys: int
    heads: int
    rate: float
    kind: str


CASES = {
    "txl": Case(32, 512, 1024, 8, 0.0, "causal"),
    "evaluation": Case(4, 2048, 3848, 8, 0.0, "clamp"),
    "xlnet": Case(32, 597, 512, 12, 0.1, "streams"),
    "bert": Case(64, 512, 512, 12, 0.1, "plain"),
    "gpt_band": Case(8, 2048, 2048, 12, 0.0, "band"),
    "norm": Case(64, 512, 0, 12, 0.1, "norm"),
    "cross_entropy": Case(8, 512, 50_304, 0, 0.0, "cross_entropy"),
}
CHANNELS, WINDOW = 64, 256
NAMES = ("query", "key", "value", "relative", "content_bias", "position_bias", "segment_bias", "segments")
"""Operands of attention."""


def with_gradients(function: Callable[..., jax.Array], names: tuple[str, ...]) -> Function:
    """Of operands: the function's output and, by these names, the gradients of a random sum of it."""

    def run(*operands: jax.Array) -> dict[str, jax.Array]:
        y, pull = jax.vjp(function, *operands)
        weights = jax.random.normal(jax.random.key(1), y.shape).astype(y.dtype)
        return dict(zip(("output", *names), (y, *pull(weights)), strict=True))

    return run


def functions(case: Case, key: jax.Array, interpret: bool) -> tuple[list[jax.Array], Function, Function]:
    """Operands in fp32, and the kernel and its twin as functions of them."""
    kinds = {"norm": norm_functions, "cross_entropy": cross_entropy_functions}
    return kinds.get(case.kind, attention_functions)(case, key, interpret)


def norm_functions(case: Case, key: jax.Array, interpret: bool) -> tuple[list[jax.Array], Function, Function]:
    shape, keys = (case.rows, case.queries, case.heads * CHANNELS), jax.random.split(key, 5)
    shapes = shape, shape, shape[-1:], shape[-1:]
    operands = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]

    def kernel(*x: Any) -> jax.Array:
        states = stirred(shape, *words(keys[4]))
        options: Any = {"epsilon": 1e-6, "rate": case.rate, "both": True, "interpret": interpret}
        return jnp.stack(norm.add_norm(x[0], x[1], states, x[2], x[3], **options))

    def twin(*x: Any) -> jax.Array:
        total = x[0] + dropout(x[1], case.rate, keys[4])
        return jnp.stack([total, layer_norm(total, x[2], x[3], 1e-6)])

    names = ("x", "branch", "scale", "bias")
    return operands, with_gradients(kernel, names), with_gradients(twin, names)


def cross_entropy_functions(case: Case, key: jax.Array, interpret: bool) -> tuple[list[jax.Array], Function, Function]:
    keys, places, size = jax.random.split(key, 4), (case.rows, case.queries), case.keys - 47
    operands = [3 * jax.random.normal(keys[0], (*places, case.keys)), jax.random.normal(keys[1], (case.keys,))]
    targets, weights = jax.random.randint(keys[2], places, 0, size), jax.random.uniform(keys[3], places)
    penalties = Penalties(0.1, 1e-4)

    def kernel(logits: jax.Array, bias: jax.Array) -> dict[str, jax.Array]:
        nll, cost, _, _, gradient = losses.cross_entropy(
            logits, bias, targets, weights, penalties, vocabulary_size=size, interpret=interpret
        )
        return {"nll": nll, "cost": cost, "gradient": gradient}

    def twin(logits: jax.Array, bias: jax.Array) -> dict[str, jax.Array]:
        evenly = penalties.evenly(size)

        def total(logits: jax.Array) -> Any:
            wide = (logits.astype(jnp.float32) + bias)[..., :size]
            normalizer = jax.nn.logsumexp(wide, axis=-1)
            nll = normalizer - jnp.take_along_axis(wide, targets[..., None], -1)[..., 0]
            cost = (1 - evenly) * nll + evenly * (normalizer - wide.mean(-1)) + penalties.z_loss * normalizer**2
            return (weights * cost).sum(), (nll, cost)

        gradient, (nll, cost) = jax.grad(total, has_aux=True)(logits)
        return {"nll": nll, "cost": cost, "gradient": gradient}

    return operands, kernel, twin


def attention_functions(case: Case, key: jax.Array, interpret: bool) -> tuple[list[jax.Array], Function, Function]:
    keys = jax.random.split(key, 12)
    rows, queries, length, heads = case[:4]

    def normal(index: int, *shape: int) -> jax.Array:
        return jax.random.normal(keys[index], shape)

    documents = jnp.ones((rows, length), jnp.int32).at[:, : length // 9].set(2)  # two in a row
    qkv = [normal(n, rows, size, heads, CHANNELS) for n, size in enumerate((queries, length, length))]
    window = min(WINDOW, length // 2) if case.kind == "band" else None
    if case.kind in ("plain", "band"):
        causal = case.kind == "band"
        ranks = jnp.arange(length)[None] if causal else jnp.zeros((1, length), jnp.int32)
        visibility = Visibility(documents, documents, ranks, ranks - (window or 0) + 1 if causal else ranks, ranks)

        def kernel(*x: Any) -> jax.Array:
            return flash.self_attention(jnp.stack(x, 3), visibility, case.rate, keys[11], interpret=interpret)

        def twin(*x: Any) -> jax.Array:
            options: Any = {"causal": causal, "window": window, "rate": case.rate, "dropout_key": keys[11]}
            return attention.attention(x[0], x[1], x[2], documents, documents, **options)[0]

        return qkv, with_gradients(kernel, NAMES[:3]), with_gradients(twin, NAMES[:3])

    order = jax.vmap(lambda key: jax.random.permutation(key, length))(jax.random.split(keys[3], rows))
    streams, last = case.kind == "streams", min(queries, length)  # the queries beyond all places are XLNet's others
    at = jnp.broadcast_to(jnp.arange(length - last, length), (rows, last))
    places = jnp.argsort(order, axis=1)[:, : queries - last] if streams else None
    at = at if places is None else jnp.concatenate([at, places], axis=1)
    ranks = order if streams else jnp.arange(length)[None]
    highest = jnp.take_along_axis(order, at, axis=1).at[:, last:].add(-1) if streams else at
    own = jnp.take_along_axis(documents, at, axis=1)
    visibility = Visibility(own, documents, ranks, jnp.full((1, 1), -1), highest)
    table, clamp = normal(4, 2 * length if streams else length, heads, CHANNELS), None
    if case.kind == "clamp":
        clamp = length // 5
        table = table[jnp.minimum(relative.distances(length, length, causal=True), clamp)]
    biases = [normal(n, heads, CHANNELS) for n in (5, 6, 7)]
    operands = [*qkv, table, *biases, normal(8, 2, heads, CHANNELS)]
    sides = [jax.random.randint(keys[n], (rows, size), 0, 2) for n, size in ((9, queries), (10, length))]

    def segments(*x: Any) -> Segments | None:
        return Segments(sides[0], sides[1], x[1], x[0]) if x else None

    def kernel(*x: Any) -> jax.Array:
        position = flash.Position(x[3], x[4], x[5], None, places)
        packed, given = jnp.stack(x[1:3], 3), segments(*x[6:])
        return flash.relative_attention(
            x[0], packed, None, position, visibility, given, case.rate, keys[11], clamp, interpret=interpret
        )

    def twin(*x: Any) -> jax.Array:
        options: Any = {"places": places, "segments": segments(*x[6:]), "rate": case.rate, "dropout_key": keys[11]}
        return relative.relative_attention(x[0], x[1], x[2], x[3], x[4], x[5], visibility, **options)[0]

    operands = operands if streams else operands[:6]
    if clamp is not None:  # in evaluation alone: with gradients, all position terms are written
        return operands, lambda *x: {"output": kernel(*x)}, lambda *x: {"output": twin(*x)}
    names = NAMES[: len(operands)]
    return operands, with_gradients(kernel, names), with_gradients(twin, names)


def measure(name: str, case: Case, repeats: int, seed: int, interpret: bool) -> dict[str, Any]:
    """What the module's docstring lists, of one case."""
    operands, kernel, twin = functions(case, jax.random.key(seed), interpret)
    narrow = [x.astype(jnp.bfloat16) for x in operands]
    exact = jax.jit(twin)(*(x.astype(jnp.float32) for x in narrow))
    sides = [jax.jit(function) for function in (kernel, twin)]
    ours, theirs = (side(*narrow) for side in sides)
    errors = {name: (error(ours[name], x), error(theirs[name], x)) for name, x in exact.items()}
    return {
        "case": name,
        "errors": errors,
        "kernel_ms": timed(sides[0], narrow, repeats),
        "twin_ms": timed(sides[1], narrow, repeats),
        "device": jax.devices()[0].device_kind,
    }


def error(x: jax.Array, exact: jax.Array) -> float:
    return round(float(jnp.linalg.norm(x.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)), 5)


def timed(function: Function, operands: list[jax.Array], repeats: int) -> float:
    """Median milliseconds of a call, of ten that are waited for together."""
    jax.block_until_ready(function(*operands))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([function(*operands) for _ in range(10)])
        seconds.append((time.perf_counter() - start) / 10)
    return round(statistics.median(seconds) * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="small sizes, interpreted: to try the script on a CPU")
    options = parser.parse_args()
    failed = False
    for name in options.cases:
        case = CASES[name]
        if options.tiny:
            keys = 768 if case.kind == "cross_entropy" else case.keys // 8
            case = case._replace(rows=2, heads=2, queries=max(case.queries // 8, 16), keys=keys)
        result = measure(name, case, options.repeats, options.seed, options.tiny)
        failed |= not all(ours < max(LARGEST, 5 * twin) for ours, twin in result["errors"].values())
        print(json.dumps(result), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
