"""The commands that put tasks to a run: as text, or as a leaderboard wants them. Parsing and printing only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ctx_jax.evaluation import few_shot
from ctx_jax.options import of_run
from ctx_jax.text import local


@dataclass(frozen=True)
class FewShot:
    """Put a task to a checkpoint of a run as text: choices compared by their likelihood, or last words to be found."""

    input: str
    """items, one a line of JSON: {"context": "...", "choices": [" yes", " no"], "answer": 0}, or {"text": "..."}, whose
    last word is to be found"""
    examples: str | None = None
    """items like these, from which --shots solved ones are drawn; the file of --input itself will do"""
    before: Annotated[few_shot.Shots, tyro.conf.arg(name="")] = few_shot.Shots()
    unconditional: str = "Answer: "
    """what a choice stands after where its own likelihood is taken off"""
    checkpoint: str = "last"
    """last, best (by training.best, or the evaluation's loss), or a step"""
    length: int | None = None
    """tokens that are read at once; default: all the model's positions, or 512. Of longer ones the beginning is cut"""
    batch_size: int = 32
    """texts that are read at once"""


@dataclass(frozen=True)
class Harness:
    """Put tasks of lm-evaluation-harness to a checkpoint of a run."""

    tasks: tuple[str, ...]
    """their names"""
    include_path: Path | None = None
    """a folder of tasks of your own (.yaml)"""
    shots: int | None = None
    """solved items before each; default: as the task says"""
    limit: int | None = None
    """items of each task, from the first on; default: all"""
    checkpoint: str = "last"
    """last, best (by training.best, or the evaluation's loss), or a step"""
    length: int | None = None
    """tokens that are read at once; default: all the model's positions, or 512. Of longer ones the beginning is cut"""
    batch_size: int = 32
    """texts that are read at once"""


def put(arguments: list[str]) -> Any:
    run, chosen = of_run("few-shot", arguments, FewShot)
    return few_shot.evaluate(
        run,
        chosen.input,
        chosen.before,
        examples=chosen.examples,
        unconditional=chosen.unconditional,
        checkpoint=chosen.checkpoint,
        length=chosen.length,
        batch_size=chosen.batch_size,
    )


def harness(arguments: list[str]) -> Any:
    run, chosen = of_run("harness", arguments, Harness)
    try:
        from ctx_jax.evaluation import harness
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise ValueError('harness needs lm_eval, which is not installed: pip install -e ".[harness]"') from None
    return harness.evaluate(run, **vars(chosen))


@dataclass(frozen=True)
class Submit:
    """Write the predictions of a run on a task of GLUE as its leaderboard wants them: CoLA.tsv and the like."""

    output: str
    """the folder to write into"""
    source: str | None = None
    """where the task is, a folder or tfds:NAME; default: where the run was trained"""
    diagnostic: Path | None = None
    """the table of GLUE's diagnostic set (diagnostic.tsv), for AX.tsv; of a run of mnli"""
    checkpoint: str = "best"
    """last, best (by the task's metric on the development set), or a step"""
    batch_size: int = 32
    """texts that are read at once"""


def submit(arguments: list[str]) -> Any:
    from ctx_jax.transfer import submission

    run, chosen = of_run("submit", arguments, Submit)
    return submission.submit(run, **{**vars(chosen), "output": local("--output", chosen.output)})


COMMANDS: dict[str, Callable[[list[str]], Any]] = {"few-shot": put, "harness": harness, "submit": submit}
