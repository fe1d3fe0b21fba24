"""Throughput of GPT-2 124M's generation on one device, and that of others beside it.

    python experiments/benchmarks/generation.py
    python experiments/benchmarks/generation.py --peers experiments/benchmarks/peers_generation.py --rounds 2

Fresh random weights, computed in bf16; `--prompt` random tokens in each row, then `--length` more, greedy, none of them
the end, by `generation.decode.generate` as a user calls it: prompts in, lists of tokens out. One JSON line a batch:

    B, prompt, length   rows, tokens given, tokens generated in each
    ms                  median of a call, reading the prompts included
    tok_s               B length / ms
    step_us             ms / length
    weights_gib_s       bytes of the weights in bf16 / step_us: what a step at batch 1 has to read
    compile_s           the first call, less the median of the others
    peak_gib            the most memory in use at once; null where the device does not tell (CPU)
    device              its kind

With --peers the script named there and this one measure in turn, in processes of their own; it takes the same options
and prints such lines, with `tok_s`. Then a line for each batch has the medians of the rounds:

    theirs, ours        tokens per second
    ratio               ours / theirs
    rounds              {"theirs", "ours"}: tokens per second of each
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Vocabulary
from ctx_jax.experiment import find
from ctx_jax.generation.decode import generate
from ctx_jax.generation.sampling import Sampling
from ctx_jax.layers.parameters import unboxed
from ctx_jax.models.gpt import GptConfig
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.training.state import initial_parameters
from experiments.benchmarks.compare import lines

TINY: dict[str, Any] = {"vocabulary_size": 512, "width": 32, "layers": 2, "heads": 2, "feed_forward": 64}


def endless(config: GptConfig) -> tuple[Any, Any, Vocabulary]:
    """The model, variables, and a vocabulary whose last id, the end, never has the highest logit."""
    model, ids = config.build(), jnp.ones((1, 8), jnp.int32)
    batch = {"tokens": ids, "documents": ids, "positions": ids}
    end = config.vocabulary_size - 1

    @jax.jit
    def init() -> Any:
        params = unboxed(initial_parameters(model, batch, Mesh().build(jax.devices()[:1]), 0))
        table = params["tokens"]["embedding"].at[end].set(0)
        return {"params": {**params, "tokens": {"embedding": table}}}

    special = {"pad": 0, "unknown": 1, "begin": 2, "end": end, "classification": 3, "separator": 4, "mask": 5}
    return model, init(), Vocabulary(config.vocabulary_size, **special)


def measure(config: GptConfig, rows: int, prompt: int, length: int, repeats: int) -> dict[str, Any]:
    """What the module's docstring lists, of one batch."""
    model, variables, vocabulary = endless(config)
    prompts = np.random.default_rng(0).integers(6, vocabulary.end, (rows, prompt)).tolist()
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        texts = generate(
            model, variables, vocabulary, prompts, length=length, sampling=Sampling(temperature=0.0), seed=0
        )
        seconds.append(time.perf_counter() - start)
        assert all(len(text) == length for text in texts)
    median = statistics.median(seconds[1:])
    weights = 2 * sum(leaf.size for leaf in jax.tree.leaves(variables))
    memory = jax.local_devices()[0].memory_stats()
    return {
        "case": "generation",
        "B": rows,
        "prompt": prompt,
        "length": length,
        "ms": round(median * 1e3, 2),
        "tok_s": round(rows * length / median),
        "step_us": round(median / length * 1e6, 1),
        "weights_gib_s": round(weights * length / median / 2**30, 1),
        "compile_s": round(seconds[0] - median, 1),
        "peak_gib": memory and round(memory["peak_bytes_in_use"] / 2**30, 3),
        "device": jax.devices()[0].device_kind,
    }


def in_turn(peers: Path, rounds: int, batches: list[int], options: list[str]) -> list[dict[str, Any]]:
    """Both sides, `rounds` times: a line for each batch. Raises ValueError if a side does not measure one."""
    sides = {"theirs": [sys.executable, "-P", str(peers)], "ours": [sys.executable, __file__]}
    found: dict[str, dict[int, list[int]]] = {side: {} for side in sides}
    for _ in range(rounds):
        for side, command in sides.items():
            measured = {line["B"]: line["tok_s"] for line in lines([*command, "--batch", *map(str, batches), *options])}
            for rows in batches:
                if rows not in measured:
                    raise ValueError(f"{command[-1]} printed no line of batch {rows}: see what it says above")
                found[side].setdefault(rows, []).append(measured[rows])
    results = []
    for rows in batches:
        medians = [statistics.median(found[side][rows]) for side in sides]
        result = {"case": "generation", "B": rows, "theirs": round(medians[0]), "ours": round(medians[1])}
        result |= {"ratio": round(medians[1] / medians[0], 2), "rounds": {side: found[side][rows] for side in sides}}
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], help="rows")
    parser.add_argument("--prompt", type=int, default=32, help="tokens given in each row")
    parser.add_argument("--length", type=int, default=256, help="tokens to generate in each row")
    parser.add_argument("--repeats", type=int, default=5, help="calls that are timed")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to try the script")
    parser.add_argument("--peers", type=Path, help="the other side's script")
    parser.add_argument("--rounds", type=int, default=1, help="how often both sides measure")
    options = parser.parse_args()
    if options.peers:
        if not options.peers.is_file():
            parser.error(f"--peers {options.peers} is not there: name the script of the other side")
        same = ["--prompt", options.prompt, "--length", options.length, "--repeats", options.repeats]
        same += ["--tiny"] * options.tiny
        try:
            results = in_turn(options.peers, options.rounds, options.batch, [str(word) for word in same])
        except ValueError as error:
            sys.exit(f"error: {error}")
        for result in results:
            print(json.dumps(result), flush=True)
        return
    config = replace(find("gpt:gpt2").model, dtype="bfloat16", **(TINY if options.tiny else {}))
    for rows in options.batch:
        print(json.dumps(measure(config, rows, options.prompt, options.length, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
