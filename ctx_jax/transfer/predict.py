"""What a fine-tuned run says of texts: a class and its probability, or a number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.special import softmax

from ctx_jax.data import write_durably
from ctx_jax.data.articles import read_articles
from ctx_jax.data.files import Errors, is_jsonl
from ctx_jax.data.passages import LINE_END, between
from ctx_jax.evaluation.tasks import Task, is_table, reader, rows
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.progress import tell
from ctx_jax.runs import divisible_rows, open_run
from ctx_jax.training.step import on_mesh
from ctx_jax.transfer.detection import ArticleTask, form
from ctx_jax.transfer.inputs import Row, grouped
from ctx_jax.transfer.texts import checked, input_file, joined


def predict(
    path: Path,
    source: str,
    output: Path | None = None,
    *,
    checkpoint: str = "last",
    batch_size: int = 32,
    errors: Errors = "strict",
) -> dict[str, Any]:
    """Predicts the texts of a file ("-": standard input), in its order, by a checkpoint of a run.

    A prediction is {"line", "label", "probability", "probabilities": {label: p}} of a classification, {"line", "value"}
    of a regression. Returns {"run", "step", "texts", "cut"} and "predictions" or, with `output`, a file of one a line,
    "output".

    Raises ValueError, naming file and line, for what is no text or pair, and for a run that was not fine-tuned.
    """
    if batch_size < 1:
        raise ValueError(f"--batch-size {batch_size} is not a number of texts: choose 1 or more")
    file = input_file(source)
    run = open_run(path, checkpoint)
    task, objective = run.experiment.data.corpus, run.experiment.objective
    if not isinstance(task, Task):
        raise ValueError(f"{path} has no task: fine-tune it first (train finetune:classification --from {path} ...)")
    shape, length = form(task, run.experiment.model, run.tokenizer.vocabulary), run.experiment.data.reader.length
    size, sharding = divisible_rows(run.mesh, batch_size), batch_sharding(run.mesh)
    step = jax.jit(on_mesh(run.mesh, lambda variables, batch: objective.scores(run.model, variables, batch, None)))
    places: list[int] = []
    cut = 0

    def built() -> Iterator[tuple[int, Row]]:
        nonlocal cut
        for number, (place, texts) in enumerate(inputs(file, task, errors)):
            places.append(place)
            row = shape.row([run.tokenizer.encode(text) for text in texts], length)
            cut += row.cut
            yield number, row

    found: dict[int, np.ndarray] = {}
    for longest, group in grouped(built(), size, length):
        batch = shape.batch([row for _, row in group], size, longest)
        scores = np.asarray(step(run.variables, jax.device_put(batch, sharding)), np.float64)
        found |= {number: own for (number, _), own in zip(group, scores, strict=False)}
    if not found:
        raise ValueError("there is no text in --input: give one a line")
    if cut:
        tell(f"note: {cut:,} of {len(found):,} texts are longer than {length} tokens and were cut")
    predictions = [{"line": place, **prediction(task, found[number])} for number, place in enumerate(places)]
    result = {"run": str(path), "step": run.step, "texts": len(found), "cut": cut}
    if output is None:
        return {**result, "predictions": predictions}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_durably(output, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in predictions))
    return {**result, "output": str(output)}


def prediction(task: Task, scores: np.ndarray) -> dict[str, Any]:
    """scores [classes] by name, the most probable first of all."""
    if task.kind == "regression":
        mean, deviation = task.scale
        return {"value": round(float(scores[0]) * deviation + mean, 6)}
    probabilities = {name: round(float(p), 6) for name, p in zip(task.labels, softmax(scores), strict=True)}
    best = task.labels[int(scores.argmax())]
    return {"label": best, "probability": probabilities[best], "probabilities": probabilities}


def inputs(file: Any, task: Task, errors: Errors) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and texts of each example: the fields of articles, the columns of the task in .jsonl, .tsv and .csv files,
    elsewhere a text a line, or the two of a pair with a tab between. Blank lines are left out."""
    if isinstance(task, ArticleTask):
        for article in read_articles(file, task.texts, errors):
            yield article.line, article.texts
    elif is_jsonl(file) or is_table(file):
        for place, fields in rows(file, task.columns, task.texts, errors):
            yield place, tuple(fields[name] for name in task.texts)
    else:
        yield from lines(file, task, errors)


def lines(file: Any, task: Task, errors: Errors) -> Iterator[tuple[int, tuple[str, ...]]]:
    """A text a line, or the two of a pair."""
    for place, line in enumerate(map(joined, checked(file, between(LINE_END, reader(file, errors)))), 1):
        texts = tuple(line.split("\t")) if len(task.texts) == 2 else (line,)
        if not line.strip():
            continue
        if len(texts) != len(task.texts):
            raise ValueError(f"{file} line {place} has {len(texts)} texts, not 2: put one tab between the two")
        yield place, texts
