"""How training speed grows with the number of devices, at a fixed batch for each.

    python experiments/benchmarks/scaling.py --devices 1 2

Trains GPT-2 124M and BERT base on the speeches with the real command, in bf16 without dropout, on one device and on
several, data parallel and with sharded parameters (fsdp), and prints one JSON line for each run:

    tokens_per_second   of all steps but the first, which compiles
    efficiency          of N devices: tokens_per_second / (N * that of one device with its share of the batch)
    loss_difference     largest relative difference of the training loss from that of one device that accumulates the
                        gradient of the same batch

A run of several GPUs sees that many of this machine's (CUDA_VISIBLE_DEVICES); on a CPU devices are simulated, which
shows that it works and nothing of its speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ctx_jax.data.corpora import Sotu
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.experiment import Experiment, find, save

CASES = {"gpt2": ("gpt:gpt2", 16, 1024), "bert": ("bert:base_512", 32, 512)}
"""Experiment, rows for each device, positions in a row."""
LOGGED = 10
"""Steps between two records of the loss."""


def experiment_of(name: str, rows: int, length: int, steps: int) -> Experiment:
    """A published size on the speeches, without what is random and without its schedule's long warm-up."""
    whole = find(name)
    data = replace(
        whole.data,
        corpus=Sotu(),
        tokenizer=SentencePiece(16_000),
        reader=replace(whole.data.reader, length=length),
        batch_size=rows,
        evaluation_batch_size=rows,
    )
    return replace(
        whole,
        data=data,
        model=replace(whole.model, dropout=0.0, attention_dropout=0.0, scan=False),
        optimizer=replace(whole.optimizer, schedule=replace(whole.optimizer.schedule, warmup=10, steps=10_000)),
        training=replace(
            whole.training, steps=steps, log_every=LOGGED, evaluate_every=0, evaluate_batches=1, checkpoint_every=0
        ),
    )


def train(experiment: Experiment, devices: int, fsdp: int, folder: Path) -> tuple[list[float], float]:
    """(training losses, tokens per second) of one run on so many devices."""
    file, run = folder / "experiment.json", folder / f"{experiment.name}-{devices}-{fsdp}-{experiment.data.batch_size}"
    save(replace(experiment, data=replace(experiment.data, folder=folder / "data")), file)
    shown = ",".join(map(str, range(devices)))
    simulated = f"--xla_force_host_platform_device_count={devices}" if os.environ.get("JAX_PLATFORMS") == "cpu" else ""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": shown,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {simulated}".strip(),
    }
    command = [sys.executable, "-m", "ctx_jax", "train", str(file), "--run", str(run), "--mesh.fsdp", str(fsdp)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["kind"] == "train"]
    return [record["loss"] for record in records], records[-1]["tokens_per_second"]


def measure(name: str, devices: list[int], steps: int, folder: Path) -> Iterator[dict[str, object]]:
    """The runs of one case: one device with its share of each batch, and with the whole of it in parts, then
    several."""
    experiment, rows, length = CASES[name]
    losses, alone = train(experiment_of(experiment, rows, length, steps), 1, 1, folder)
    yield {"case": name, "devices": 1, "rows": rows, "tokens_per_second": alone, "loss": losses[-1]}
    for count in (count for count in devices if count > 1):
        whole = experiment_of(experiment, rows * count, length, steps)
        parts = replace(whole, training=replace(whole.training, accumulation=count))
        reference, _ = train(parts, 1, 1, folder)
        for kind, fsdp in (("data", 1), ("fsdp", count)):
            losses, speed = train(whole, count, fsdp, folder)
            yield {
                "case": name,
                "devices": count,
                "mesh": kind,
                "rows": rows * count,
                "tokens_per_second": speed,
                "efficiency": round(speed / (count * alone), 3),
                "loss": losses[-1],
                "loss_difference": max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            for result in measure(name, options.devices, options.steps, Path(folder)):
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
