"""Which of several texts goes on from one: tables with a column for each choice, as SWAG's (Zellers et al. 2018, arXiv
1808.05326)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import softmax

from ctx_jax.contract import Batch
from ctx_jax.data.examples import ExampleStore, Outputs, by_row
from ctx_jax.evaluation.files import Encoded, Encoder, FileTask, check_room
from ctx_jax.evaluation.tables import check_columns, rows

if TYPE_CHECKING:
    from ctx_jax.data.files import File

NAMED_BY = "--data.corpus.text, --data.corpus.begin, --data.corpus.choices or --data.corpus.label"
"""The options that name columns, for errors."""


class Item(NamedTuple):
    """A text, the choices of how it goes on, the number of the right one (-1: not known), and the line in the file."""

    text: str
    choices: tuple[str, ...]
    answer: int
    line: int

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text, *self.choices)


@dataclass(frozen=True, eq=False)
class ChoiceStore(ExampleStore):
    """An example is as many rows as it has choices; `rows` holds them together."""

    @cached_property
    def sizes(self) -> np.ndarray:
        """[N]: tokens of each example's longest row."""
        return np.array([max(len(row.tokens) for row in choices) for choices in self.rows])

    @cached_property
    def cut(self) -> int:
        return sum(any(row.cut for row in choices) for choices in self.rows)

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Arrays [B, choices, T], and `labels` [B]."""
        count = len(self.rows[0])
        real = [row for row in rows if row >= 0]
        flat = self.template.batch([row for index in real for row in self.rows[index]], len(rows) * count, length)
        batch = {name: value.reshape(len(rows), count, length) for name, value in flat.items()}
        return {**batch, "labels": self.labels[np.maximum(rows, 0)]}


@dataclass(frozen=True)
class MultipleChoice(FileTask):
    """One text and several that may go on from it, each read as a pair; one of them is right."""

    text: str = "sent1"
    """The column of the text."""
    begin: str | None = None
    """The column of what every choice begins with, a space between (SWAG: sent2); None = nothing."""
    choices: tuple[str, ...] = ("ending0", "ending1", "ending2", "ending3")
    """The columns of the choices."""
    label: str = "label"
    """The column of the right one's number, from 0."""
    columns: tuple[str, ...] = ()
    """Names of the columns of files without a header; none = the first line names them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.choices) < 2:
            raise ValueError(f"choices {self.choices}: name the columns of two or more")
        check_columns(self.columns, (*self._texts, self.label))

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy",)

    @property
    def outputs(self) -> int:
        return 1

    @property
    def _texts(self) -> tuple[str, ...]:
        return (self.text, *(() if self.begin is None else (self.begin,)), *self.choices)

    @property
    def _reading(self) -> tuple[Any, ...]:
        return (self.text, self.begin, self.choices, self.label, self.columns)

    def with_labels(self) -> MultipleChoice:
        return self

    def encode(self, examples: Sequence[Item], encoder: Encoder, labelled: bool = True) -> Encoded:
        tokenizer, template, reader = encoder
        check_room(reader.length, template.special(2) + 2)
        read = []
        for item in examples:
            text, *choices = map(tokenizer.encode, item.texts)
            read.append(tuple(template.row([text, choice], reader.length) for choice in choices))
        answers = np.array([max(item.answer, 0) for item in examples], np.int32)
        store = ChoiceStore(tokenizer.vocabulary, template, read, answers, partial(self._measure, answers))
        return Encoded(store, partial(self._predictions, examples))

    def _measure(self, answers: np.ndarray, outputs: Outputs) -> dict[str, float]:
        return {"accuracy": float(np.mean([scores.argmax() == answers[row] for row, scores in by_row(outputs)]))}

    def _predictions(self, examples: Sequence[Item], outputs: Outputs) -> list[Any]:
        """{"line", "answer", "choice", "probability", "probabilities"} of each example."""
        found = dict(by_row(outputs))
        predictions = []
        for number, item in enumerate(examples):
            probabilities = [round(float(p), 6) for p in softmax(found[number])]
            best = int(found[number].argmax())
            said = {"line": item.line, "answer": best, "choice": item.choices[best], "probability": probabilities[best]}
            predictions.append({**said, "probabilities": probabilities})
        return predictions

    def inputs(self, file: File) -> Iterator[Item]:
        """Files with the task's columns."""
        for line, fields in rows(file, self.columns, self._texts, self.errors):
            yield self._item(fields, -1, line)

    def _read(self, file: File) -> Iterator[Item]:
        for line, fields in rows(file, self.columns, (*self._texts, self.label), self.errors, NAMED_BY):
            label = fields[self.label].strip()
            if not (label.isdecimal() and int(label) < len(self.choices)):
                raise ValueError(
                    f"{file} line {line}: unknown label {label!r}: give the number of the right choice, 0 to "
                    f"{len(self.choices) - 1}"
                )
            yield self._item(fields, int(label), line)

    def _item(self, fields: dict[str, str], answer: int, line: int) -> Item:
        begin = "" if self.begin is None else f"{fields[self.begin]} "
        return Item(fields[self.text], tuple(begin + fields[choice] for choice in self.choices), answer, line)
