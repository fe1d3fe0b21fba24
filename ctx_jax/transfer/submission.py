"""The predictions of a fine-tuned run as GLUE's leaderboard wants them: a table of index and prediction a test."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ctx_jax.data import check_writable, write_durably
from ctx_jax.evaluation.glue import Glue
from ctx_jax.experiment import load
from ctx_jax.training.checkpoints import named
from ctx_jax.transfer.predict import predict
from ctx_jax.transfer.texts import own_options

DIAGNOSTIC = "AX"
"""The name of the predictions on the diagnostic set, which models of MNLI make."""


def submit(
    path: Path,
    output: Path,
    source: str | None = None,
    diagnostic: Path | None = None,
    checkpoint: str = "best",
    batch_size: int = 32,
) -> dict[str, Any]:
    """Writes OUTPUT/CoLA.tsv and the like: the test of the run's task, in its order.

    Args:
        source: where the task is, if not where the run has it.
        diagnostic: the table of the diagnostic set (diagnostic.tsv), for AX.tsv.

    Returns {"run", "files": {path: predictions}}. Raises ValueError for a run of no task of GLUE.
    """
    folder, _ = named(path)
    task = load(folder / "experiment.json").data.corpus
    if not isinstance(task, Glue) or task.published.submission is None:
        raise ValueError(f"{path} has no task of GLUE: fine-tune on one first (train glue:rte --from {path} ...)")
    place = source or task.path
    wanted = {"mnli": ("mnli", "mnli_mismatched"), "mnli_mismatched": ("mnli", "mnli_mismatched")}
    tables = []
    for name in wanted.get(task.name, (task.name,)):
        own = Glue(place, name=name, data_dir=task.data_dir)
        tables.append((str(own.published.submission), own, None))
    if diagnostic is not None:
        if task.name not in wanted:
            raise ValueError(f"--diagnostic: the diagnostic set is for a run of mnli, not of {task.name}: leave it out")
        tables.append((DIAGNOSTIC, Glue(place, name="mnli"), diagnostic))
    files = {}
    for name, _, _ in tables:
        check_writable(output / f"{name}.tsv")
    for name, own, file in tables:
        with own_options():
            items = list(own.unlabelled(file))
        with tempfile.TemporaryDirectory() as scratch:
            texts = Path(scratch) / "test.jsonl"
            # An index without a text needs a prediction, too.
            rows = (dict(zip(task.texts, (text.strip() or "." for text in one.texts), strict=True)) for one in items)
            texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
            said = predict(path, str(texts), checkpoint=checkpoint, batch_size=batch_size)["predictions"]
        values = (one["label"] if "label" in one else f"{one['value']:.6f}" for one in said)
        lines = (f"{item.number}\t{value}\n" for item, value in zip(items, values, strict=True))
        output.mkdir(parents=True, exist_ok=True)
        write_durably(output / f"{name}.tsv", "index\tprediction\n" + "".join(lines))
        files[str(output / f"{name}.tsv")] = len(items)
    return {"run": str(path), "files": files}
