"""The commands: parsing and printing only.

A command prints for people on stderr and, last, one JSON object on stdout. Exit codes: 0 done, 1 the run failed,
2 the input is wrong, 130 interrupted. What fails is one line, `error: ...`; with --debug it is a traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import jax
import tyro

from ctx_jax.data.readers import Blocks
from ctx_jax.data.tfds import corpus_from
from ctx_jax.experiment import Data, Experiment, find
from ctx_jax.generation.decode import Sampling
from ctx_jax.options import UsageError, is_help, parse, parse_type, positional, take
from ctx_jax.serialization import nearest
from ctx_jax.training.loop import Interrupted
from ctx_jax.training.metrics import Diverged

USAGE = """usage: python -m ctx_jax COMMAND ...

  train EXPERIMENT [--run DIR] [--text PATH] [--tokenizer KIND] [--continue RUN] [--from RUN] [--training.steps N] ...
                                                                                        start a run, or resume it
  evaluate RUN [--text PATH] [--split test] [--length T] [--stride N] ...               score held-out text
  generate RUN --prompt "..." [--temperature 0] [--top-k K] [--top-p P] ...             continue prompts
  report RUN... [--output report.html]                                                  learning curves as a page
  doctor [EXPERIMENT] [--training.accumulation A] ...                                   what will run, what it needs
  tokenizer train KIND [--text PATH] [--vocabulary-size N] [--output DIR] ...           learn a tokenizer from text
  data prepare [EXPERIMENT] [--text PATH] [--tokenizer KIND] ...                        tokenize all of a corpus
  data inspect STORE|EXPERIMENT [--text PATH] [--tokenizer KIND] [--split train] ...    what is in a token store
  data tfds NAME --text PATH [--data-dir DIR]                                           make a TFDS data set of text

PATH is a text or JSONL file (.gz and .zst too), a folder, a glob, or tfds:NAME for a TensorFlow data set.
KIND is unigram, bpe, wordpiece, byte_bpe, bytes, characters, words, or the folder of a trained tokenizer.

EXPERIMENT is file:function, as bert:base or my/folder/file.py:function, or the path of an experiment.json.
COMMAND --help lists its options; those of train and doctor are the fields of the experiment, so name one with it.
With --debug, what fails shows where in the code it did."""

BAD_PATHS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of the system that are the user's; others (a full disk) are failures of the run."""


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


@dataclass(frozen=True)
class TrainTokenizer:
    """Learn a tokenizer from a corpus."""

    tokenizer: Annotated[Any, tyro.conf.arg(name="")]
    corpus: Any
    output: Path = Path("tokenizer")
    """the folder that it is written to"""


@dataclass(frozen=True)
class Prepare:
    """Learn the tokenizer and tokenize every split of a corpus; what is there already stays."""

    data: Data


@dataclass(frozen=True)
class Inspect:
    """What is in a token store: counts, lengths, and samples as text and as tokens."""

    samples: int = 3
    """stretches of text to show"""
    length: int = 48
    """tokens in a stretch"""
    seed: int = 0
    """which stretches"""


@dataclass(frozen=True)
class InspectExperiment(Inspect):
    """What is in the token store of an experiment: counts, lengths, and samples as text and as tokens."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")] = field(kw_only=True)
    split: str = "train"
    """train, validation or test"""


@dataclass(frozen=True)
class WriteTfds:
    """Make a TensorFlow data set of a corpus."""

    corpus: Any
    data_dir: Path = Path("tfds")
    """the folder that holds data sets"""


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
        with contextlib.nullcontext() if is_help(rest) else contextlib.redirect_stdout(sys.stderr):
            result = COMMANDS[command](rest)
        print(json.dumps(result), flush=True)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments:
            raise
        fail(*explained(error))


def named_command(words: list[str]) -> tuple[str, list[str]]:
    """The command that the first word or two name, and the others."""
    for count in (2, 1):
        if (command := " ".join(words[:count])) in COMMANDS:
            return command, words[count:]
    actions = [command for command in COMMANDS if command.startswith(f"{words[0]} ")]
    if actions:
        raise UsageError(f"{words[0]} needs to be told what to do: {' or '.join(actions)}")
    raise UsageError(f"unknown command {words[0]!r}{nearest(words[0], list(COMMANDS))}; see --help")


def explained(error: BaseException) -> tuple[str, int]:
    """What is said of an error, and the exit code."""
    match error:
        case Interrupted():
            return str(error), 130
        case KeyboardInterrupt():
            return (
                "interrupted: the same command goes on from the last checkpoint, or the text prepared so far",
                130,
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
    chosen = parse(Train(experiment), rest, f"ctx_jax train {arguments[0]}", TEXT)
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
    return examination.diagnose(parse(Doctor(experiment), rest, f"ctx_jax doctor {arguments[0]}", TEXT).experiment)


def train_tokenizer(arguments: list[str]) -> Any:
    from ctx_jax import text
    from ctx_jax.data.tokenizers import named

    (kind,), rest = positional("tokenizer train", arguments, "KIND", most=1)
    if is_help(rest):
        kind = "unigram"
    path, rest = take("--text", rest)
    default = TrainTokenizer(named(kind), Data(Blocks()).corpus if path is None else corpus_from(path))
    chosen = parse(default, rest, f"ctx_jax tokenizer train {kind}", ("--text",))
    return text.train_tokenizer(chosen.tokenizer, chosen.corpus, chosen.output)


def prepare(arguments: list[str]) -> Any:
    from ctx_jax import text

    if arguments and not arguments[0].startswith("-"):
        experiment, rest = with_experiment("data prepare", arguments)
        program = f"ctx_jax data prepare {arguments[0]}"
        return text.prepare_all(parse(Doctor(experiment), rest, program, TEXT).experiment.data)
    data, rest = with_text(Data(Blocks()), arguments)
    return text.prepare_all(parse(Prepare(data), rest, "ctx_jax data prepare", TEXT).data)


def inspect(arguments: list[str]) -> Any:
    from ctx_jax import text

    (target,), rest = positional("data inspect", arguments, "STORE|EXPERIMENT", most=1)
    if is_help(rest) or (Path(target) / "store.json").is_file():
        chosen = parse(Inspect(), rest, "ctx_jax data inspect STORE")
        return text.inspect_store(Path(target), chosen.samples, chosen.length, chosen.seed)
    experiment, rest = with_experiment("data inspect", arguments)
    chosen = parse(InspectExperiment(experiment=experiment), rest, f"ctx_jax data inspect {target}", TEXT)
    split = text.known_split(chosen.split)
    store = text.open_text(chosen.experiment.data, (split,))[1][split]
    return text.inspect_store(store.folder, chosen.samples, chosen.length, chosen.seed)


def write_tfds(arguments: list[str]) -> Any:
    from ctx_jax.data import tfds

    (name,), rest = positional("data tfds", arguments, "NAME", most=1)
    path, rest = take("--text", rest)
    if path is None and not is_help(rest):
        raise UsageError("data tfds needs --text PATH: a file, a folder or a glob")
    default = WriteTfds(corpus_from(path or "text"))
    chosen = parse(default, rest, f"ctx_jax data tfds {name}", ("--text",))
    return {"data_set": str(tfds.write_tfds(chosen.corpus, name, chosen.data_dir)), "name": f"tfds:{name}"}


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "report": report,
    "doctor": doctor,
    "tokenizer train": train_tokenizer,
    "data prepare": prepare,
    "data inspect": inspect,
    "data tfds": write_tfds,
}

TEXT = ("--text", "--tokenizer")
"""Options that choose another corpus or tokenizer, and so which fields there are to be options."""


def with_experiment(command: str, arguments: list[str]) -> tuple[Experiment, list[str]]:
    """The experiment named by the first argument, on the text and with the tokenizer that the options name, and the
    other arguments."""
    (name,), rest = positional(command, arguments, "EXPERIMENT", most=1)
    if name == "EXPERIMENT":
        print(USAGE, file=sys.stderr)
        sys.exit(0)
    experiment = find(name)
    data, rest = with_text(experiment.data, rest)
    if data.tokenizer is experiment.data.tokenizer:
        return replace(experiment, data=data), rest
    model = replace(experiment.model, vocabulary_size=data.tokenizer.vocabulary_size)
    return replace(experiment, data=data, model=model), rest


def with_text(data: Data, arguments: list[str]) -> tuple[Data, list[str]]:
    """`data` with the corpus of --text and the tokenizer of --tokenizer, and the other arguments. A tokenizer that is
    still to be trained keeps the size of the one in its place."""
    from ctx_jax.data.tokenizers import named

    path, rest = take("--text", arguments)
    if path is not None:
        data = replace(data, corpus=corpus_from(path))
    kind, rest = take("--tokenizer", rest)
    if kind is not None:
        tokenizer = named(kind)
        if any(field.name == "vocabulary_size" for field in fields(tokenizer)):  # pyright: ignore[reportArgumentType]
            tokenizer = replace(tokenizer, vocabulary_size=data.tokenizer.vocabulary_size)  # pyright: ignore[reportArgumentType]
        data = replace(data, tokenizer=tokenizer)
    return data, rest
