"""The commands: parsing and printing only.

A command prints for people on stderr and, last, one JSON object on stdout. Exit codes: 0 done, 1 the run failed,
2 the input is wrong, 130 interrupted. What fails is one line, `error: ...`; with --debug it is a traceback.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import jax
import tyro

from ctx_jax.data.corpora import TextFiles
from ctx_jax.experiment import Experiment, find, options
from ctx_jax.generation.decode import Sampling
from ctx_jax.serialization import nearest
from ctx_jax.training.loop import Interrupted
from ctx_jax.training.metrics import Diverged

T = TypeVar("T")

USAGE = """usage: python -m ctx_jax COMMAND ...

  train EXPERIMENT [--run DIR] [--text PATH] [--continue RUN] [--from RUN] [--training.steps N] ...
                                                                                        start a run, or resume it
  evaluate RUN [--split test] [--length T] [--stride N] [--memory-length M] ...         score held-out text
  generate RUN --prompt "..." [--temperature 0] [--top-k K] [--top-p P] ...             continue prompts
  report RUN... [--output report.html]                                                  learning curves as a page
  doctor [EXPERIMENT] [--training.accumulation A] ...                                   what will run, what it needs

EXPERIMENT is file:function, as bert:base or my/folder/file.py:function, or the path of an experiment.json.
COMMAND --help lists its options; those of train and doctor are the fields of the experiment, so name one with it.
With --debug, what fails shows where in the code it did."""

BAD_PATHS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of the system that are the user's; others (a full disk) are failures of the run."""


class UsageError(ValueError):
    """The command line itself is wrong."""


@dataclass(frozen=True)
class Train:
    """Start a run, or resume the one in its folder."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    run: Path | None = None
    """the run's folder; default: runs/<name>-<fingerprint>"""
    continue_from: Annotated[Path | None, tyro.conf.arg(name="continue")] = None
    """a run whose parameters, optimizer and step this one takes over; the reader starts anew"""
    start_from: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """a run or checkpoint whose matching parameters this one starts from"""


@dataclass(frozen=True)
class Evaluate:
    """Score held-out text with a run's last checkpoint: each token once."""

    split: str = "test"
    """train, validation or test"""
    length: int | None = None
    """positions in a window; default: the experiment's"""
    stride: int | None = None
    """positions from one window to the next; default: the experiment's (without memory: overlapping windows)"""
    memory_length: int | None = None
    """positions of memory (models that have one); default: the experiment's"""
    same_length: bool = False
    """every position sees equally many keys (Transformer-XL's evaluation)"""
    clamp_length: int | None = None
    """distances beyond this count as this (Transformer-XL's evaluation)"""
    batch_size: int | None = None
    """rows (for a model with memory: streams) in a batch; default: the experiment's"""


@dataclass(frozen=True)
class Generate:
    """Continue prompts with a run's last checkpoint."""

    prompt: tuple[str, ...]
    """one or more texts to go on from"""
    length: int = 64
    """tokens to generate, at most"""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling()
    seed: int = 0
    """the same seed gives the same text"""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("--prompt is given no text: give one or more")


@dataclass(frozen=True)
class Doctor:
    """What will run on this machine, and what an experiment needs."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Report:
    """Learning curves and results of runs as one self-contained page."""

    output: Path | None = None
    """the page; default: report.html in the first run's folder"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        sys.exit(0 if arguments else 2)
    command, *rest = (argument for argument in arguments if argument != "--debug")
    try:
        if command not in COMMANDS:
            raise UsageError(f"unknown command {command!r}{nearest(command, list(COMMANDS))}; see --help")
        helping = not {"-h", "--help"}.isdisjoint(rest)
        # Whatever a library or an experiment prints belongs on stderr; help that was asked for does not.
        with contextlib.nullcontext() if helping else contextlib.redirect_stdout(sys.stderr):
            result = COMMANDS[command](rest)
        print(json.dumps(result), flush=True)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments:
            raise
        fail(*explained(error))


def explained(error: BaseException) -> tuple[str, int]:
    """What is said of an error, and the exit code."""
    match error:
        case Interrupted():
            return str(error), 130
        case KeyboardInterrupt():
            return "interrupted: the same command goes on from the last checkpoint, if there is one", 130
        case Diverged():
            return str(error), 1
        case BrokenPipeError():
            # What is left in the buffer would fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # pyright: ignore[reportOptionalMemberAccess]
            return "stdout was closed before the result was written: the same command gives it again", 1
        case OSError(filename=file, strerror=reason) if reason:
            remedy = "choose another path" if isinstance(error, BAD_PATHS) else "mend it, then the same command goes on"
            return f"{file or 'the system'}: {reason}: {remedy}", 2 if isinstance(error, BAD_PATHS) else 1
        case ValueError() if "No space left" in str(error):  # as orbax raises it
            return "the disk is full: make room, then the same command goes on", 1
        case ValueError() | FileNotFoundError():
            return str(error), 2
        case jax.errors.JaxRuntimeError() | MemoryError():
            return (
                f"the device gave up: {first_line(error)}; where memory is short, choose a smaller batch, more "
                "training.accumulation or model.remat",
                1,
            )
        case _:
            return f"unexpected {type(error).__name__}: {first_line(error)}; --debug shows where", 1


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def fail(message: object, code: int) -> NoReturn:
    """One line on stderr, and out."""
    print("error: " + " ".join(str(message).split()), file=sys.stderr)
    sys.exit(code)


def train(arguments: list[str]) -> Any:
    from ctx_jax import runs

    experiment, rest = with_experiment("train", arguments)
    chosen = parse(Train(experiment), rest, f"ctx_jax train {arguments[0]}")
    return runs.train(chosen.experiment, chosen.run, chosen.continue_from, chosen.start_from)


def evaluate(arguments: list[str]) -> Any:
    from ctx_jax import runs

    (folder,), rest = positional("evaluate", arguments, "RUN", most=1)
    chosen = parse(Evaluate(), rest, "ctx_jax evaluate RUN")
    return runs.evaluate(Path(folder), **vars(chosen))


def generate(arguments: list[str]) -> Any:
    from ctx_jax import runs

    (folder,), rest = positional("generate", arguments, "RUN", most=1)
    chosen = parse_type(Generate, rest, "ctx_jax generate RUN")
    return runs.generate(Path(folder), chosen.prompt, chosen.length, chosen.sampling, chosen.seed)


def report(arguments: list[str]) -> Any:
    from ctx_jax.analysis import report as pages

    folders, rest = positional("report", arguments, "RUN...")
    chosen = parse(Report(), rest, "ctx_jax report RUN...")
    output = chosen.output or Path(folders[0]) / "report.html"
    pages.write([Path(folder) for folder in folders], output)
    return {"report": str(output), "runs": folders}


def doctor(arguments: list[str]) -> Any:
    from ctx_jax import doctor as examination

    if not arguments:
        return examination.diagnose()
    experiment, rest = with_experiment("doctor", arguments)
    return examination.diagnose(parse(Doctor(experiment), rest, f"ctx_jax doctor {arguments[0]}").experiment)


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "report": report,
    "doctor": doctor,
}


def positional(command: str, arguments: list[str], what: str, most: int | None = None) -> tuple[list[str], list[str]]:
    """The leading arguments that are no options, and the rest. Raises UsageError if there is none or are too many."""
    if arguments and arguments[0] in ("-h", "--help"):
        return ["RUN"], arguments
    count = next((index for index, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    if count == 0:
        raise UsageError(f"{command} needs {what} before any option: python -m ctx_jax {command} {what} ...")
    if most is not None and count > most:
        raise UsageError(f"{command} takes one {what}, not also {arguments[most]!r}")
    return arguments[:count], arguments[count:]


def with_experiment(command: str, arguments: list[str]) -> tuple[Experiment, list[str]]:
    """The experiment named by the first argument, and the other arguments."""
    (name,), rest = positional(command, arguments, "EXPERIMENT", most=1)
    if name == "RUN":
        print(USAGE, file=sys.stderr)
        sys.exit(0)
    experiment = find(name)
    path, rest = text_option(rest)  # before the fields are parsed, since it changes which fields there are
    if path is not None:
        experiment = replace(experiment, data=replace(experiment.data, corpus=TextFiles(path)))
    return experiment, rest


def text_option(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The last --text PATH or --text=PATH, and the other arguments."""
    path, rest, queue = None, [], iter(arguments)
    for argument in queue:
        option, equals, value = argument.partition("=")
        if option != "--text":
            rest.append(argument)
            continue
        value = value if equals else next(queue, "")
        if not value or value.startswith("--"):
            raise UsageError("--text is given no path: give a file, a folder or a glob")
        path = Path(value)
    return path, rest


def parse(default: T, arguments: list[str], program: str) -> T:
    """`default` with the options in `arguments`."""
    return parse_type(type(default), arguments, program, default=default)


def parse_type(kind: type[T], arguments: list[str], program: str, **default: Any) -> T:
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
        known = list(flags(kind, default.get("default")))
        raise UsageError(f"unknown option {unknown[0]}{nearest(unknown[0].partition('=')[0], known)}")
    return chosen


def flags(kind: type, default: Any) -> list[str]:
    """The options that `kind` takes."""
    names = [f"--{name.replace('_', '-')}" for name in kind.__dataclass_fields__ if name != "experiment"]
    if default is not None and hasattr(default, "experiment"):
        names += ["--text", "--continue", "--from", *options(default.experiment)]
    return names


def one_line(box: str) -> str:
    """The message inside tyro's box, with or without frame: what stands under its title, up to the next rule."""
    lines = [line.strip(" │|") for line in box.splitlines() if line.strip()]
    below_title = itertools.dropwhile(is_rule, lines[1:])
    message = " ".join(itertools.takewhile(lambda line: not is_rule(line), below_title))
    message = re.sub(r"^Error parsing (experiment(: |\.))?", "", message)
    return message or "the command line cannot be read; see --help"


def is_rule(line: str) -> bool:
    return not line.strip("─-╰╯")
