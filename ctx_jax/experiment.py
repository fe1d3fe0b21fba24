"""An experiment: data + model + objective + optimizer + mesh + training, as one typed, frozen, validated value.

An experiment file is Python: functions that return an `Experiment`, variants by `dataclasses.replace`. The resolved
experiment is written to its run folder as JSON, and a run starts again from that file alone.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from ctx_jax.contract import Reader
from ctx_jax.data import write_durably
from ctx_jax.data.corpora import Sotu
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.tokenizers import Pretrained
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.serialization import from_json, leaves, nearest, to_json
from ctx_jax.training.loop import Training

TOKENIZER = "tokenizer"
"""The folder of its tokenizer in a run's folder."""

PARTS = (
    ("data.corpus", "passages", "data/corpora.py"),
    ("data.tokenizer", "train", "data/tokenizers.py"),
    ("data.reader", "passes", "data/readers.py or data/pairs.py"),
    ("model", "vocabulary_size", "models/"),
    ("objective", "requirements", "objectives/"),
    ("optimizer", "build", "training/optimizers.py"),
)
"""Each part that may be of several types, what it must be able to do, and where such types are."""


@dataclass(frozen=True)
class Data:
    """Which text is read, how it is tokenized, in which order."""

    reader: Any
    """the order in which the store is read: Blocks, Lanes, Pairs, Sentences (data/readers.py, data/pairs.py)"""
    corpus: Any = Sotu()
    """where the documents come from (data/corpora.py)"""
    tokenizer: Any = SentencePiece()
    """how text becomes ids (data/tokenizers.py)"""
    batch_size: int = 32
    """rows in a batch, over all devices and hosts"""
    evaluation_reader: Any = None
    """the reader of held-out text; None = `reader`"""
    evaluation_batch_size: int | None = None
    """rows in an evaluation batch; None = `batch_size`"""
    folder: str | Path = "data"
    """where tokenizers and token stores are kept; gs:// and the like are copied from at start"""
    local_folder: Path = Path("data")
    """where what comes from a remote `folder` is copied to"""
    workers: int | None = None
    """processes that tokenize; None = one for each core, at most 8"""

    def __post_init__(self) -> None:
        if not (self.evaluation_reader is None or isinstance(self.evaluation_reader, Reader)):
            raise ValueError(
                f"data.evaluation_reader {self.evaluation_reader!r} is no reader: use one of data/readers.py or "
                "data/pairs.py, or None"
            )
        for name in ("batch_size", "evaluation_batch_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"data.{name} {size} is not a number of rows: choose 1 or more")


@dataclass(frozen=True)
class Experiment:
    """Everything that a run is."""

    name: str
    """a short name; with the fingerprint it names the run folder"""
    data: Data
    model: Any
    """the network's configuration (models/)"""
    objective: Any
    """what must be predicted (objectives/)"""
    optimizer: Any
    """the update rule and its schedule (training/optimizers.py)"""
    training: Training
    mesh: Mesh = field(default_factory=Mesh)

    def __post_init__(self) -> None:
        for problem in problems(self):
            raise ValueError(problem)

    @property
    def evaluation_reader(self) -> Reader:
        return self.data.reader if self.data.evaluation_reader is None else self.data.evaluation_reader

    @property
    def evaluation_batch_size(self) -> int:
        return self.data.evaluation_batch_size or self.data.batch_size


def problems(experiment: Experiment) -> Iterator[str]:
    """One line for each field that is no such thing, and for each pair of parts that do not fit each other."""
    for name, ability, place in PARTS:
        part = attrgetter(name)(experiment)
        if not hasattr(part, ability):
            yield f"{name} {part!r} has no {ability}: use one of {place}"
    if not experiment.name or Path(experiment.name).name != experiment.name:
        yield f"name {experiment.name!r} cannot name a folder: choose one without slashes"
    for name, value in leaves(experiment):
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                yield f"{name} {number} is not a number that can be computed with: choose a finite one"
    data, model, objective = experiment.data, experiment.model, experiment.objective
    pieces = data.tokenizer.vocabulary_size
    if pieces > model.vocabulary_size:
        yield (
            f"data.tokenizer.vocabulary_size {pieces} is larger than model.vocabulary_size {model.vocabulary_size}: "
            f"set --model.vocabulary-size {pieces} or train a smaller tokenizer"
        )
    positions = getattr(model, "max_length", None)
    for name, reader in (("reader", data.reader), ("evaluation_reader", experiment.evaluation_reader)):
        if positions is not None and reader.length > positions:
            yield (
                f"data.{name}.length {reader.length} is longer than the model's {positions} positions: "
                f"set --model.max-length {reader.length} or shorten --data.{name.replace('_', '-')}.length"
            )
        if getattr(model, "segments", None) == 1 and hasattr(reader, "relation"):
            yield f"model.segments 1 is too few for the pairs of data.{name}: set --model.segments 2, or 0 for none"
    layers = getattr(model, "layers", None)
    if layers is not None and (frozen := getattr(experiment.optimizer, "frozen", None) or 0) > layers:
        yield f"optimizer.frozen {frozen} is more than the model's {layers} layers: choose {layers} or fewer, or None"
    if data.batch_size % experiment.training.accumulation:
        yield (
            f"data.batch_size {data.batch_size} does not divide into training.accumulation "
            f"{experiment.training.accumulation} micro-batches: choose a multiple"
        )
    for reader in dict.fromkeys((data.reader, experiment.evaluation_reader)):
        yield from objective.requirements(model, reader)


def options(experiment: Any) -> list[str]:
    """The command line's option of every field, as `--data.batch-size`; of a flag also its opposite."""
    names = []
    for name, value in leaves(experiment):
        parent, dot, last = name.rpartition(".")
        names += [name, f"{parent}{dot}no_{last}"] if isinstance(value, bool) else [name]
    return ["--" + name.replace("_", "-") for name in names]


def save(experiment: Experiment, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(to_json(experiment), indent=2) + "\n")


def load(path: Path) -> Experiment:
    """The experiment that `save` wrote; raises ValueError naming the place of what cannot be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a readable experiment file ({error})") from None
    experiment = from_json(value, str(path))
    if not isinstance(experiment, Experiment):
        raise ValueError(f"{path}: holds no experiment but a {type(experiment).__name__}")
    return experiment


def find(name: str) -> Experiment:
    """The experiment called `name`: "bert:base" (`base()` of experiments/bert.py, in the current folder or else in the
    clone), "folder/file.py:function", or the path of an experiment.json.

    Raises ValueError naming what is there if it cannot be found.
    """
    if name.endswith(".json"):
        return beside(load(Path(name)), Path(name).parent)
    experiment = called(name)
    if not isinstance(experiment, Experiment):
        raise ValueError(f"{name} returned {type(experiment).__name__}: it must return an Experiment")
    return experiment


def called(name: str) -> Any:
    """What the function returns that is called `name`, as in `find`; a file's only function needs no name."""
    file, _, function = name.partition(":")
    module = _module(file, name)
    functions = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    known = [key for key, value in functions.items() if key != "main" and not inspect.signature(value).parameters]
    if not function and len(known) == 1:
        (function,) = known
    if function not in functions:
        what = f"experiment {name!r} names no function" if not function else f"unknown experiment {name!r}"
        there = ", ".join(f"{file}:{key}" for key in known) or "none in its file"
        raise ValueError(f"{what}{nearest(function, known)}; there are: {there}")
    with one_line_errors(name, module):
        return functions[function]()


def beside(experiment: Experiment, run: Path) -> Experiment:
    """The experiment with its tokenizer in `run`, if it was in its run's folder, wherever that was."""
    tokenizer = experiment.data.tokenizer
    here = run / TOKENIZER
    if not isinstance(tokenizer, Pretrained) or Path(tokenizer.path).name != here.name or not here.is_dir():
        return experiment
    return replace(experiment, data=replace(experiment.data, tokenizer=replace(tokenizer, path=here)))


def folders() -> list[Path]:
    """Where experiments are looked for: the current folder, then the clone (the package is installed editable)."""
    clone = Path(__file__).resolve().parent.parent / "experiments"
    return list(dict.fromkeys([Path.cwd() / "experiments", clone]))


def _module(file: str, name: str) -> ModuleType:
    candidates = [Path(file)] if file.endswith(".py") else [folder / f"{file}.py" for folder in folders()]
    for path in candidates:
        if path.is_file():
            specification = importlib.util.spec_from_file_location(f"experiments.{path.stem}", path)
            assert specification is not None and specification.loader is not None
            module = importlib.util.module_from_spec(specification)
            sys.modules[specification.name] = module
            with one_line_errors(name, module):
                specification.loader.exec_module(module)
            return module
    if file.endswith(".py"):
        raise ValueError(f"unknown experiment {name!r}: there is no file {file}")
    known = sorted({path.stem for folder in folders() for path in folder.glob("*.py") if not is_script(path)})
    raise ValueError(f"unknown experiment {name!r}{nearest(file, known)}; there are: {', '.join(known)}")


def is_script(path: Path) -> bool:
    """Whether a file beside the experiments is to be run by itself."""
    return "__main__" in path.read_text(encoding="utf-8", errors="replace")


@contextmanager
def one_line_errors(name: str, module: ModuleType) -> Iterator[None]:
    """Whatever the code in an experiment's file raises becomes a ValueError that names the line in the file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            line = error.lineno
        else:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == module.__file__), None)
        file = Path(module.__file__ or "").name
        place = file if line is None else f"{file} line {line}"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"experiment {name!r} failed, {place}: {kind}{error}") from error
