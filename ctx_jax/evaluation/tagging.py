"""Labels of words: files in the manner of CoNLL, and entity F1 by word (Tjong Kim Sang & De Meulder 2003, arXiv
cs/0306050), by seqeval.

A line is a word and its tag, in columns between tabs, or spaces where there is no tab; a blank line ends a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from scipy.special import softmax
from seqeval import metrics

from ctx_jax.contract import Batch
from ctx_jax.data.examples import ExampleStore, Outputs, by_row
from ctx_jax.data.lines import lines
from ctx_jax.data.offsets import Speller
from ctx_jax.evaluation.files import Encoded, Encoder, FileTask, check_labels, check_room, class_of
from ctx_jax.evaluation.tables import suffix
from ctx_jax.progress import tell
from ctx_jax.transfer.inputs import Part

if TYPE_CHECKING:
    from ctx_jax.data.files import File

OUTSIDE = "O"
NONE = -1
"""The label of a piece that predicts nothing."""
DOCUMENT = "-DOCSTART-"
"""The word of a line that begins a document, and is no sentence."""
COLUMNS = (".conll", ".tsv", ".bio", ".iob", ".iob2")
"""Files for `predict` whose lines are words; others hold a sentence a line, unless all lines end in a tag."""


class Sentence(NamedTuple):
    """Words and their tags in BIO; the place of the first in the file."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    file: str
    line: int

    @property
    def texts(self) -> tuple[str, ...]:
        return (" ".join(self.words),)


class Scored(NamedTuple):
    """The words of a sentence that are predicted in one of its windows."""

    sentence: int
    words: np.ndarray
    places: np.ndarray
    """Where the first piece of each stands in the row."""


@dataclass(frozen=True, eq=False)
class TaggedStore(ExampleStore):
    """Sentences in windows; `labels` has those of the row's pieces, [n] int32 of each row."""

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """`labels` [B, T] int32, `NONE` where nothing is predicted."""
        real = [row for row in rows if row >= 0]
        batch = self.template.batch([self.rows[row] for row in real], len(rows), length)
        batch["labels"] = np.full((len(rows), length), NONE, np.int32)
        for number, row in enumerate(real):
            batch["labels"][number, self.template.place(self.sizes[row], length)] = self.labels[row]
        return batch


@dataclass(frozen=True)
class Tagging(FileTask):
    """A tag for each word, B-x for the first of an entity of type x, I-x for the others, O outside."""

    head: ClassVar[Literal["classes", "token_classes"]] = "token_classes"

    token_column: int = 0
    """The column of the word, from 0, or from the end as -1."""
    tag_column: int = -1
    """The column of the tag."""
    scheme: Literal["BIO", "IOB1"] = "BIO"
    """How the file's tags mark where an entity begins: BIO always by B-, IOB1 (CoNLL-2003) only behind one of the same
    type; that is read as BIO."""
    labels: tuple[str, ...] = ()
    """The tags in BIO in the order of the model's outputs; none = O and those of the types in `path`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels)
        for label in self.labels:
            check_tag(label, "labels")

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("f1", "precision", "recall", "accuracy")

    @property
    def outputs(self) -> int:
        return len(self.labels)

    @property
    def meaning(self) -> tuple[Any, ...]:
        return (type(self).__name__, self.labels)

    @property
    def _reading(self) -> tuple[Any, ...]:
        return (self.token_column, self.tag_column, self.scheme, self.labels)

    def with_labels(self) -> Tagging:
        """The task with the names of its tags. Raises ValueError if there is no entity."""
        if self.labels:
            return self
        types = sorted({tag[2:] for sentence in self.examples("train") for tag in sentence.tags} - {""})
        if not types:
            raise ValueError(f"{self.path} has no entity: give sentences with tags B-x and I-x")
        return replace(self, labels=(OUTSIDE, *(f"{edge}-{kind}" for kind in types for edge in "BI")))

    def encode(self, examples: Sequence[Sentence], encoder: Encoder, labelled: bool = True) -> Encoded:
        tokenizer, template, reader = encoder
        check_room(reader.length, template.special(1) + 1)
        room, before = reader.length - template.special(1), len(template.before)
        speller = Speller(tokenizer)
        rows, labels, scored = [], [], []
        for number, sentence in enumerate(examples):
            spelled = speller.words(sentence.words)
            tags = self._classes(sentence) if labelled else np.zeros(len(sentence.words), np.int32)
            best = reader.best(len(spelled.ids), room)
            spoken = np.flatnonzero(spelled.firsts >= 0)
            for window, start in enumerate(reader.starts(len(spelled.ids), room)):
                part = slice(start, start + room)
                row = template.joined([Part(spelled.ids[part], spelled.words[part])])
                words = spoken[best[spelled.firsts[spoken]] == window]
                places = spelled.firsts[words] - start + before
                own = np.full(len(row.tokens), NONE, np.int32)
                own[places] = tags[words]
                rows.append(row)
                labels.append(own)
                scored.append(Scored(number, words, places))
        found = partial(self._found, examples, template, [len(row.tokens) for row in rows], scored)
        store = TaggedStore(tokenizer.vocabulary, template, rows, labels, partial(self._measure, examples, found))
        return Encoded(store, partial(self._predictions, examples, found))

    def _classes(self, sentence: Sentence) -> np.ndarray:
        """[words] int32. Raises ValueError, naming the line, for an unknown tag."""
        where = f"{sentence.file} line "
        found = [class_of(self.labels, tag, f"{where}{line}") for line, tag in enumerate(sentence.tags, sentence.line)]
        return np.array(found, np.int32)

    def _found(
        self, examples: Sequence[Sentence], template: Any, sizes: list[int], scored: list[Scored], outputs: Outputs
    ) -> list[np.ndarray]:
        """The scores of each sentence's words, [words, labels]; of one without a piece, those of O alone."""
        nothing = np.where(np.array(self.labels) == OUTSIDE, 0.0, -np.inf)
        found = [np.tile(nothing, (len(sentence.words), 1)) for sentence in examples]
        for number, scores in by_row(outputs):
            row = scored[number]
            found[row.sentence][row.words] = scores[template.place(sizes[number], len(scores))][row.places]
        return found

    def _measure(self, examples: Sequence[Sentence], found: Any, outputs: Outputs) -> dict[str, float]:
        """F1, precision and recall of entities, which are right if type and borders are, and the words' accuracy."""
        gold = [list(sentence.tags) for sentence in examples]
        said = [[self.labels[index] for index in scores.argmax(1)] for scores in found(outputs)]
        right = [one == other for one, other in zip(chain(*gold), chain(*said), strict=True)]
        entities: Any = metrics  # whose types lack what they take
        return {
            "f1": float(entities.f1_score(gold, said, zero_division=0)),
            "precision": float(entities.precision_score(gold, said, zero_division=0)),
            "recall": float(entities.recall_score(gold, said, zero_division=0)),
            "accuracy": sum(right) / len(right),
        }

    def _predictions(self, examples: Sequence[Sentence], found: Any, outputs: Outputs) -> list[Any]:
        """{"line", "words": [{"word", "tag", "probability"}]} of each sentence."""
        predictions = []
        for sentence, scores in zip(examples, found(outputs), strict=True):
            probabilities, best = softmax(scores, axis=1), scores.argmax(1)
            words = [
                {"word": word, "tag": self.labels[index], "probability": round(float(own[index]), 6)}
                for word, index, own in zip(sentence.words, best, probabilities, strict=True)
            ]
            predictions.append({"line": sentence.line, "words": words})
        return predictions

    def inputs(self, file: File) -> Iterator[Sentence]:
        """Sentences in columns, of which the word's counts, or a sentence a line, with white space between words.
        Raises ValueError, naming the file, for one of another form."""
        if suffix(file) in (".csv", ".jsonl"):
            raise ValueError(f"{file} holds no sentences to tag: give one a line (.txt), or a word a line (.conll)")
        numbered = list(lines(file, self.errors))
        in_columns = suffix(file) in COLUMNS
        if not in_columns and self._tagged(text for _, text in numbered):
            tell(f"note: {file} is read as a word a line, since each ends in a tag")
            in_columns = True
        if in_columns:
            for sentence in sentences(file, numbered, (self.token_column,)):
                yield Sentence(tuple(word for (word,) in sentence.fields), (), str(file), sentence.line)
            return
        for line, text in numbered:
            if text.strip():
                yield Sentence(tuple(text.split()), (), str(file), line)

    def _tagged(self, texts: Iterator[str]) -> bool:
        """Whether these lines, two or more, all have a word and a tag, as in files to train on, of whatever name."""
        found = [columns(text) for text in texts if text.strip()]
        return len(found) > 1 and all(len(own) > 1 and is_tag("".join(own[self.tag_column :][:1])) for own in found)

    def _read(self, file: File) -> Iterator[Sentence]:
        for sentence in sentences(file, lines(file, self.errors), (self.token_column, self.tag_column)):
            words, tags = zip(*sentence.fields, strict=True)
            for line, tag in enumerate(tags, sentence.line):
                check_tag(tag, f"{file} line {line}")
            read = from_iob1(tags) if self.scheme == "IOB1" else tags
            for line, (before, tag) in enumerate(zip((OUTSIDE, *read), read, strict=False), sentence.line):
                if tag.startswith("I-") and before[2:] != tag[2:]:
                    raise ValueError(
                        f"{file} line {line}: {tag!r} follows {before!r}, and in BIO an entity begins with "
                        f"{'B' + tag[1:]!r}: mend it, or set --data.corpus.scheme IOB1 if that is the file's"
                    )
            yield Sentence(words, read, str(file), sentence.line)


class Lines(NamedTuple):
    """The wanted columns of lines that follow each other, and the number of the first."""

    fields: list[tuple[str, ...]]
    line: int


def columns(line: str) -> list[str]:
    """With a tab between, else with spaces; other white space is part of a word."""
    return line.split("\t") if "\t" in line else [column for column in line.split(" ") if column]


def sentences(file: File, numbered: Iterable[tuple[int, str]], wanted: tuple[int, ...]) -> Iterator[Lines]:
    """Sentences of a file's lines. Raises ValueError, naming file and line, for a column that is missing or empty."""
    found = Lines([], 0)
    for number, line in numbered:
        own = columns(line)
        if not line.strip() or own[0] == DOCUMENT:
            if found.fields:
                yield found
            found = Lines([], 0)
            continue
        if not found.fields:
            found = Lines([], number)
        found.fields.append(tuple(field(own, column, wanted, f"{file} line {number}") for column in wanted))
    if found.fields:
        yield found


def field(own: list[str], column: int, wanted: tuple[int, ...], where: str) -> str:
    if not -len(own) <= column < len(own) or len(own) < len(wanted):
        raise ValueError(
            f"{where} has {len(own)} columns, and none for column {column}: give a word and its tag with a tab "
            "between, or set --data.corpus.token-column and --data.corpus.tag-column"
        )
    if not (text := own[column].strip()):
        raise ValueError(f"{where}: column {column} is empty: fill it, or leave the line out")
    return text


def is_tag(text: str) -> bool:
    return text == OUTSIDE or (text[:2] in ("B-", "I-") and len(text) > 2)


def check_tag(tag: str, where: str) -> None:
    if not is_tag(tag):
        raise ValueError(f"{where}: unknown tag {tag!r}: tags are O, B-x and I-x of an entity of type x")


def from_iob1(tags: Sequence[str]) -> tuple[str, ...]:
    """Tags of IOB1 in BIO: what follows another type, or none, begins an entity."""
    return tuple(
        f"B{tag[1:]}" if tag.startswith("I-") and before[2:] != tag[2:] else tag
        for before, tag in zip((OUTSIDE, *tags), tags, strict=False)
    )
