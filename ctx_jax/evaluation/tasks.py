"""Tasks of a user's own: labelled examples in files, declared by their columns, and the metrics of what is predicted.

    .tsv, .txt    a line an example, tabs between columns, no quotation marks    .csv    RFC 4180
    .jsonl        an object an example; each of them also .gz or .zst

A task is a corpus, too: its documents are the texts of its examples. So a tokenizer can be learned from it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from scipy import stats
from sklearn import metrics

from ctx_jax.data import fingerprint
from ctx_jax.data.corpora import Split
from ctx_jax.data.files import Errors, content, is_jsonl, location, read, text_files
from ctx_jax.data.jsonl import json_object, unified
from ctx_jax.data.passages import LINE_END, Passage, between, cut
from ctx_jax.progress import tell
from ctx_jax.serialization import nearest
from ctx_jax.transfer.texts import checked, joined

if TYPE_CHECKING:
    from ctx_jax.data.files import File

Kind = Literal["classification", "regression"]
METRICS: dict[Kind, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
}
"""What may choose the best checkpoint, all the higher the better; the first is the default."""

SHARE = 20
"""Of so many examples the tenth is held out for validation, the last for the test, where no file is named for them."""


class Example(NamedTuple):
    """One or two texts, their label as it is written, and the place in the file."""

    texts: tuple[str, ...]
    label: str
    where: str


@dataclass(frozen=True)
class Task:
    """Labelled examples in files.

    What is not given a file of its own is held out from `path`: the tenth and the twentieth of every twenty examples.
    """

    MOST_TEXTS: ClassVar[int] = 2

    path: str | Path
    """The file of examples to train on."""
    validation: str | Path | None = None
    """That of validation; None: held out from `path`."""
    test: str | Path | None = None
    """That of the test; None: held out from `path`."""
    whole: bool = False
    """Whether every split is all of `path`, nothing held out."""
    kind: Kind = "classification"
    """classification, whose labels are names, or regression, whose labels are numbers."""
    texts: tuple[str, ...] = ("text",)
    """The column of the text, or the two of a pair."""
    label: str = "label"
    """The column of the label."""
    columns: tuple[str, ...] = ()
    """Names of the columns of files without a header; none = the first line names them."""
    labels: tuple[str, ...] = ()
    """Names of the classes in the order of the model's outputs; none = those in `path`, sorted. Of two, the second is
    what F1 is about."""
    scale: tuple[float, ...] = ()
    """Mean and standard deviation of the numbers in `path`, by which the model's are shifted and scaled; none = as they
    are there. So a new head begins near the mean, and need not grow to reach it."""
    metric: str | None = None
    """accuracy, f1 (of more than two classes, their mean) or matthews; pearson or spearman: by it the best checkpoint
    is chosen. None = the first."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: an error that says where, or U+FFFD in their place."""
    language: str = "en"
    """ISO 639-1 code."""

    def __post_init__(self) -> None:
        for name in ("path", "validation", "test"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, location(path))
        if not 1 <= len(self.texts) <= self.MOST_TEXTS:
            raise ValueError(f"texts {self.texts}: name the column of a text, or the two of a pair")
        known = METRICS[self.kind]
        if self.metric is not None and self.metric not in known:
            raise ValueError(f"metric {self.metric!r} is none of {self.kind}: choose {' or '.join(known)}")
        if self.scale and not (len(self.scale) == 2 and self.scale[1] > 0):
            raise ValueError(f"scale {self.scale}: give the mean and a standard deviation above 0")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels {self.labels} name a class twice: give each once")
        for name in (*self.texts, self.label) if self.columns else ():
            if name not in self.columns:
                raise ValueError(f"columns {self.columns} have no {name!r}{nearest(name, list(self.columns))}")

    @property
    def languages(self) -> tuple[str, ...]:
        return (self.language,)

    @property
    def chooses(self) -> str:
        """The metric by which the best checkpoint is chosen."""
        return self.metric or METRICS[self.kind][0]

    def passages(self, split: Split) -> Iterator[Passage]:
        return cut((text for example in self.examples(split) for text in example.texts), self.language)

    def size(self, split: Split) -> int | None:
        return None

    def fingerprint(self, split: Split) -> str:
        """A key of the files and of how they are read."""
        held = self._held_out(split)
        options = (self.kind, self.texts, self.label, self.columns, self.labels, self.scale, self.errors)
        return fingerprint(type(self).__name__, content([self._file(split)]), (split, held) if held else None, options)

    def examples(self, split: Split) -> Iterator[Example]:
        """The examples of a split, in the order of their file.

        Raises ValueError, naming file and line, for what cannot be read as an example.
        """
        held = self._held_out(split)
        places = {"validation": SHARE // 2 - 1, "test": SHARE - 1}
        taken = {places[name]: name for name in held}
        count = 0
        for number, example in enumerate(self._read(self._file(split))):
            if not held or taken.get(number % SHARE, "train") == split:
                count += 1
                yield example
        if not count:
            reason = f"needs {SHARE} examples or a file of its own (--data.corpus.{split})" if held else "is empty"
            raise ValueError(f"{self._file(split)}: the split {split} {reason}")

    def with_labels(self) -> Task:
        """The task with the names of its classes, or the scale of its numbers. Raises ValueError if they are all the
        same."""
        if self.kind == "regression":
            if self.scale:
                return self
            numbers = [number(example) for example in self.examples("train")]
            if min(numbers) == max(numbers):
                raise ValueError(f"{self.path} has one label alone, {numbers[0]}: give examples of different numbers")
            return replace(self, scale=(fmean(numbers), pstdev(numbers)))
        if self.labels:
            return self
        names = {example.label for example in self.examples("train")}
        whole = all(name.isdecimal() for name in names)
        return replace(self, labels=tuple(sorted(names, key=int if whole else None)))

    def targets(self, examples: list[Example]) -> np.ndarray:
        """[N]: classes int32, or scaled numbers float32. Raises ValueError, naming the line, for what is no label."""
        if self.kind == "regression":
            mean, deviation = self.scale
            return np.array([(number(example) - mean) / deviation for example in examples], np.float32)
        classes = {name: index for index, name in enumerate(self.labels)}
        for example in examples:
            if example.label not in classes:
                known = nearest(example.label, list(self.labels))
                raise ValueError(
                    f"{example.where}: unknown label {example.label!r}{known}; there are {', '.join(self.labels)}: "
                    "mend it, or name all in --data.corpus.labels"
                )
        return np.array([classes[example.label] for example in examples], np.int32)

    def _held_out(self, split: Split) -> tuple[str, ...]:
        """Which splits share the file of this one with train."""
        if self.whole or (split != "train" and getattr(self, split) is not None):
            return ()
        return tuple(name for name in ("validation", "test") if getattr(self, name) is None)

    def _file(self, split: Split) -> File:
        path = self.path if split == "train" or self.whole else getattr(self, split) or self.path
        files = text_files(path)
        if len(files) > 1:
            raise ValueError(f"{path} names {len(files)} files: choose one of them, as {files[0]}")
        return files[0]

    def _read(self, file: File) -> Iterator[Example]:
        wanted = (*self.texts, self.label)
        for place, fields in rows(file, self.columns, wanted, self.errors):
            texts = tuple(fields[name] for name in self.texts)
            yield Example(texts, fields[self.label].strip(), f"{file} line {place}")


def number(example: Example) -> float:
    try:
        value = float(example.label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{example.where}: the label {example.label!r} is no number: mend it")
    return value


def rows(
    file: File, columns: tuple[str, ...], wanted: tuple[str, ...], errors: Errors
) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, {column: field}) of a file of examples; blank lines are left out.

    Raises ValueError, naming file and line, for a column of `wanted` that is missing or empty.
    """
    lines = map(joined, checked(file, between(LINE_END, reader(file, errors))))
    for place, fields in objects(file, lines) if is_jsonl(file) else tables(file, lines, columns):
        where = f"{file} line {place}"
        for name in wanted:
            if name not in fields:
                raise ValueError(
                    f"{where} has no column {name!r}{nearest(name, list(fields))} (there are: {', '.join(fields)}): "
                    "name another with --data.corpus.texts or .label, or the columns with --data.corpus.columns"
                )
            if not fields[name].strip():
                raise ValueError(f"{where}: the field {name!r} is empty: fill it, or leave the line out")
        yield place, fields


def reader(file: File, errors: Errors) -> Iterator[str]:
    """The text of a file; with "strict", bytes that are not UTF-8 are escaped, for `checked` to find in their line."""
    return read(file, "surrogateescape" if errors == "strict" else errors)  # pyright: ignore[reportArgumentType]


def is_table(file: File) -> bool:
    return suffix(file) in (".csv", ".tsv")


def suffix(file: File) -> str:
    return Path(file.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def objects(file: File, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and fields of each line of JSON; numbers as they are written."""
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = json_object(line, f"{file} line {place}", '{"text": "...", "label": "..."}')
        yield place, {name: written(value) for name, value in entry.items() if isinstance(value, str | int | float)}


def written(value: str | int | float) -> str:
    return unified(value) if isinstance(value, str) else json.dumps(value)


def tables(file: File, lines: Iterator[str], columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and fields of each line of a table."""
    numbered = table(file, lines)
    names = list(columns)
    for place, fields in numbered:
        if not any(fields):
            continue
        if not names:
            names = [name.strip() for name in fields]
            continue
        if len(fields) < len(names):
            raise ValueError(
                f"{file} line {place} has {len(fields)} columns, not {len(names)} ({', '.join(names)}): mend it, or "
                "name the columns with --data.corpus.columns"
            )
        yield place, dict(zip(names, fields, strict=False))


def table(file: File, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Number and columns of each line; of several that quotation marks join, the first."""
    if suffix(file) != ".csv":
        yield from ((place, line.split("\t")) for place, line in enumerate(lines, 1))
        return
    records = csv.reader((line + "\n" for line in lines), strict=True)
    place = 1
    try:
        for fields in records:
            yield place, fields
            place = records.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{file} line {place} is not CSV: {error}") from None


def measure(task: Task, gold: np.ndarray, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """The metrics of the examples in `outputs` (`example` [B], -1 = padding, and `scores` [B, classes], by batch).

    Of classes: accuracy, f1, matthews (0 where it is 0/0) and whether the run has `collapsed`, i.e. predicts one class
    only; of numbers: pearson and spearman, 0 where all predictions are equal.
    """
    example, scores = (np.concatenate([batch[name] for batch in outputs]) for name in ("example", "scores"))
    gold, scores = gold[example[example >= 0]], scores[example >= 0].astype(np.float64)
    if task.kind == "regression":
        found = scores[:, 0]
        if len(found) < 2 or np.ptp(found) == 0 or np.ptp(gold) == 0:
            return {"pearson": 0.0, "spearman": 0.0}
        return {
            "pearson": correlation(stats.pearsonr(found, gold)),
            "spearman": correlation(stats.spearmanr(found, gold)),
        }
    found = scores.argmax(1)
    collapsed = len(np.unique(found)) == 1 < len(np.unique(gold))
    if collapsed:
        tell(f"note: the run has collapsed: all of {len(found):,} examples are predicted {task.labels[found[0]]!r}")
    classes, f1 = range(len(task.labels)), cast(Any, metrics.f1_score)  # whose types lack what it takes
    average = "binary" if len(task.labels) == 2 else "macro"
    return {
        "accuracy": float(metrics.accuracy_score(gold, found)),
        "f1": float(f1(gold, found, labels=classes, average=average, zero_division=0)),
        "matthews": float(metrics.matthews_corrcoef(gold, found)),
        "collapsed": int(collapsed),
    }


def correlation(result: Any) -> float:
    return float(result.statistic)
