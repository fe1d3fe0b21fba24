"""An experiment: data + model + objective + optimizer + mesh + training, as one typed, frozen, validated value.

An experiment file is Python: functions that return an `Experiment`, variants by `dataclasses.replace`. The resolved
experiment is written to its run folder as JSON, and a run starts again from that file alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctx_jax.contract import Objective, Reader
from ctx_jax.data.corpora import Sotu
from ctx_jax.data.tokenizers import SentencePiece
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.serialization import from_json, leaves, nearest, to_json
from ctx_jax.training.loop import Training

NOT_IDENTITY = re.compile(
    r"name|mesh(\..*)?|data\.folder"
    r"|training\.(evaluate_every|evaluate_batches|checkpoint_every|log_every|keep)"
)
"""Fields that do not change what a run computes: left out of the fingerprint."""


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
    folder: Path = Path("data")
    """where tokenizers and token stores are kept"""

    def __post_init__(self) -> None:
        for name in ("reader", "evaluation_reader"):
            reader = getattr(self, name)
            if not (isinstance(reader, Reader) or (reader is None and name == "evaluation_reader")):
                raise ValueError(f"data.{name} {reader!r} is not a reader: use one of data/readers.py or data/pairs.py")
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
        if not isinstance(self.objective, Objective):
            raise ValueError(f"objective {self.objective!r} is not an objective: use one of objectives/")
        for problem in problems(self):
            raise ValueError(problem)

    @property
    def evaluation_reader(self) -> Reader:
        return self.data.reader if self.data.evaluation_reader is None else self.data.evaluation_reader

    @property
    def evaluation_batch_size(self) -> int:
        return self.data.evaluation_batch_size or self.data.batch_size


def problems(experiment: Experiment) -> Iterator[str]:
    """One line for each pair of parts that do not fit each other."""
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
    if data.batch_size % experiment.training.accumulation:
        yield (
            f"data.batch_size {data.batch_size} does not divide into training.accumulation "
            f"{experiment.training.accumulation} micro-batches: choose a multiple"
        )
    yield from objective.requirements(model, data.reader)


def options(experiment: Any) -> list[str]:
    """The command line's option of every field, as `--data.batch-size`."""
    return ["--" + name.replace("_", "-") for name, _ in leaves(experiment)]


def fingerprint(experiment: Experiment) -> str:
    """Eight hex digits of what the run computes; mesh, cadences and paths are left out."""
    identity = [(name, repr(value)) for name, value in leaves(experiment) if not NOT_IDENTITY.fullmatch(name)]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]


def differences(a: Experiment, b: Experiment) -> list[str]:
    """ "field: value in a -> value in b" for every field that belongs to the identity and differs."""
    left, right = dict(leaves(a)), dict(leaves(b))
    return [
        f"{name}: {left.get(name, 'absent')} -> {right.get(name, 'absent')}"
        for name in {**left, **right}
        if not NOT_IDENTITY.fullmatch(name) and repr(left.get(name)) != repr(right.get(name))
    ]


def save(experiment: Experiment, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(to_json(experiment), indent=2) + "\n")
    temporary.replace(path)


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
        return load(Path(name))
    file, _, function = name.partition(":")
    module = _module(file, name)
    functions = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    if function not in functions:
        known = ", ".join(f"{file}:{key}" for key in functions)
        what = f"experiment {name!r} names no function" if not function else f"unknown experiment {name!r}"
        raise ValueError(f"{what}{nearest(function, list(functions))}; there are: {known}")
    experiment = functions[function]()
    if not isinstance(experiment, Experiment):
        raise ValueError(f"{name} returned {type(experiment).__name__}: it must return an Experiment")
    return experiment


def folders() -> list[Path]:
    """Where experiments are looked for: the current folder, then the clone (the package is installed editable)."""
    clone = Path(__file__).resolve().parent.parent / "experiments"
    return list(dict.fromkeys([Path.cwd() / "experiments", clone]))


def _module(file: str, name: str) -> Any:
    candidates = [Path(file)] if file.endswith(".py") else [folder / f"{file}.py" for folder in folders()]
    for path in candidates:
        if path.is_file():
            specification = importlib.util.spec_from_file_location(f"experiments.{path.stem}", path)
            assert specification is not None and specification.loader is not None
            module = importlib.util.module_from_spec(specification)
            sys.modules[specification.name] = module
            specification.loader.exec_module(module)
            return module
    if file.endswith(".py"):
        raise ValueError(f"unknown experiment {name!r}: there is no file {file}")
    known = sorted({path.stem for folder in folders() for path in folder.glob("*.py")})
    raise ValueError(f"unknown experiment {name!r}{nearest(file, known)}; there are: {', '.join(known)}")
