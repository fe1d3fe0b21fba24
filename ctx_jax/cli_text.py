"""The commands on text: tokenizers, token stores, TensorFlow data sets. Parsing and printing only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from ctx_jax import text
from ctx_jax.data import tfds
from ctx_jax.data.readers import Blocks
from ctx_jax.data.tfds import corpus_from
from ctx_jax.data.tokenizers import named
from ctx_jax.experiment import Data, Experiment
from ctx_jax.options import TEXT, UsageError, is_help, parse, positional, take, with_experiment, with_text


@dataclass(frozen=True)
class TrainTokenizer:
    """Learn a tokenizer from a corpus: the speeches, or what --text PATH names, whose options are then listed, too."""

    tokenizer: Annotated[Any, tyro.conf.arg(name="")]
    corpus: Annotated[Any, tyro.conf.arg(name="data.corpus")]
    output: str = "tokenizer"
    """the folder that it is written to"""


@dataclass(frozen=True)
class Prepare:
    """Learn the tokenizer and tokenize every split of a corpus; what is there already stays. --text PATH and
    --tokenizer KIND choose others than the default; their options are then listed, too."""

    data: Data


@dataclass(frozen=True)
class PrepareExperiment:
    """Learn the tokenizer and tokenize every split of an experiment's corpus; what is there already stays."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]


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
class InspectText(Inspect):
    """What is in the token store of a text: counts, lengths, and samples as text and as tokens."""

    data: Data = field(kw_only=True)
    split: str = "train"
    """train, validation or test"""


@dataclass(frozen=True)
class WriteTfds:
    """Make a TensorFlow data set of a corpus."""

    corpus: Annotated[Any, tyro.conf.arg(name="data.corpus")]
    data_dir: str = "tfds"
    """the folder that holds data sets"""


def train_tokenizer(arguments: list[str]) -> Any:
    (kind,), rest = positional("tokenizer train", arguments, "KIND", most=1)
    if kind == "KIND":
        kind = "unigram"
    path, rest = take("--text", rest)
    default = TrainTokenizer(named(kind), Data(Blocks()).corpus if path is None else corpus_from(path))
    chosen = parse(default, rest, f"ctx_jax tokenizer train {kind}", ("--text",))
    return text.train_tokenizer(chosen.tokenizer, chosen.corpus, text.local("--output", chosen.output))


def prepare(arguments: list[str]) -> Any:
    if arguments and not arguments[0].startswith("-"):
        experiment, rest = with_experiment("data prepare", arguments)
        program = f"ctx_jax data prepare {arguments[0]}"
        return text.prepare_all(parse(PrepareExperiment(experiment), rest, program, TEXT).experiment.data)
    data, rest = with_text(Data(Blocks()), arguments)
    return text.prepare_all(parse(Prepare(data), rest, "ctx_jax data prepare", TEXT).data)


def inspect(arguments: list[str]) -> Any:
    if arguments and arguments[0].startswith("-") and not is_help(arguments):
        data, rest = with_text(Data(Blocks()), arguments)
        chosen = parse(InspectText(data=data), rest, "ctx_jax data inspect", TEXT)
        return inspect_split(chosen.data, chosen)
    (target,), rest = positional("data inspect", arguments, "STORE|EXPERIMENT", most=1)
    if target == "STORE|EXPERIMENT" or Path(target).is_dir():
        chosen = parse(Inspect(), rest, "ctx_jax data inspect STORE")
        return text.inspect_store(Path(target), chosen.samples, chosen.length, chosen.seed)
    experiment, rest = with_experiment("data inspect", arguments)
    chosen = parse(InspectExperiment(experiment=experiment), rest, f"ctx_jax data inspect {target}", TEXT)
    return inspect_split(chosen.experiment.data, chosen)


def inspect_split(data: Data, chosen: InspectExperiment | InspectText) -> Any:
    split = text.known_split(chosen.split)
    tokenizer, stores = text.open_text(data, (split,))
    return text.inspect_store(stores[split].folder, chosen.samples, chosen.length, chosen.seed, tokenizer)


def write_tfds(arguments: list[str]) -> Any:
    (name,), rest = positional("data tfds", arguments, "NAME", most=1)
    path, rest = take("--text", rest)
    if path is None and not is_help(rest):
        raise UsageError("data tfds needs --text PATH: a file, a folder or a glob")
    default = WriteTfds(corpus_from(path or "text"))
    chosen = parse(default, rest, f"ctx_jax data tfds {name}", ("--text",))
    folder = text.local("--data-dir", chosen.data_dir)
    return {"data_set": str(tfds.write_tfds(chosen.corpus, name, folder)), "name": f"tfds:{name}"}


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "tokenizer train": train_tokenizer,
    "data prepare": prepare,
    "data inspect": inspect,
    "data tfds": write_tfds,
}
