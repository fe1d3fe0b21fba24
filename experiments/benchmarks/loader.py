"""How fast prepared batches leave the loader in the cases of throughput.py, by the cores that it may use.

    python experiments/benchmarks/loader.py --cores 1 2
    python experiments/benchmarks/loader.py --against ../before --cases bert512 --data FOLDER --objective.whole-words

Reading, the corruption where it runs in the loader, and the copy to one CPU device; nothing waits for a model. With
`--against`, another checkout of the code takes turns. What is left of the command line are fields of the experiments.
Linux only. One JSON line for each case, checkout and number of cores:

    tokens_per_second   places, padding included; median of the rounds
    per_busy_core       the same by the second of processor time, which other work on the machine changes less
    rounds              tokens_per_second of each
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
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
from throughput import CASES, WARM, experiment_of

import ctx_jax
from ctx_jax.data.loader import Loader
from ctx_jax.options import parse
from ctx_jax.text import open_text
from ctx_jax.training.step import loader_transform


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2, help="of a case in a round")
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--data", type=Path, help="folder of tokenizers and token stores, kept; default: a new one")
    parser.add_argument("--text", help="a file, a folder or a glob of text in place of the speeches")
    parser.add_argument("--tiny", action="store_true", help="few small rows, to try the script")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # measure in this process
    options, fields = parser.parse_known_args()
    if options.alone:
        for name in options.cases:
            print(json.dumps({"case": name, **measure(name, options, fields)}), flush=True)
        return
    available = sorted(os.sched_getaffinity(0))
    checkouts = [Path(ctx_jax.__file__).parent.parent, *([options.against] if options.against else [])]
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--data", str(options.data or folder), "--alone"]
        given = os.environ.get("PYTHONPATH", "")
        for _ in range(options.rounds):
            for cores in options.cores:
                os.sched_setaffinity(0, available[:cores])  # which the processes inherit
                for checkout in checkouts:
                    paths = os.pathsep.join(filter(None, (str(checkout), given)))
                    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
                    lines = subprocess.run(
                        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
                    ).stdout
                    for line in map(json.loads, lines.splitlines()):
                        found.setdefault((line["case"], str(checkout), cores), []).append(line)
    for (case, checkout, cores), lines in found.items():
        rounds = [round(line["tokens_per_second"]) for line in lines]
        medians = {
            name: round(statistics.median(line[name] for line in lines))
            for name in ("tokens_per_second", "per_busy_core")
        }
        print(json.dumps({"case": case, "checkout": checkout, "cores": cores, **medians, "rounds": rounds}), flush=True)


def measure(name: str, options: argparse.Namespace, fields: list[str]) -> dict[str, Any]:
    """One case in this process."""
    experiment = parse(experiment_of(name, options.text, options.data, options.tiny), fields, "loader.py")
    data, seed = experiment.data, experiment.training.seed
    store = open_text(data, ("train",))[1]["train"]
    transform = loader_transform(experiment.objective, store, seed)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    batches = 0
    with closing(iter(Loader(store, data.reader, data.batch_size, seed, sharding, transform=transform))) as loader:
        for _ in range(WARM):
            jax.block_until_ready(next(loader))
        start, used = time.perf_counter(), time.process_time()
        while (wall := time.perf_counter() - start) < options.seconds:
            jax.block_until_ready(next(loader))
            batches += 1
    tokens = batches * data.batch_size * data.reader.length
    return {"tokens_per_second": tokens / wall, "per_busy_core": tokens / (time.process_time() - used)}


if __name__ == "__main__":
    main()
