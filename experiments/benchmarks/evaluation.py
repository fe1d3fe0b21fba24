"""Evaluation time per token: Transformer-XL with its memory against a vanilla model whose window slides.

    python experiments/benchmarks/evaluation.py --lengths 800 1800 2800 3800 --segment 2048

To predict a token from the L before it, the vanilla model (Al-Rfou et al. 2018, arXiv 1808.04444) reads all L for each
token anew. Transformer-XL (Dai et al. 2019, arXiv 1901.02860, section 4.5, table 9) has them in its memory and moves on
by a segment, in which every token sees L keys, itself included (`same_length`). Both are the 12 layers of enwik8's base
model in bf16, untrained, on random ids, through the evaluation step of every run.

Fair to the vanilla model: it is the decoder of GPT, whose absolute positions cost less than relative ones; it reads so
many windows at once that the device is full (as many positions, --positions, as Transformer-XL reads in its streams);
and it scores only the last position of each. `--clamp` is `clamp_length`: the released code evaluates this model with
820. One JSON line for each length:

    vanilla_us, ours_us     microseconds for each predicted token: the median of steps as evaluation takes them, where
                            the sums of one are fetched while the device computes the next; of rounds in which the two
                            models take turns, the median
    speedup                 vanilla_us / ours_us
    flops_ratio             the same of the operations that each needs (`forward_flops_per_token`)
    share                   speedup / flops_ratio
    paper                   the published speed-up, of other hardware and code
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from ctx_jax import kernels
from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.data.tokenizers import SPECIAL
from ctx_jax.experiment import find
from ctx_jax.layers.parameters import unboxed
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.objectives.causal import Causal
from ctx_jax.objectives.segment import Segment
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.training.flops import forward_flops_per_token
from ctx_jax.training.state import initial_parameters, memory_maker, variables
from ctx_jax.training.step import make_eval_step

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Attention lengths, and how many times faster Transformer-XL was (table 9)."""
TINY = {"width": 32, "layers": 2, "heads": 2, "feed_forward": 64}


@dataclass(frozen=True)
class Last(Causal):
    """Only the last position of a window predicts, as where windows move by one token."""

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        batch = super().prepare(batch, keys, vocabulary)
        last = {name: batch[name][:, -1:] for name in ("targets", "target_weights")}
        return {**batch, **last, "target_positions": batch["positions"][:, -1:]}


def configs(length: int, clamp: int | None, sizes: dict[str, Any]) -> tuple[GptConfig, TransformerXLConfig]:
    """The vanilla model and Transformer-XL, at an attention length."""
    published = find("transformer_xl:enwik8_base").model
    ours = replace(published, memory_length=length, same_length=True, clamp_length=clamp, scan=False, **sizes)
    same = ("vocabulary_size", "width", "layers", "heads", "feed_forward", "dtype", "scan")
    return GptConfig(max_length=length, **{name: getattr(ours, name) for name in same}), ours


def evaluator(config: Any, objective: Causal, rows: int, length: int) -> Callable[[], Any]:
    """A function that evaluates one batch of random ids, each call with the memory that the last one left, and returns
    its sums, which may be still to come."""
    mesh = Mesh().build(jax.devices()[:1])
    model = config.build()
    ids = jax.random.randint(jax.random.key(0), (rows, length + 1), len(SPECIAL), config.vocabulary_size)
    ones = jnp.ones((rows, length), jnp.int32)
    batch = {
        "tokens": ids[:, :-1],
        "next_tokens": ids[:, 1:],
        "documents": ones,
        "next_documents": ones,
        "positions": jnp.tile(jnp.arange(length), (rows, 1)),
        "example": jnp.arange(rows),
    }
    params = jax.jit(lambda: unboxed(initial_parameters(model, batch, mesh, 0)))()
    step = make_eval_step(model, objective, Vocabulary(config.vocabulary_size, **SPECIAL), mesh)
    memory = memory_maker(model, rows, mesh)()

    def evaluate() -> Any:
        nonlocal memory
        sums, memory = step(variables(params, {}), memory, batch)
        return sums

    return evaluate


def seconds(evaluate: Callable[[], Any], warm: int, steps: int) -> float:
    """The median from one call's sums to the next one's, after `warm` calls: as `perplexity.accumulate` goes."""
    fetched, latest = [], evaluate()
    for _ in range(warm + steps):
        sums = evaluate()
        jax.device_get(latest)
        fetched.append(time.perf_counter())
        latest = sums
    return statistics.median(end - start for start, end in pairwise(fetched[warm - 1 :]))


def measure(
    length: int, segment: int, clamp: int | None, positions: int, steps: int, rounds: int, sizes: dict[str, Any]
) -> dict[str, Any]:
    """One attention length."""
    vanilla, ours = configs(length, clamp, sizes)
    windows, streams = max(1, positions // length), max(1, positions // segment)
    models = evaluator(vanilla, Last(), windows, length), evaluator(ours, Segment(), streams, segment)
    full = -(-length // segment)  # segments until no place of the memory is empty
    timed = [[seconds(evaluate, full + 3, steps) for evaluate in models] for _ in range(rounds)]
    of_batch = [statistics.median(times) for times in zip(*timed, strict=True)]
    by_window, by_segment = of_batch[0] / windows, of_batch[1] / (streams * segment)
    operations = length * forward_flops_per_token(vanilla, length, targets=1), forward_flops_per_token(ours, segment)
    ratio = operations[0] / operations[1]
    return {
        "length": length,
        "windows": windows,
        "streams": streams,
        "segment": segment,
        "clamp": clamp,
        "vanilla_us": round(by_window * 1e6, 3),
        "ours_us": round(by_segment * 1e6, 4),
        "speedup": round(by_window / by_segment, 1),
        "flops_ratio": round(ratio, 1),
        "share": round(by_window / by_segment / ratio, 3),
        "paper": PAPER.get(length),
        "paths": kernels.paths(),
        "device": jax.devices()[0].device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(PAPER), help="attention lengths")
    parser.add_argument("--segment", type=int, default=512, help="tokens that Transformer-XL moves on by")
    parser.add_argument("--clamp", type=int, default=820, help="distances beyond it look alike; 0 = none do")
    parser.add_argument("--positions", type=int, default=65_536, help="positions in a batch of either model")
    parser.add_argument("--steps", type=int, default=20, help="batches that are timed in a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, in which the two models take turns")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to try the script")
    options = parser.parse_args()
    for length in options.lengths:
        sizes = TINY if options.tiny else {}
        clamp = options.clamp or None
        result = measure(length, options.segment, clamp, options.positions, options.steps, options.rounds, sizes)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
