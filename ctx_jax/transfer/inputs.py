"""Texts as rows of tokens, each model's own way, and rows as batches of a few static shapes.

BERT, RoBERTa, DistilBERT    [classification] text [separator]
GPT, Transformer-XL          [begin] text
XLNet                        text [separator] [classification], of segments 0, 0, 2, padded on the left
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.data.tokenizers import Encoding
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig

LENGTH = 512
"""Tokens of a row, at most, for models of any length."""

SHORTEST = 8
"""Tokens of the shortest rows that a batch is made of."""


class Row(NamedTuple):
    """One text as a model reads it, without padding."""

    tokens: np.ndarray
    """[n] int32, special ones included."""
    words: np.ndarray
    """[n] int32: number of the token's word, from 1; 0 on special tokens and on white space before the first word."""
    segments: np.ndarray
    """[n] int32: 0 = the text and its separator, 2 = XLNet's classification token."""
    cut: bool
    """Whether the text was longer."""


@dataclass(frozen=True)
class Template:
    """What a model reads around a text."""

    before: tuple[int, ...]
    """Special ids before the text."""
    after: tuple[int, ...]
    """Special ids after it."""
    pad: int
    """The id of padding."""
    segments: tuple[int, ...] = ()
    """Segments of `after`; none = 0."""
    left: bool = False
    """Whether padding stands before the row."""

    @property
    def special(self) -> int:
        """How many special ids a row has."""
        return len(self.before) + len(self.after)

    def row(self, encoding: Encoding, length: int) -> Row:
        """The row of a text, of at most `length` tokens: what is too much is cut off the text's end."""
        room = length - self.special
        ids, words = encoding.ids[:room], np.cumsum(encoding.word_starts(), dtype=np.int32)[:room]
        before, after = np.zeros(len(self.before), np.int32), np.zeros(len(self.after), np.int32)
        segments = np.array(self.segments, np.int32) if self.segments else after
        return Row(
            np.concatenate([np.array(self.before, np.int32), ids, np.array(self.after, np.int32)]),
            np.concatenate([before, words, after]),
            np.concatenate([before, np.zeros_like(words), segments]),
            len(encoding.ids) > room,
        )

    def batch(self, rows: Sequence[Row], size: int, length: int) -> Batch:
        """`tokens`, `documents`, `positions`, `segments` and `words` [size, length], padded with empty rows."""
        names = ("tokens", "documents", "positions", "segments", "words")
        batch = {name: np.zeros((size, length), np.int32) for name in names}
        batch["tokens"][:] = self.pad
        for number, row in enumerate(rows):
            n = len(row.tokens)
            place = number, slice(length - n, length) if self.left else slice(n)
            values = (row.tokens, np.ones(n), np.arange(n), row.segments, row.words)
            for name, value in zip(names, values, strict=True):
                batch[name][place] = value
        return batch


def template(config: Any, vocabulary: Vocabulary) -> Template:
    """How the model of this config reads one text. Raises ValueError for a model that has no way to."""
    v = vocabulary
    match config:
        case BertConfig():
            return Template((v.classification,), (v.separator,), v.pad)
        case GptConfig() | TransformerXLConfig():
            return Template((v.begin,), (), v.pad)
        case XLNetConfig():
            return Template((), (v.separator, v.classification), v.pad, segments=(0, 2), left=True)
    raise ValueError(f"{type(config).__name__} does not say how it reads a text: choose a run of another model")


def row_length(config: Any, template: Template, length: int | None) -> int:
    """Tokens of a row, at most: `length`, by default as many as the model has positions for, or `LENGTH`.

    Raises ValueError if that is more than the model has, or too little for any text.
    """
    longest: int | None = getattr(config, "max_length", None)
    chosen = length if length is not None else longest or LENGTH
    if longest is not None and chosen > longest:
        raise ValueError(f"--length {chosen} is longer than the model's {longest} positions: choose {longest} or less")
    if chosen <= template.special:
        least = template.special + 1
        raise ValueError(f"--length {chosen} leaves no room beside the special tokens: choose {least} or more")
    return chosen


def lengths(longest: int) -> list[int]:
    """The lengths of batches, up to `longest`: powers of two and the numbers halfway between them."""
    powers = itertools.takewhile(lambda n: n < longest, (SHORTEST << step for step in itertools.count()))
    return [n for power in powers for n in (power, power * 3 // 2) if n < longest] + [longest]


def grouped(rows: Iterable[tuple[int, Row]], size: int, longest: int) -> Iterator[tuple[int, list[tuple[int, Row]]]]:
    """Numbered rows of about equal length together: (length of the batch, `size` rows, fewer only at the end).

    The length that a row is padded to depends on its own alone, at most `longest`.
    """
    borders = lengths(longest)
    waiting: defaultdict[int, list[tuple[int, Row]]] = defaultdict(list)
    for number, row in rows:
        border = borders[int(np.searchsorted(borders, len(row.tokens)))]
        waiting[border].append((number, row))
        if len(waiting[border]) == size:
            yield border, waiting.pop(border)
    yield from sorted(waiting.items(), key=lambda group: group[0])
