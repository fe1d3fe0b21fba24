"""The command line as words: what stands before the options, and options as fields of frozen dataclasses.

Whatever is wrong becomes one line that names the word and the remedy.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
import typing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from ctx_jax.data.articles import Articles, SotuArticles
from ctx_jax.data.tfds import corpus_from
from ctx_jax.data.tokenizers import Pretrained, named
from ctx_jax.evaluation.files import FileTask
from ctx_jax.experiment import Data, Experiment, find, options
from ctx_jax.serialization import nearest

T = TypeVar("T")


USAGE = """usage: python -m ctx_jax COMMAND ...

  train EXPERIMENT [--run DIR] [--text PATH] [--tokenizer KIND] [--continue RUN] [--from RUN] [--training.steps N] ...
                                                                                        start a run, or resume it
  evaluate RUN [--text PATH] [--split test] [--length T] [--stride N] ...               score held-out text
  generate RUN --prompt "..." [--temperature 0] [--top-p P] [--beams K] [--stream] ...  continue prompts
  write RUN --field NAME --input ARTICLES.jsonl [--top-p 0.95] ...                      a field from the others (Grover)
  features RUN --input FILE --output FEATURES [--layers -4 -3 -2 -1] [--pooling mean]   vectors of texts
  probe RUN --text FILE [--kind tagging] [--layers -4 -3 -2 -1] ...                      what frozen features know
  predict RUN --input FILE [--output PREDICTIONS.jsonl] [--checkpoint best]             classes, tags, answers of texts
  submit RUN --output FOLDER [--source FOLDER] [--diagnostic FILE]                      tables for GLUE's leaderboard
  few-shot RUN --input FILE [--shots K --examples FILE] ...                             tasks put as text
  harness RUN --tasks NAME... [--include-path FOLDER] [--shots K] ...                   tasks of lm-evaluation-harness
  convert FOLDER RUN [--leave-out NAME...] | RUN FOLDER [--kind CLASS]                  from and to transformers
  report RUN... [--output report.html]                                                  learning curves as a page
  doctor [EXPERIMENT] [--training.accumulation A] ...                                   what will run, what it needs
  sweep FILE.py[:function] [--seeds N] [--jobs N] ... [-- OPTIONS OF TRAIN]             run many experiments
  tokenizer train KIND [--text PATH] [--vocabulary-size N] [--output DIR] ...           learn a tokenizer from text
  data prepare [EXPERIMENT] [--text PATH] [--tokenizer KIND] ...                        tokenize all of a corpus
  data inspect [STORE|EXPERIMENT] [--text PATH] [--tokenizer KIND] [--split train] ...  what is in a token store
  data tfds NAME --text PATH [--data-dir DIR]                                           make a TFDS data set of text

PATH is a text or JSONL file (.gz and .zst too), a folder, a glob, or tfds:NAME for a TensorFlow data set.
KIND is unigram, bpe, wordpiece, byte_bpe, bytes, characters, words, or the folder of a trained tokenizer.

EXPERIMENT is file:function, as bert:base or my/folder/file.py:function, or the path of an experiment.json.
COMMAND --help lists its options; those of train and doctor are the fields of the experiment, so name one with it.
With --debug, what fails shows where in the code it did."""


TEXT = ("--text", "--tokenizer")
"""Options that choose another corpus or tokenizer, and so which fields there are to be options."""


class UsageError(ValueError):
    """The command line itself is wrong."""


def positional(command: str, arguments: list[str], what: str, most: int | None = None) -> tuple[list[str], list[str]]:
    """The leading arguments that are no options, and the rest. Raises UsageError if there is none or are too many."""
    if arguments and arguments[0] in ("-h", "--help"):
        return [what], arguments
    count = next((index for index, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    if count == 0:
        raise UsageError(f"{command} needs {what} before any option: python -m ctx_jax {command} {what} ...")
    if most is not None and count > most:
        raise UsageError(f"{command} takes {'one ' * (most == 1)}{what}, not also {arguments[most]!r}")
    return arguments[:count], arguments[count:]


def of_run(command: str, arguments: list[str], kind: type[T]) -> tuple[Path, T]:
    """The run that stands first, and the options after it. Raises UsageError."""
    (run,), rest = positional(command, arguments, "RUN", most=1)
    return Path(run), parse_type(kind, rest, f"ctx_jax {command} RUN")


def is_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def take(option: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """The last `option VALUE` or `option=VALUE`, and the other arguments."""
    chosen, rest, queue = None, [], iter(arguments)
    for argument in queue:
        name, equals, value = argument.partition("=")
        if name != option:
            rest.append(argument)
            continue
        chosen = value if equals else next(queue, "")
        if not chosen or chosen.startswith("--"):
            raise UsageError(f"{option} is given nothing: give it a value, or leave the option out")
    return chosen, rest


def parse(default: T, arguments: list[str], program: str, also: tuple[str, ...] = ()) -> T:
    """`default` with the options in `arguments`; `also` are options that were taken out of them before."""
    return parse_type(type(default), arguments, program, also, default=default)


def parse_type(kind: type[T], arguments: list[str], program: str, also: tuple[str, ...] = (), **default: Any) -> T:
    """tyro's parser, whose complaints become one line each. Raises UsageError."""
    for option, value in itertools.pairwise(arguments):
        if option.startswith("--") and not value and option != "--prompt":
            raise UsageError(f"{option} is given an empty value: give it one, or leave the option out")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            chosen, unknown = tyro.cli(
                kind,
                args=arguments,
                prog=program,
                config=(tyro.conf.AvoidSubcommands,),
                return_unknown_args=True,
                **default,
            )
    except SystemExit as exit:
        if exit.code in (0, None):
            raise
        raise UsageError(one_line(complaint.getvalue())) from None
    if unknown:
        if not unknown[0].startswith("-"):
            raise UsageError(f"{unknown[0]!r} belongs to no option: see --help for those that take a value")
        known = [*also, *flags(kind, default.get("default"))]
        raise UsageError(f"unknown option {unknown[0]}{nearest(unknown[0].partition('=')[0], known)}")
    return chosen


def flags(kind: type, default: Any) -> list[str]:
    """The options that `kind` takes, those of the dataclasses in `default` included."""
    names: list[str] = []
    for field, hint in typing.get_type_hints(kind, include_extras=True).items():
        shown = [about.name for about in getattr(hint, "__metadata__", ()) if getattr(about, "name", None) is not None]
        name = (shown or [field])[0].replace("_", "-")
        value = getattr(kind if default is None else default, field, None)
        if is_dataclass(value):
            names += [f"--{name}.{option[2:]}" if name else option for option in options(value)]
        else:
            names.append(f"--{name}")
    return names


def one_line(box: str) -> str:
    """The message inside tyro's box, with or without frame: what stands under its title, up to the next rule."""
    lines = [line.strip(" │|") for line in box.splitlines() if line.strip()]
    below_title = itertools.dropwhile(is_rule, lines[1:])
    message = " ".join(itertools.takewhile(lambda line: not is_rule(line), below_title))
    message = re.sub(r"^Error parsing (experiment\.|\w+: )?", "", message)
    return message or "the command line cannot be read; see --help"


def is_rule(line: str) -> bool:
    return not line.strip("─-╰╯")


def with_experiment(command: str, arguments: list[str]) -> tuple[Experiment, list[str]]:
    """`on_text` of the experiment that the first argument names."""
    (name,), rest = positional(command, arguments, "EXPERIMENT", most=1)
    if name == "EXPERIMENT":
        print(USAGE, file=sys.stderr)
        sys.exit(0)
    return on_text(find(name), rest)


def on_text(experiment: Experiment, arguments: list[str]) -> tuple[Experiment, list[str]]:
    """The experiment on the text and with the tokenizer that the options name, and the other arguments. A tokenizer
    that is still to be trained keeps the size of the one in its place; the model's vocabulary follows."""
    data, rest = with_text(experiment.data, arguments)
    tokenizer, model = data.tokenizer, experiment.model
    if tokenizer is not experiment.data.tokenizer:
        if not isinstance(tokenizer, Pretrained) and "vocabulary_size" in (field.name for field in fields(tokenizer)):
            tokenizer = replace(tokenizer, vocabulary_size=experiment.data.tokenizer.vocabulary_size)
        model = replace(model, vocabulary_size=tokenizer.vocabulary_size)
    return replace(experiment, data=replace(data, tokenizer=tokenizer), model=model), rest


def with_text(data: Data, arguments: list[str]) -> tuple[Data, list[str]]:
    """`data` with the corpus of --text and the tokenizer of --tokenizer, and the other arguments."""
    path, rest = take("--text", arguments)
    if path is not None:
        corpus = data.corpus
        if isinstance(corpus, SotuArticles):
            corpus = Articles(path=path)
        elif isinstance(corpus, FileTask | Articles):
            corpus = replace(corpus, path=path)
        else:
            corpus = corpus_from(path)
        data = replace(data, corpus=corpus)
    kind, rest = take("--tokenizer", rest)
    if kind is not None:
        data = replace(data, tokenizer=named(kind))
    return data, rest
