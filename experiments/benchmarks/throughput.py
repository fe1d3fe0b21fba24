"""Training throughput of the real step on one device, in cases that others can be measured in.

    python experiments/benchmarks/throughput.py --cases bert512 txl
    python experiments/benchmarks/throughput.py --cases gpt2 --data FOLDER --model.scan --training.accumulation 2

An experiment of each model in bf16, with the sizes, batch, dropout and optimizer of a peer's case of that name, goes
through the loader, the corruption and the train step of every run, on the speeches, in a process of its own. What is
left of the command line are fields of the experiments. One JSON line for each case:

    B, T, params_m      rows, positions in a row, million parameters (padding of the vocabulary included)
    ms                  median of a step that is waited for, with the wait for its batch
    tokens_per_second   B T / ms
    free_running        tokens per second where each step is dispatched before the last one's loss is read, as in a run
    mfu                 tokens_per_second * `step_flops_per_token` / ceiling
    ceiling_tflops      matrix products of 8192 x 8192 (CPU: 512 x 512) in the model's dtype, in the same process
    peak_gib            the most memory in use at once; null where the device does not tell (CPU)
    planned_gib         what the compiler planned for the step: arguments, results that are not donated, temporaries
    compile_s           tracing and compiling; little where the compilation cache has the step
    paths               what runs of attention, LayerNorm and cross-entropy: kernels, or why not
    loss, device        of the last step; the kind of the device

BERT's and XLNet's rows are those of their experiments (pairs; for XLNet in both directions), with no short ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ctx_jax import kernels
from ctx_jax.data.corpora import Sotu, TextFiles
from ctx_jax.data.loader import Loader
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.symbols import Characters
from ctx_jax.experiment import Experiment, find
from ctx_jax.options import parse
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.text import open_text
from ctx_jax.training.flops import step_flops_per_token
from ctx_jax.training.optimizers import Adam, AdamW
from ctx_jax.training.schedules import WarmUp
from ctx_jax.training.state import abstract_state, init_state, shardings_of
from ctx_jax.training.step import loader_transform, make_train_step, prepared_shapes


class Case(NamedTuple):
    """Where an experiment differs from the published one."""

    experiment: str
    rows: int
    length: int
    model: dict[str, Any]


LANGUAGE_MODEL = {"vocabulary_size": 50_304, "dropout": 0.0, "attention_dropout": 0.0, "remat": False}
ENCODER = {"pooler": False, "classes": None}
MINI = {"width": 256, "layers": 4, "heads": 4, "feed_forward": 1024, "dtype": "float32"}
CASES = {
    "gpt2": Case("gpt:gpt2", 64, 1024, LANGUAGE_MODEL),
    "gpt2m": Case("gpt:gpt2_medium", 32, 1024, LANGUAGE_MODEL),
    "bert128": Case("bert:base", 256, 128, ENCODER),
    "bert512": Case("bert:base_512", 64, 512, ENCODER),
    "bertL512": Case("bert:large_512", 32, 512, ENCODER),
    "xlnet": Case("xlnet:base", 32, 512, {"memory_length": 0, "reuse_length": None}),
    "txl": Case("transformer_xl:enwik8_base", 32, 512, {"vocabulary_size": 204}),
    "bert_mini": Case("bert:base", 32, 128, {**ENCODER, **MINI}),
}
TINY = {"vocabulary_size": 512, "width": 32, "layers": 2, "heads": 2, "feed_forward": 64}
WARM = 6
"""Steps before those that are timed."""


def experiment_of(name: str, text: str | None, folder: Path, tiny: bool) -> Experiment:
    """The case as an experiment; `tiny` is the same with a model and rows for a CPU."""
    case = CASES[name]
    whole = find(case.experiment)
    rows, length, pieces, sizes = case.rows, case.length, 16_000, dict(case.model)
    if tiny:
        rows, length, pieces, sizes = 4, 64, 340, {**sizes, **TINY}
    reader, objective = replace(whole.data.reader, length=length), whole.objective
    if case.experiment.startswith("bert"):
        reader, objective = replace(reader, short_probability=0.0), replace(objective, relation=0.0)
    if name == "xlnet":
        objective = replace(objective, perm_size=length, num_predict=length // 6)
    if name == "txl":
        sizes["memory_length"] = length
    data = replace(
        whole.data,
        corpus=Sotu() if text is None else TextFiles(text),
        tokenizer=Characters(204) if name == "txl" else SentencePiece(pieces),
        reader=reader,
        batch_size=rows,
        evaluation_batch_size=None,
        folder=folder,
    )
    constant = WarmUp(rate=2.5e-4 if name == "txl" else 1e-4, decay="constant")
    return replace(
        whole,
        name=name,
        data=data,
        model=replace(whole.model, **{"scan": False, **sizes}),
        objective=objective,
        optimizer=(Adam if name == "txl" else AdamW)(schedule=constant),
    )


class Run:
    """An experiment's state, batches and compiled step, made as `training.loop.train` makes them, on one device."""

    def __init__(self, experiment: Experiment) -> None:
        data, objective, seed = experiment.data, experiment.objective, experiment.training.seed
        mesh = experiment.mesh.build(jax.devices()[:1])
        model, optimizer = experiment.model.build(), experiment.optimizer.build(experiment.training.steps)
        store = open_text(data, ("train",))[1]["train"]
        shapes = prepared_shapes(objective, data.reader, store, data.batch_size)
        abstract = abstract_state(model, optimizer, shapes, mesh)
        self.state = init_state(model, optimizer, shapes, mesh, seed)
        self.targets = shapes["targets"].shape[1]
        self.batches = iter(
            Loader(
                store,
                data.reader,
                data.batch_size,
                seed=seed,
                sharding=batch_sharding(mesh),
                transform=loader_transform(objective, store, seed),
            )
        )
        step = make_train_step(
            model,
            objective,
            optimizer,
            store.vocabulary,
            shardings_of(abstract),
            seed=seed,
            accumulation=experiment.training.accumulation,
        )
        batch = next(self.batches)
        start = time.perf_counter()
        program: Any = step.func
        self.compiled = program.lower(*step.args, self.state, batch).compile()
        self.train_step = partial(self.compiled, *step.args)
        self.compile_seconds = time.perf_counter() - start

    def step(self) -> dict[str, Any]:
        """One step on the next batch, dispatched; its metrics."""
        self.state, measured = self.train_step(self.state, next(self.batches))
        return measured

    def waited(self, steps: int) -> list[float]:
        """Seconds of each step that is waited for."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            jax.block_until_ready((self.step(), self.state))
            seconds.append(time.perf_counter() - start)
        return seconds

    def free_running(self, steps: int) -> float:
        """Seconds of so many steps as the loop takes them: the metrics of one are read when the next is dispatched."""
        start, last = time.perf_counter(), None
        for _ in range(steps):
            measured = self.step()
            if last is not None:
                jax.device_get(last)
            last = measured
        jax.block_until_ready((last, self.state))
        return time.perf_counter() - start

    def planned_bytes(self) -> int:
        plan = self.compiled.memory_analysis()
        results = plan.output_size_in_bytes - plan.alias_size_in_bytes
        return plan.argument_size_in_bytes + results + plan.temp_size_in_bytes


def measure(experiment: Experiment, steps: int) -> dict[str, Any]:
    """What the module's docstring lists, of one case."""
    peak = ceiling(512 if jax.default_backend() == "cpu" else 8192, experiment.model.dtype)
    run, rows, length = Run(experiment), experiment.data.batch_size, experiment.data.reader.length
    run.waited(WARM)
    seconds = statistics.median(run.waited(steps))
    free = run.free_running(steps)
    rate = rows * length / seconds
    loss = float(run.step()["loss"])
    run.batches.close()
    operations = step_flops_per_token(experiment.model, experiment.objective, length, run.targets)
    memory = jax.local_devices()[0].memory_stats()
    return {
        "case": experiment.name,
        "B": rows,
        "T": length,
        "params_m": round(sum(leaf.size for leaf in jax.tree.leaves(run.state.params)) / 1e6, 1),
        "ms": round(seconds * 1e3, 2),
        "tokens_per_second": round(rate),
        "free_running": round(rows * length * steps / free),
        "mfu": round(rate * operations / peak, 4),
        "ceiling_tflops": round(peak / 1e12, 3),
        "peak_gib": memory and round(memory["peak_bytes_in_use"] / 2**30, 3),
        "planned_gib": round(run.planned_bytes() / 2**30, 3),
        "compile_s": round(run.compile_seconds, 1),
        "paths": kernels.paths(),
        "loss": round(loss, 3),
        "device": jax.devices()[0].device_kind,
    }


def ceiling(size: int, dtype: str, products: int = 10) -> float:
    """Operations per second of matrix products, one after the other."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), dtype) for key in keys)
    b /= size**0.5  # so that the products stay as they are in size: zeros and infinities would take less power
    chain = jax.jit(lambda a, b: jax.lax.fori_loop(0, products, lambda _, a: a @ b, a))
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        chain(a, b).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return products * 2 * size**3 / statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "bert_mini"])
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed, twice")
    parser.add_argument("--data", type=Path, help="folder of tokenizers and token stores, kept; default: a new one")
    parser.add_argument("--text", help="a file, a folder or a glob of text in place of the speeches")
    parser.add_argument("--tiny", action="store_true", help="a model and rows for a CPU, to try the script")
    parser.add_argument("--alone", choices=CASES, help=argparse.SUPPRESS)  # the case that this process measures
    options, fields = parser.parse_known_args()
    if options.alone:
        try:
            experiment = experiment_of(options.alone, options.text, options.data, options.tiny)
            experiment = parse(experiment, fields, "throughput.py")
            result = measure(experiment, options.steps)
        except Exception as error:
            result = {"case": options.alone, "error": repr(error)[:400]}
        print(json.dumps(result), flush=True)
        sys.exit("error" in result)
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--data", str(options.data or folder), "--alone"]
        codes = [subprocess.run([*command, name], env=environment).returncode for name in options.cases]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
