"""Pretrains four language models on the State of the Union speeches, in about five minutes on two cores.

Causal (GPT-2), segment-recurrent (Transformer-XL), masked with next-sentence prediction (BERT) and permutation LM
(XLNet), each the tiny() of its experiment file, read the same number of training tokens. They are scored on held-out
speeches, beside a unigram and a bigram that were counted on the very tokens that the model read in training and are
scored on the very targets that it had to predict.

    python experiments/quickstart.py

prints a table, writes runs/quickstart/report.html, and ends in one JSON line on stdout. Runs that are there already
are not trained again.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ctx_jax import runs
from ctx_jax.analysis import report
from ctx_jax.contract import Batch
from ctx_jax.evaluation.ngrams import Bigram, Unigram, transitions
from ctx_jax.experiment import Experiment, find
from ctx_jax.text import open_text
from ctx_jax.training.loop import Interrupted
from ctx_jax.training.step import prepare

FOLDER = Path("runs/quickstart")
OBJECTIVES = {
    "causal": "gpt:tiny",
    "segment": "transformer_xl:tiny",
    "masked": "bert:tiny",
    "permutation": "xlnet:tiny",
}


def main() -> None:
    start = time.monotonic()
    console = Console(stderr=True)
    experiments = {objective: find(name) for objective, name in OBJECTIVES.items()}
    read = {objective: tokens_read(experiment) for objective, experiment in experiments.items()}
    if len(set(read.values())) != 1:
        raise ValueError(f"the experiments read different numbers of tokens, {read}: give them equal batches and steps")

    results: dict[str, dict[str, Any]] = {}
    for number, (objective, experiment) in enumerate(experiments.items(), 1):
        folder = FOLDER / objective
        console.rule(f"{number} of {len(experiments)}: {objective} language modelling, {experiment.name}")
        runs.train(experiment, folder)
        results[objective] = runs.evaluate(folder, split="test") | baselines(experiment)
    report.write([FOLDER / objective for objective in experiments], FOLDER / "report.html")

    seconds = round(time.monotonic() - start, 1)
    console.print(table(results, read["causal"]))
    console.print(f"learning curves: {FOLDER / 'report.html'}    total: {seconds:.0f} s", highlight=False)
    print(json.dumps({**summary(results), "seconds": seconds}))


def tokens_read(experiment: Experiment) -> int:
    """Positions that a run reads in training."""
    return experiment.training.steps * experiment.data.batch_size * experiment.data.reader.length


def baselines(experiment: Experiment) -> dict[str, Any]:
    """What counting reaches on the test split: fitted on what the run read in training, scored on its targets."""
    tokenizer, stores = open_text(experiment.data, ("train", "test"))
    size, data = tokenizer.vocabulary.size, experiment.data
    every = range(data.batch_size)
    trained = [
        data.reader.batch(stores["train"], n, every, batch_size=data.batch_size, seed=experiment.training.seed)
        for n in range(experiment.training.steps)
    ]
    if "next_tokens" in trained[0]:
        pairs = [transitions(batch) for batch in trained]
        previous, following = (np.concatenate(part) for part in zip(*pairs, strict=True))
        unigram, bigram = Unigram.fit(following, size), Bigram.fit(previous, following, size)
        pairs = [transitions(batch) for batch in held_out(experiment, stores["test"])]
        previous, targets = (np.concatenate(part) for part in zip(*pairs, strict=True))
        nats_per_bit_per_byte = math.log(2) * int(stores["test"].document_bytes.sum())
        return {
            "unigram_loss": unigram.nll(targets).mean(),
            "unigram_bits_per_byte": unigram.nll(targets).sum() / nats_per_bit_per_byte,
            "bigram_bits_per_byte": bigram.nll(previous, targets).sum() / nats_per_bit_per_byte,
        }
    unigram = Unigram.fit(np.concatenate([batch["tokens"][batch["words"] > 0] for batch in trained]), size)
    step = jax.jit(lambda batch: prepare(experiment.objective, batch, tokenizer.vocabulary, None))
    prepared = [jax.device_get(step(batch)) for batch in held_out(experiment, stores["test"])]
    targets = np.concatenate([batch["targets"][batch["target_weights"] > 0] for batch in prepared])
    return {
        "unigram_loss": unigram.nll(targets).mean(),
        "unigram_accuracy": (targets == unigram.best).mean(),
    }


def held_out(experiment: Experiment, store: Any) -> Iterator[Batch]:
    """The batches of one ordered pass, as the evaluation reads them."""
    reader, size = experiment.evaluation_reader, experiment.evaluation_batch_size
    for n in range(reader.passes(store, size)):
        yield reader.batch(store, n, range(size), batch_size=size, seed=None)


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The numbers of the last line; losses are of the predicted tokens alone, to compare with the unigram's."""
    streams = ("loss", "bits_per_byte")
    targets = ("loss", "standard_error", "accuracy", "unigram_loss", "unigram_accuracy", "targets")
    fields = {"causal": streams, "segment": streams, "masked": targets, "permutation": targets}
    return {
        "quickstart": {
            objective: {name: rounded(results[objective]["nll" if name == "loss" else name]) for name in names}
            for objective, names in fields.items()
        },
        "baselines": {
            name: rounded(results["causal"][name]) for name in ("unigram_bits_per_byte", "bigram_bits_per_byte")
        },
    }


def rounded(value: Any) -> Any:
    return value if isinstance(value, int) else round(float(value), 4)


def table(results: dict[str, dict[str, Any]], tokens: int) -> Table:
    """One row for each objective: its score on the held-out speeches beside its baselines'."""
    rows = Table(
        title=f"Held-out speeches after {tokens:,} training tokens each", box=box.SIMPLE_HEAD, collapse_padding=True
    )
    rows.add_column("objective")
    for name in ("targets", "nats", "unigram", "accuracy", "bits/byte", "unigram", "bigram"):
        rows.add_column(name, justify="right")
    for objective, result in results.items():
        bits = [result.get(name) for name in ("bits_per_byte", "unigram_bits_per_byte", "bigram_bits_per_byte")]
        rows.add_row(
            objective,
            f"{result['tokens' if 'tokens' in result else 'targets']:,}",
            f"{result['nll']:.3f}",
            f"{result['unigram_loss']:.3f}",
            f"{result['accuracy']:.1%}",
            *("" if value is None else f"{value:.3f}" for value in bits),
        )
    return rows


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, Interrupted) as stop:
        print("error:", str(stop) or "interrupted: the same command goes on", file=sys.stderr)
        sys.exit(130)
