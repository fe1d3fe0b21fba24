"""What a fine-tuned run says of texts: classes, numbers, tags, answers, choices."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ctx_jax.data import check_writable, write_durably
from ctx_jax.data.examples import Outputs
from ctx_jax.data.files import Errors
from ctx_jax.data.loader import Loader
from ctx_jax.evaluation.files import FileTask
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.progress import counted, tell
from ctx_jax.runs import divisible_rows, open_run
from ctx_jax.training.step import on_mesh
from ctx_jax.transfer.finetuning import encoder, with_threshold
from ctx_jax.transfer.texts import input_file, own_options


def predict(
    path: Path,
    source: str,
    output: Path | None = None,
    *,
    checkpoint: str = "last",
    batch_size: int = 32,
    errors: Errors = "strict",
    threshold: float | None = None,
) -> dict[str, Any]:
    """Predicts the texts of a file ("-": standard input), in its order, by a checkpoint of a run.

    A prediction is {"line", "label", "probability", "probabilities": {label: p}} of a classification, {"line", "value"}
    of a regression; of the other kinds, what their task says (evaluation/). Returns {"run", "step", "texts", "cut"} and
    "predictions" or, with `output`, a file of one a line, "output" (answers: SQuAD's files). `threshold` is that of
    answers, if it is not the run's own.

    Raises ValueError, naming file and line, for what is no text or pair, and for a run that was not fine-tuned.
    """
    if batch_size < 1:
        raise ValueError(f"--batch-size {batch_size} is not a number of texts: choose 1 or more")
    if output is not None:
        check_writable(output)
    run = open_run(path, checkpoint)
    experiment, objective = run.experiment, run.experiment.objective
    task = experiment.data.corpus
    if not isinstance(task, FileTask):
        raise ValueError(f"{path} has no task: fine-tune it first (train finetune:classification --from {path} ...)")
    task = with_threshold(replace(task, errors=errors), threshold)
    file = input_file(source, task.whole_json)
    reader = experiment.evaluation_reader
    with own_options("errors"):
        examples = list(task.inputs(file))
    if not examples:
        raise ValueError("there is no text in --input: give one a line")
    encoded = task.encode(examples, encoder(experiment, reader, run.tokenizer), labelled=False)
    store: Any = encoded.store
    size, sharding = divisible_rows(run.mesh, batch_size), batch_sharding(run.mesh)
    step = jax.jit(on_mesh(run.mesh, lambda variables, batch: objective.scores(run.model, variables, batch, None)))
    outputs: Outputs = []
    with closing(iter(Loader(store, reader, size, None, sharding))) as batches:
        for batch in counted("predicting", batches, reader.passes(store, size)):
            scores = step(run.variables, batch)
            outputs.append({"example": np.asarray(batch["example"]), "scores": np.asarray(scores, np.float64)})
    if store.cut:
        tell(f"note: {store.cut:,} of {len(examples):,} texts are longer than {reader.length} tokens and were cut")
    result = {"run": str(path), "step": run.step, "texts": len(examples), "cut": store.cut}
    said = encoded.predictions(outputs)
    if output is None:
        return {**result, "predictions": said}
    output.parent.mkdir(parents=True, exist_ok=True)
    for file, text in task.files(said, output).items():
        write_durably(file, text)
    return {**result, "output": str(output)}
