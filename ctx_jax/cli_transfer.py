"""The commands that use a pretrained model. Parsing and printing only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import tyro

from ctx_jax.data.files import Errors
from ctx_jax.evaluation.tagging import Tagging
from ctx_jax.evaluation.tasks import Task
from ctx_jax.generation.sampling import Sampling
from ctx_jax.options import of_run
from ctx_jax.text import local
from ctx_jax.transfer import features as frozen
from ctx_jax.transfer.probes import Tagger
from ctx_jax.transfer.texts import own_options


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
    columns; of tags: sentences, or words in columns (.conll; with tags, any name); of answers: SQuAD's JSON; - for
    standard input"""
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


@dataclass(frozen=True)
class Probe:
    """A small model on the frozen features of a run: logistic regression on texts, a BiLSTM on words."""

    text: str
    """the file of examples to train on: a table of texts and labels (.tsv, .csv, .jsonl), or for tagging a word and its
    tag a line (CoNLL)"""
    validation: str | None = None
    """the file by which the probe is chosen; default: one of every twenty examples of --text"""
    test: str | None = None
    """the file it is tested on; default: another one of every twenty examples of --text"""
    kind: Literal["classification", "tagging"] = "classification"
    """classes of texts, or tags of words"""
    texts: tuple[str, ...] = ("text",)
    """the column of the text, or the two of a pair"""
    label: str = "label"
    """the column of the label"""
    columns: tuple[str, ...] = ()
    """names of the columns of files without a header"""
    labels: tuple[str, ...] = ()
    """names of the classes; default: those in --text"""
    token_column: int = 0
    """of files of tagging the column of the word, from 0, or from the end as -1"""
    tag_column: int = -1
    """the column of the tag"""
    scheme: Literal["BIO", "IOB1"] = "BIO"
    """how tags mark where an entity begins: BIO always by B-, IOB1 (CoNLL-2003) only behind one of the same type"""
    errors: Errors = "strict"
    """what to do with bytes that are not UTF-8: strict is an error, replace makes them U+FFFD"""
    choice: Annotated[frozen.Choice, tyro.conf.arg(name="")] = frozen.Choice()
    tagger: Tagger = Tagger()
    seed: int = 0
    """of the BiLSTM's parameters, dropout and order"""
    checkpoint: str = "last"
    """last, best (by training.best, or the evaluation's loss), or a step"""
    length: int | None = None
    """tokens of a text, special ones included, beyond which it is cut; default: all the model's positions, or 512"""
    batch_size: int = 32
    """texts that are read at once"""


def probe(arguments: list[str]) -> Any:
    from ctx_jax.transfer import probes

    run, chosen = of_run("probe", arguments, Probe)
    common: dict[str, Any] = {name: getattr(chosen, name) for name in ("checkpoint", "length", "batch_size")}

    def read(kind: Any, *names: str) -> Any:
        every = ("validation", "test", "errors", *names)
        return kind(chosen.text, **{name: getattr(chosen, name) for name in every})

    with own_options(*(field.name.replace("_", "-") for field in fields(Probe))):
        if chosen.kind == "classification":
            return probes.classify(run, read(Task, "texts", "label", "columns", "labels"), chosen.choice, **common)
        task = read(Tagging, "token_column", "tag_column", "scheme")
        return probes.tag(run, task, chosen.choice, chosen.tagger, seed=chosen.seed, **common)


@dataclass(frozen=True)
class Write:
    """One field of articles, written from the others by a run of grover."""

    field: str
    """the field to be written"""
    input: str
    """a .jsonl file of articles, one a line, with the fields that there are; - for standard input"""
    output: str | None = None
    """the .jsonl file to write, a text a line; default: they stand in the result"""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling(top_p=0.95)
    length: int = 64
    """tokens to generate, at most"""
    seed: int = 0
    """the same seed gives the same text"""
    checkpoint: str = "last"
    """last, best (by training.best, or the evaluation's loss), or a step"""
    batch_size: int = 8
    """articles that are written at once"""


def write(arguments: list[str]) -> Any:
    from ctx_jax.transfer import writing

    run, chosen = of_run("write", arguments, Write)
    options = {name: getattr(chosen, name) for name in ("sampling", "length", "seed", "checkpoint", "batch_size")}
    output = None if chosen.output is None else local("--output", chosen.output)
    return writing.write(run, chosen.field, chosen.input, output, **options)


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


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "features": features,
    "probe": probe,
    "predict": predict,
    "write": write,
}
