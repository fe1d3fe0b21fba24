"""What every kind of task is: labelled examples in files, which become rows of tokens, and are scored.

A task is a corpus, too: its documents are the texts of its examples. So a tokenizer can be learned from it. The kinds
are in tasks.py (a class or a number of a text or a pair), tagging.py, answers.py and multiple_choice.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ctx_jax.data import fingerprint
from ctx_jax.data.corpora import Split
from ctx_jax.data.examples import ExampleStore, Outputs
from ctx_jax.data.files import Errors, content, location, text_files
from ctx_jax.data.passages import SHARE, Passage, cut, lacks, part
from ctx_jax.data.readers import scramble
from ctx_jax.data.tokenizers import Tokenizer
from ctx_jax.serialization import nearest

if TYPE_CHECKING:
    from ctx_jax.data.files import File
    from ctx_jax.transfer.inputs import Template


class Encoder(NamedTuple):
    """How examples become rows."""

    tokenizer: Tokenizer
    template: Template
    reader: Any
    """Examples, or Windows where rows are windows (data/examples.py)."""


class Encoded(NamedTuple):
    """Examples as rows, in a store, and what is made of what a model says of them."""

    store: ExampleStore
    predictions: Callable[[Outputs], list[Any]]
    """What the outputs of all rows say of each example, to be written as JSON."""


@dataclass(frozen=True)
class FileTask(ABC):
    """Labelled examples in files.

    What is not given a file of its own is held out from `path`: of every twenty `units` one for validation and one for
    the test, at places that are drawn, since files often have their classes in turn.
    """

    head: ClassVar[Literal["classes", "token_classes"]] = "classes"
    """The field of the model's config that has the size of the head."""
    whole_json: ClassVar[bool] = False
    """Whether a file is one value of JSON."""
    units: ClassVar[str] = "examples"
    """What is held out as a whole."""

    path: str | Path
    """The file of examples to train on."""
    validation: str | Path | None = None
    """That of validation; None: held out from `path`."""
    test: str | Path | None = None
    """That of the test; None: held out from `path`."""
    whole: bool = False
    """Whether every split is all of `path`, nothing held out."""
    metric: str | None = None
    """The number by which the best checkpoint is chosen; None = the first of those that the task has."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: an error that says where, or U+FFFD in their place."""
    language: str = "en"
    """ISO 639-1 code."""

    def __post_init__(self) -> None:
        for name in ("path", "validation", "test"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, location(path))
        if self.metric is not None and self.metric not in self.metrics:
            what = getattr(self, "kind", type(self).__name__)
            raise ValueError(f"metric {self.metric!r} is none of {what}: choose {' or '.join(self.metrics)}")

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """What may choose the best checkpoint, all the higher the better; the first is the default."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many outputs the head has."""

    @property
    def meaning(self) -> tuple[Any, ...]:
        """What the outputs of the head stand for: one that means something else is not taken over."""
        return (type(self).__name__,)

    @abstractmethod
    def with_labels(self) -> FileTask:
        """The task with what its training examples decide. Raises ValueError if nothing can be learned from them."""

    @abstractmethod
    def encode(self, examples: Sequence[Any], encoder: Encoder, labelled: bool = True) -> Encoded:
        """Examples in tokens, with their labels or without. Raises ValueError, naming the place, for what is no label,
        and for rows too short for any text."""

    @abstractmethod
    def inputs(self, file: File) -> Iterator[Any]:
        """The examples of a file without labels. Raises ValueError, naming the place, for what is none."""

    def files(self, predictions: list[Any], output: Path) -> dict[Path, str]:
        """The files in which predictions are written: one, a line each."""
        return {output: "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in predictions)}

    @abstractmethod
    def _read(self, file: File) -> Iterator[Any]:
        """The examples of a file; each has `texts`."""

    @property
    @abstractmethod
    def _reading(self) -> tuple[Any, ...]:
        """What else than the file decides what is read."""

    def _unit(self, number: int, example: Any) -> int:
        """The number of what is held out together with an example."""
        return number

    @property
    def languages(self) -> tuple[str, ...]:
        return (self.language,)

    @property
    def chooses(self) -> str:
        """The metric by which the best checkpoint is chosen."""
        return self.metric or self.metrics[0]

    def passages(self, split: Split) -> Iterator[Passage]:
        return cut((text for example in self.examples(split) for text in example.texts), self.language)

    def size(self, split: Split) -> int | None:
        return None

    def fingerprint(self, split: Split) -> str:
        """A key of the files and of how they are read."""
        held = self._held_out(split)
        options = (*self._reading, self.errors)
        share = ("turned", split, held) if held else None
        return fingerprint(type(self).__name__, content([self._file(split)]), share, options)

    def examples(self, split: Split) -> Iterator[Any]:
        """The examples of a split, in the order of their file.

        Raises ValueError, naming file and line, for what cannot be read as an example.
        """
        held = self._held_out(split)
        count = 0
        for number, example in enumerate(self._read(self._file(split))):
            if not held or part(turned(self._unit(number, example)), held) == split:
                count += 1
                yield example
        if not count:
            raise ValueError(f"{self._file(split)}: {lacks(split, held, self.units)}")

    def _held_out(self, split: Split) -> tuple[str, ...]:
        """Which splits share the file of this one with train."""
        if self.whole or (split != "train" and getattr(self, split) is not None):
            return ()
        return tuple(name for name in ("validation", "test") if getattr(self, name) is None)

    def _file(self, split: Split) -> File:
        path = self.path if split == "train" or self.whole else getattr(self, split) or self.path
        files = text_files(path, whole_json=self.whole_json)
        if len(files) > 1:
            raise ValueError(f"{path} names {len(files)} files: choose one of them, as {files[0]}")
        return files[0]


def turned(number: int) -> int:
    """The place that an example's has among its twenty when these are turned by a number of their own."""
    first = number - number % SHARE
    return first + (number + scramble(first)) % SHARE


def class_of(labels: tuple[str, ...], name: str, where: str) -> int:
    """The number of a label. Raises ValueError, naming the place, for one that is not known."""
    if name not in labels:
        raise ValueError(
            f"{where}: unknown label {name!r}{nearest(name, list(labels))}; there are {', '.join(labels)}: "
            "mend it, or name all in --data.corpus.labels"
        )
    return labels.index(name)


def check_labels(labels: tuple[str, ...]) -> None:
    if len(set(labels)) < len(labels):
        raise ValueError(f"labels {labels} name a class twice: give each once")


def check_room(length: int, least: int) -> None:
    if length < least:
        raise ValueError(f"data.reader.length {length} has no room for text: choose {least} or more")
