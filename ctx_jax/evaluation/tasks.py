"""A class or a number of a text or of a pair: GLUE's kinds of tasks, on files of a user's own (tables.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from scipy import stats
from scipy.special import softmax
from sklearn import metrics

from ctx_jax.data.examples import ExampleStore, Outputs, by_row
from ctx_jax.data.files import is_jsonl
from ctx_jax.data.lines import lines
from ctx_jax.evaluation.files import Encoded, Encoder, FileTask, check_labels, check_room, class_of
from ctx_jax.evaluation.tables import check_columns, is_table, rows
from ctx_jax.progress import tell

if TYPE_CHECKING:
    from ctx_jax.data.files import File

Kind = Literal["classification", "regression"]
METRICS: dict[Kind, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
}


class Example(NamedTuple):
    """One or two texts, their label as it is written, and the place in the file (`line`: the number alone)."""

    texts: tuple[str, ...]
    label: str
    where: str
    line: int


@dataclass(frozen=True)
class Task(FileTask):
    """A class or a number of a text or a pair."""

    MOST_TEXTS: ClassVar[int] = 2

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= len(self.texts) <= self.MOST_TEXTS:
            raise ValueError(f"texts {self.texts}: name the column of a text, or the two of a pair")
        if self.scale and not (len(self.scale) == 2 and self.scale[1] > 0):
            raise ValueError(f"scale {self.scale}: give the mean and a standard deviation above 0")
        check_labels(self.labels)
        check_columns(self.columns, (*self.texts, self.label))

    @property
    def metrics(self) -> tuple[str, ...]:
        return METRICS[self.kind]

    @property
    def outputs(self) -> int:
        return len(self.labels) if self.kind == "classification" else 1

    @property
    def meaning(self) -> tuple[Any, ...]:
        return (self.kind, self.labels)

    @property
    def _reading(self) -> tuple[Any, ...]:
        return (self.kind, self.texts, self.label, self.columns, self.labels, self.scale)

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
        if len(names) < 2:
            raise ValueError(f"{self.path} has one label alone, {', '.join(names)}: give examples of two or more")
        whole = all(name.isdecimal() for name in names)
        return replace(self, labels=tuple(sorted(names, key=lambda name: (int(name) if whole else 0, name))))

    def targets(self, examples: Sequence[Example]) -> np.ndarray:
        """[N]: classes int32, or scaled numbers float32. Raises ValueError, naming the line, for what is no label."""
        if self.kind == "regression":
            mean, deviation = self.scale
            return np.array([(number(example) - mean) / deviation for example in examples], np.float32)
        return np.array([class_of(self.labels, example.label, example.where) for example in examples], np.int32)

    def encode(self, examples: Sequence[Example], encoder: Encoder, labelled: bool = True) -> Encoded:
        tokenizer, template, reader = encoder
        check_room(reader.length, template.special(len(self.texts)) + len(self.texts))
        labels = self.targets(examples) if labelled else np.zeros(len(examples), np.int32)
        read = [template.row([tokenizer.encode(text) for text in one.texts], reader.length) for one in examples]
        store = ExampleStore(tokenizer.vocabulary, template, read, labels, partial(measure, self, labels))

        def predictions(outputs: Outputs) -> list[Any]:
            found = dict(by_row(outputs))
            return [{"line": one.line, **self.said(found[number])} for number, one in enumerate(examples)]

        return Encoded(store, predictions)

    def said(self, scores: np.ndarray) -> dict[str, Any]:
        """scores [classes] by name, the most probable first of all; or the number."""
        if self.kind == "regression":
            mean, deviation = self.scale
            return {"value": round(float(scores[0]) * deviation + mean, 6)}
        probabilities = {name: round(float(p), 6) for name, p in zip(self.labels, softmax(scores), strict=True)}
        best = self.labels[int(scores.argmax())]
        return {"label": best, "probability": probabilities[best], "probabilities": probabilities}

    def inputs(self, file: File) -> Iterator[Example]:
        """The columns of the task in .jsonl, .tsv and .csv files, elsewhere a text a line, or the two of a pair with a
        tab between. Blank lines are left out."""
        if is_jsonl(file) or is_table(file):
            for place, fields in rows(file, self.columns, self.texts, self.errors):
                yield Example(tuple(fields[name] for name in self.texts), "", f"{file} line {place}", place)
            return
        for place, line in lines(file, self.errors):
            texts = tuple(line.split("\t")) if len(self.texts) == 2 else (line,)
            if not line.strip():
                continue
            if len(texts) != len(self.texts):
                raise ValueError(f"{file} line {place} has {len(texts)} texts, not 2: put one tab between the two")
            yield Example(texts, "", f"{file} line {place}", place)

    def _read(self, file: File) -> Iterator[Example]:
        wanted = (*self.texts, self.label)
        for place, fields in rows(
            file, self.columns, wanted, self.errors, "--data.corpus.texts or --data.corpus.label"
        ):
            texts = tuple(fields[name] for name in self.texts)
            yield Example(texts, fields[self.label].strip(), f"{file} line {place}", place)


def number(example: Example) -> float:
    try:
        value = float(example.label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{example.where}: the label {example.label!r} is no number: mend it")
    return value


def measure(task: Task, gold: np.ndarray, outputs: Outputs) -> dict[str, float]:
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
    one_class = len(np.union1d(gold, found)) == 1  # of which scikit-learn warns
    if collapsed:
        tell(f"note: the run has collapsed: all of {len(found):,} examples are predicted {task.labels[found[0]]!r}")
    classes, f1 = range(len(task.labels)), cast(Any, metrics.f1_score)  # whose types lack what it takes
    average = "binary" if len(task.labels) == 2 else "macro"
    return {
        "accuracy": float(metrics.accuracy_score(gold, found)),
        "f1": float(f1(gold, found, labels=classes, average=average, zero_division=0)),
        "matthews": 0.0 if one_class else float(metrics.matthews_corrcoef(gold, found)),
        "collapsed": int(collapsed),
    }


def correlation(result: Any) -> float:
    return float(result.statistic)
