"""The commands: parsing and printing only.

A command prints for people on stderr and, last, one JSON object on stdout. Exit codes: 0 done, 1 the run failed,
2 the input is wrong, 75 preempted (SIGTERM, SIGUSR1: begin me again), 130 interrupted. What fails is one line,
`error: ...`, the last on stderr; with --debug it is a traceback.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import jax
import tyro

from ctx_jax import cli_evaluation, cli_text, cli_transfer
from ctx_jax.compilation import keep_compiled
from ctx_jax.experiment import Experiment
from ctx_jax.generation.beams import NO_SEARCH, Beams
from ctx_jax.generation.sampling import Sampling
from ctx_jax.options import (
    TEXT,
    USAGE,
    UsageError,
    is_help,
    of_run,
    on_text,
    parse,
    positional,
    take,
    with_experiment,
)
from ctx_jax.parallel.hosts import start_hosts
from ctx_jax.progress import show, speaks
from ctx_jax.serialization import nearest
from ctx_jax.signals import INTERRUPTED, REQUEUE, Interrupted, Preempted
from ctx_jax.text import local
from ctx_jax.training.metrics import Diverged
from ctx_jax.training.stopping import ended_by_notice
from ctx_jax.transfer.finetuning import adapted

BAD_PATHS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of the system that are the user's; others (a full disk) are failures of the run."""

SHORT_OF_MEMORY = ("resource_exhausted", "out of memory", "out_of_memory")
"""What JAX says of a device whose memory is full."""


@dataclass(frozen=True)
class Train:
    """Start a run, or resume the one in its folder. --text PATH and --tokenizer KIND put other text and another
    tokenizer under the experiment; their options are then listed, too."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    run: Path | None = None
    """the run's folder; default: runs/<name>-<fingerprint>"""
    continue_from: Annotated[Path | None, tyro.conf.arg(name="continue")] = None
    """a run whose parameters, optimizer and step this one takes over; the reader starts anew"""
    start_from: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """a run or checkpoint whose matching parameters this one starts from"""
    coordinator: str | None = None
    """host:port of process 0 of several; default: $JAX_COORDINATOR_ADDRESS, or what Slurm or the TPU says"""
    processes: int | None = None
    """how many there are; default: $JAX_NUM_PROCESSES"""
    process: int | None = None
    """which of them this is, from 0; default: $JAX_PROCESS_ID or $JOB_COMPLETION_INDEX"""


@dataclass(frozen=True)
class Evaluate:
    """Score held-out text with a checkpoint of a run: each token once."""

    checkpoint: str = "last"
    """last, best (by training.best, or the evaluation's loss), or a step"""
    text: str | None = None
    """other text to score, all of it; default: what the experiment holds out"""
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
    threshold: float | None = None
    """of answers that may be none: how much better none must be; default: the experiment's"""


@dataclass(frozen=True)
class Generate:
    """Continue prompts with a checkpoint of a run."""

    prompt: tuple[str, ...]
    """one or more texts to go on from"""
    checkpoint: str = "last"
    """last, best (by training.best, or the evaluation's loss), or a step"""
    length: int = 64
    """tokens to generate, at most"""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling()
    search: Annotated[Beams, tyro.conf.arg(name="")] = NO_SEARCH
    seed: int = 0
    """the same seed gives the same text"""
    stop: tuple[str, ...] = ()
    """texts that end what is generated, and are left out"""
    window: int | None = None
    """tokens that a text goes on from: read anew where the model's positions are used up (GPT), or all that a new
    token sees (Transformer-XL, XLNet); default: the whole text, and an error past the last position"""
    stream: bool = False
    """show the texts on stderr while they are written"""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("--prompt is given no text: give one or more")


@dataclass(frozen=True)
class Import:
    """Make a run folder of a model of another implementation: a folder as Hugging Face lays it out, or a TensorFlow
    checkpoint of BERT or XLNet. The other way: convert RUN --help."""

    leave_out: tuple[str, ...] = ()
    """tensors, or modules with all of theirs, that our model has no place for"""
    tokenizer: Path | None = None
    """the folder of its tokenizer; default: the model's"""
    lowercase: bool | None = None
    """whether the model is uncased; default: as its files say"""


@dataclass(frozen=True)
class Export:
    """Write a checkpoint of a run as transformers loads it, with its tokenizer. The other way: convert --help."""

    checkpoint: str = "last"
    """last, best (by training.best, or the evaluation's loss), or a step"""
    kind: str | None = None
    """the class, as BertForMaskedLM; default: what the run was imported as, or the class that holds most of it"""
    shard_bytes: int = 5 * 10**9
    """bytes of tensors in a file, at most"""


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
    words = [argument for argument in arguments if argument != "--debug"]
    try:
        command, rest = named_command(words)
        # Whatever a library or an experiment prints belongs on stderr; help that was asked for does not.
        output = contextlib.nullcontext() if is_help(rest) else contextlib.redirect_stdout(sys.stderr)
        with output, ended_by_notice():
            keep_compiled()
            result = COMMANDS[command](rest)
        if speaks():
            print(as_json(result), flush=True)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments and not isinstance(error, (Interrupted, Preempted)):
            raise
        fail(*explained(error))


def as_json(result: Any) -> str:
    """One line, in which what people and stdout can read is no escape."""
    line = json.dumps(result, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(result)
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in line)


def named_command(words: list[str]) -> tuple[str, list[str]]:
    """The command that the first word or two name, and the others."""
    for count in (2, 1):
        if (command := " ".join(words[:count])) in COMMANDS:
            return command, words[count:]
    if not {"-h", "--help"}.isdisjoint(words):
        print(USAGE)
        sys.exit(0)
    actions = [command for command in COMMANDS if command.startswith(f"{words[0]} ")]
    if actions:
        raise UsageError(f"{words[0]} needs to be told what to do: {' or '.join(actions)}")
    raise UsageError(f"unknown command {words[0]!r}{nearest(words[0], list(COMMANDS))}; see --help")


def explained(error: BaseException) -> tuple[str, int]:
    """What is said of an error, and the exit code."""
    match error:
        case Interrupted():
            return str(error), INTERRUPTED
        case Preempted():
            return str(error), REQUEUE
        case KeyboardInterrupt():
            return (
                "interrupted: the same command goes on from the last checkpoint, or where it was in preparing a text",
                INTERRUPTED,
            )
        case Diverged():
            return str(error), 1
        case BrokenPipeError():
            # What is left in the buffer would fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # pyright: ignore[reportOptionalMemberAccess]
            return "stdout was closed before the result was written: the same command gives it again", 1
        case ChildProcessError():
            return str(error), 1
        case OSError(filename=file, strerror=reason) if reason:
            remedy = "choose another path" if isinstance(error, BAD_PATHS) else "mend it, then give the same command"
            return f"{file or 'the system'}: {reason}: {remedy}", 2 if isinstance(error, BAD_PATHS) else 1
        case ValueError() if "No space left" in str(error):  # as orbax raises it
            return "the disk is full: make room, then the same command goes on", 1
        case ValueError() | FileNotFoundError() | FileExistsError():
            return str(error), 2
        case OSError():
            return first_line(error), 1
        case jax.errors.JaxRuntimeError() | MemoryError():
            short = isinstance(error, MemoryError) or any(words in str(error).lower() for words in SHORT_OF_MEMORY)
            remedy = (
                "choose a smaller batch, more training.accumulation or model.remat"
                if short
                else "the same command goes on from the last checkpoint"
            )
            return f"{'memory is short' if short else 'the devices gave up'}: {first_line(error)}; {remedy}", 1
        case _:
            return f"unexpected {type(error).__name__}: {first_line(error)}; --debug shows where", 1


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def fail(message: object, code: int) -> NoReturn:
    """One line on stderr, and out."""
    with contextlib.suppress(BrokenPipeError):
        print("error: " + " ".join(str(message).split()), file=sys.stderr, flush=True)
    sys.exit(code)


def train(arguments: list[str]) -> Any:
    from ctx_jax import runs

    experiment, rest = with_experiment("train", arguments)
    # A file holds what was resolved: a sweep has changed it since.
    adapt = not arguments[0].endswith(".json")
    chosen = configured(experiment, rest, f"ctx_jax train {arguments[0]}", adapt)
    start_hosts(chosen.coordinator, chosen.processes, chosen.process)
    return runs.train(chosen.experiment, chosen.run, chosen.continue_from, chosen.start_from)


def configured(experiment: Experiment, rest: list[str], program: str, adapt: bool = True) -> Train:
    """What the options of `train` make of the experiment, with the network of --from where it is a task."""
    if adapt and (source := take("--from", rest)[0]) is not None:
        experiment = adapted(experiment, Path(source))
    return parse(Train(experiment), rest, program, TEXT)


def evaluate(arguments: list[str]) -> Any:
    from ctx_jax import runs
    from ctx_jax.transfer.texts import own_options

    (folder,), rest = positional("evaluate", arguments, "RUN", most=1)
    chosen = parse(Evaluate(), rest, "ctx_jax evaluate RUN")
    with own_options():
        return runs.evaluate(Path(folder), **vars(chosen))


def generate(arguments: list[str]) -> Any:
    from ctx_jax import runs

    folder, chosen = of_run("generate", arguments, Generate)
    return runs.generate(
        folder,
        chosen.prompt,
        chosen.length,
        chosen.sampling,
        chosen.seed,
        checkpoint=chosen.checkpoint,
        search=chosen.search,
        stop=chosen.stop,
        window=chosen.window,
        show=show if chosen.stream else None,
    )


def convert(arguments: list[str]) -> Any:
    from ctx_jax import conversion

    places, rest = positional("convert", arguments, "SOURCE DESTINATION", most=2)
    if len(places) == 1 and not is_help(rest):
        raise UsageError(f"convert is given no destination: convert {places[0]} DESTINATION")
    if "" in places:
        raise UsageError("convert is given an empty name: convert SOURCE DESTINATION")
    source, destination = Path(places[0]), local("DESTINATION", places[-1])
    exporting = conversion.is_run(source)
    program = f"ctx_jax convert {'RUN FOLDER' if exporting else 'FOLDER RUN'}"
    chosen = parse(Export() if exporting else Import(), rest, program)
    try:
        return (conversion.export_run if exporting else conversion.import_run)(source, destination, **vars(chosen))
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing was written, the same command begins anew") from None


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
    return examination.diagnose(parse(Doctor(experiment), rest, f"ctx_jax doctor {arguments[0]}", TEXT).experiment)


def sweep(arguments: list[str]) -> Any:
    from launch import sweep_command as sweeps

    words = list(itertools.takewhile(lambda word: word != "--", arguments))
    (name,), rest = positional("sweep", words, "FILE.py[:function]", most=1)
    given = arguments[len(words) + 1 :]

    def chosen(experiment: Experiment) -> tuple[Experiment, list[str]]:
        train = configured(*on_text(experiment, given), f"ctx_jax sweep {name} --")
        for option in ("run", "coordinator", "processes", "process"):
            if getattr(train, option) is not None:
                raise UsageError(f"--{option} behind --: a sweep starts its runs itself, leave it out")
        origins = {"--from": train.start_from, "--continue": train.continue_from}
        return train.experiment, [word for pair in origins.items() if pair[1] for word in map(str, pair)]

    options = parse(sweeps.Sweep(), rest, "ctx_jax sweep FILE.py[:function]")
    return sweeps.run(name, options, chosen if given else None)


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "convert": convert,
    "report": report,
    "doctor": doctor,
    **cli_transfer.COMMANDS,
    **cli_evaluation.COMMANDS,
    "sweep": sweep,
    **cli_text.COMMANDS,
}
