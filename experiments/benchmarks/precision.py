"""What training in bf16 costs: the same run in fp32 and in bf16, and how far apart the two end.

    python experiments/benchmarks/precision.py --text train.txt --data.corpus.validation valid.txt --data FOLDER
    python experiments/benchmarks/precision.py --data FOLDER

GPT-2 small (124M parameters, dropout 0.1) is trained twice by the loop of every run, from the same seed: the same
initial parameters, batches and dropout masks, only the dtype differs. Each run is then evaluated in its own dtype on
the whole validation text. `--data FOLDER` keeps tokenizer and token stores: with them there, the text is not needed.
What is left of the command line are fields of the experiment (`--training.steps 500`).

The products of the fp32 run are real fp32, not the TF32 that JAX would choose for it on NVIDIA's cards (10 bits of
mantissa, little more than bf16's 7): it is what bf16 is compared with. So its 2,000 steps decide how large a batch may
be: at 8 rows of 256 tokens they are 3.1e15 operations, a minute or two of an H100 outside its tensor cores. The 4.1M
tokens are less than two passes over WikiText-2, so that the held-out loss still falls at the end.

One JSON line; the exit code is 1 if either difference is more than 0.5 %:

    float32, bfloat16   {"loss": mean of the last 100 steps (in training, with dropout), "held_out": nats per token,
                        "products": precision of matrix products, "paths": kernels, or why not, "seconds": all of the
                        run, compilation, evaluation and checkpoint included, "tokens_per_second"}
    differences         {"loss", "held_out"}: bfloat16 / float32 - 1
    steps, B, T, device
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from ctx_jax import kernels
from ctx_jax.compilation import keep_compiled
from ctx_jax.data.corpora import Sotu, Split, TextFiles
from ctx_jax.data.readers import Blocks
from ctx_jax.data.store import Store, open_store
from ctx_jax.data.subwords import ByteLevelBPE
from ctx_jax.experiment import Experiment, find
from ctx_jax.options import parse
from ctx_jax.serialization import to_json
from ctx_jax.text import open_text
from ctx_jax.training import loop
from ctx_jax.training.metrics import read_metrics
from ctx_jax.training.optimizers import AdamW
from ctx_jax.training.schedules import WarmUp
from ctx_jax.training.stopping import Watch

PRODUCTS = {"float32": "highest", "bfloat16": "default"}
"""The dtypes compared, and the precision of matrix products in each (`jax_default_matmul_precision`)."""
LIMIT = 0.005
"""How far bf16 may end from fp32, relative to it."""
LAST = 100
"""Steps whose mean is the loss of training: a single batch says little."""
SPLITS: tuple[Split, Split] = ("train", "validation")
TINY = {"vocabulary_size": 512, "width": 32, "layers": 2, "heads": 2, "feed_forward": 64}


def experiment_of(text: str | None, folder: Path, tiny: bool) -> Experiment:
    """GPT-2 small on a text, a length and a batch for both dtypes; `tiny` is the same with a model for a CPU.

    Of 32,000 pieces, since WikiText-2 has too few words for 50,257; the model's table is GPT-2's all the same.
    """
    whole = find("gpt:gpt2")
    rows, length, steps, pieces, sizes = 8, 256, 2_000, 32_000, {}
    if tiny:
        rows, length, steps, pieces, sizes = 4, 32, 200, 340, TINY
    data = replace(
        whole.data,
        reader=Blocks(length, join_documents=True),
        corpus=Sotu() if text is None else TextFiles(text),
        tokenizer=ByteLevelBPE(pieces),
        batch_size=rows,
        folder=folder,
    )
    return replace(
        whole,
        name="precision",
        data=data,
        model=replace(whole.model, dtype="float32", scan=False, **sizes),
        optimizer=AdamW(schedule=WarmUp(rate=3e-4, warmup=steps // 10, decay="cosine", final=0.1), weight_decay=0.1),
        training=loop.Training(steps=steps, log_every=1),
    )


def kept(folder: Path, size: int) -> dict[Split, Store]:
    """The stores in a folder, without their text. Raises ValueError if it does not hold one of each split, or if they
    have more pieces than a model of `size` tokens."""
    stores: dict[Split, Store] = {}
    for split in SPLITS:
        found = sorted(path.parent for path in folder.glob(f"{split}-*/store.json"))
        if len(found) != 1:
            raise ValueError(f"--data {folder} holds {len(found)} {split} stores, not 1: name the text with --text")
        stores[split] = open_store(found[0])
        if (pieces := stores[split].vocabulary.size) > size:
            raise ValueError(f"{found[0]} has {pieces} pieces, the model {size}: set --model.vocabulary-size {pieces}")
    return stores


def train(experiment: Experiment, stores: dict[Split, Store]) -> dict[str, Any]:
    """What the module's docstring lists of one dtype."""
    start = time.perf_counter()
    precision, dtype = PRODUCTS[experiment.model.dtype], experiment.model.dtype
    train_text, held_out = (
        loop.Text(stores[split], reader)
        for split, reader in zip(SPLITS, (experiment.data.reader, experiment.evaluation_reader), strict=True)
    )
    with tempfile.TemporaryDirectory() as folder, Watch() as watch, jax.default_matmul_precision(precision):
        run = Path(folder) / dtype
        result = loop.train(
            model=experiment.model.build(),
            objective=experiment.objective,
            optimizer=experiment.optimizer,
            mesh=experiment.mesh.build(jax.devices()[:1]),
            text=train_text,
            evaluation_text=held_out,
            batch_size=experiment.data.batch_size,
            evaluation_batch_size=experiment.evaluation_batch_size,
            training=experiment.training,
            run=run,
            experiment=to_json(experiment),
            watch=watch,
        )
        losses = [line["loss"] for line in read_metrics(run) if line["kind"] == "train"]
    return {
        "loss": round(statistics.fmean(losses[-LAST:]), 7),
        "held_out": round(result["evaluation"]["loss"], 7),
        "products": precision,
        "paths": kernels.paths(),
        "seconds": round(time.perf_counter() - start, 1),
        "tokens_per_second": round(result["tokens_per_second"]),
    }


def compare(experiment: Experiment, stores: dict[Split, Store]) -> dict[str, Any]:
    """Both runs, and how far apart they end."""
    runs = {
        dtype: train(replace(experiment, model=replace(experiment.model, dtype=dtype)), stores) for dtype in PRODUCTS
    }
    ends = {name: [runs[dtype][name] for dtype in PRODUCTS] for name in ("loss", "held_out")}
    return {
        **runs,
        "differences": {name: round(ours / reference - 1, 7) for name, (reference, ours) in ends.items()},
        "steps": experiment.training.steps,
        "B": experiment.data.batch_size,
        "T": experiment.data.reader.length,
        "device": jax.devices()[0].device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a file, a folder or a glob of text to train on; default: what --data holds")
    parser.add_argument("--data", type=Path, help="folder of tokenizer and token stores, kept; default: a new one")
    parser.add_argument("--tiny", action="store_true", help="a model and rows for a CPU, to try the script")
    options, fields = parser.parse_known_args()
    if options.text is None and options.data is None:
        parser.error("neither --text nor --data: name the text to train on, or a folder that has its token stores")
    keep_compiled()
    with tempfile.TemporaryDirectory() as folder:
        experiment = experiment_of(options.text, options.data or Path(folder), options.tiny)
        try:
            experiment = parse(experiment, fields, "precision.py")
            if options.text is None:
                stores = kept(options.data, experiment.model.vocabulary_size)
            else:
                stores = open_text(experiment.data, SPLITS)[1]
        except (ValueError, OSError) as error:
            parser.error(str(error))
        result = compare(experiment, stores)
    print(json.dumps(result), flush=True)
    sys.exit(any(abs(difference) > LIMIT for difference in result["differences"].values()))


if __name__ == "__main__":
    main()
