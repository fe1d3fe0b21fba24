"""The commands that use a pretrained model. Parsing and printing only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from ctx_jax.data.files import Errors
from ctx_jax.options import of_run
from ctx_jax.text import local
from ctx_jax.transfer import features as frozen


@dataclass(frozen=True)
class Features:
    """Vectors of texts, by the layers of a checkpoint of a run."""

    input: str
    """a file of texts, one a line; .jsonl, .gz and .zst too; - for standard input"""
    output: str
    """the .npz or .safetensors file to write: `features`, and `offsets` where a text has several vectors"""
    checkpoint: str = "last"
    """last, best (by training.best, or the evaluation's loss), or a step"""
    choice: Annotated[frozen.Choice, tyro.conf.arg(name="")] = frozen.Choice()
    length: int | None = None
    """tokens of a text, special ones included, beyond which it is cut; default: all the model's positions, or 512"""
    batch_size: int = 32
    """texts that are read at once"""
    field: str | None = None
    """the text's field in lines of JSON; default: text in .jsonl files, others are no JSON"""
    errors: Errors = "strict"
    """what to do with bytes that are not UTF-8: strict is an error, replace makes them U+FFFD"""


@dataclass(frozen=True)
class Predict:
    """What a fine-tuned run says of texts, by name and with probabilities."""

    input: str
    """a file of texts, one a line, or the two of a pair with a tab between; .tsv, .csv and .jsonl files have the task's
    columns; of tags: sentences, or .conll files; of answers: SQuAD's JSON; - for standard input"""
    output: str | None = None
    """the .jsonl file to write, a prediction a line (of answers: SQuAD's .json); default: they stand in the result"""
    checkpoint: str = "last"
    """last, best (by training.best), or a step"""
    batch_size: int = 32
    """texts that are read at once"""
    errors: Errors = "strict"
    """what to do with bytes that are not UTF-8: strict is an error, replace makes them U+FFFD"""
    threshold: float | None = None
    """of answers that may be none: how much better none must be; default: the run's"""


def predict(arguments: list[str]) -> Any:
    from ctx_jax.transfer import predict as predicting

    run, chosen = of_run("predict", arguments, Predict)
    return predicting.predict(
        run,
        chosen.input,
        None if chosen.output is None else local("--output", chosen.output),
        checkpoint=chosen.checkpoint,
        batch_size=chosen.batch_size,
        errors=chosen.errors,
        threshold=chosen.threshold,
    )


def features(arguments: list[str]) -> Any:
    run, chosen = of_run("features", arguments, Features)
    return frozen.extract(
        run,
        chosen.input,
        local("--output", chosen.output),
        chosen.choice,
        checkpoint=chosen.checkpoint,
        length=chosen.length,
        batch_size=chosen.batch_size,
        field=chosen.field,
        errors=chosen.errors,
    )


COMMANDS: dict[str, Callable[[list[str]], Any]] = {"features": features, "predict": predict}
