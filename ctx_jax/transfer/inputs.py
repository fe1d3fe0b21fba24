"""Texts and pairs of texts as rows of tokens, each model's own way, and rows as batches of a few static shapes.

BERT, DistilBERT        [classification] A [separator]               [classification] A [separator] B [separator]
RoBERTa                 <s> A </s>                                   <s> A </s> </s> B </s>
GPT, Transformer-XL     [begin] A                                    [begin] A [separator] B
XLNet                   A [separator] [classification]               A [separator] B [separator] [classification]

BERT's segments are 0 up to the first separator and 1 after it; XLNet's too, 2 for [classification], and it pads on the
left. For a head, GPT's rows end with [classification] (its paper's extract token; Radford et al. 2018, section 3.3);
where its tokenizer has one special token for everything, all three are the model's own (`task_tokens`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.data.examples import lengths
from ctx_jax.data.tokenizers import Encoding
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import TASK_TOKENS, GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.objectives.supervised import SWAPPED

LENGTH = 512
"""Tokens of a row, at most, for models of any length."""


class Row(NamedTuple):
    """One text as a model reads it, without padding."""

    tokens: np.ndarray
    """[n] int32, special ones included."""
    words: np.ndarray
    """[n] int32: number of the token's word, from 1; 0 on special tokens and on white space before the first word."""
    segments: np.ndarray
    """[n] int32: 0 = the first text and its separator, 1 = the second and its own, 2 = XLNet's classification token."""
    cut: bool
    """Whether there was more text."""
    swapped: Row | None = None
    """The pair in the other order, where both are read."""


class Part(NamedTuple):
    """A text of a row."""

    ids: np.ndarray
    """[n] int32."""
    words: np.ndarray
    """[n] int32: as in `Row`."""


@dataclass(frozen=True)
class Template:
    """What a model reads around a text, or around two."""

    before: tuple[int, ...]
    """Special ids before the text."""
    after: tuple[int, ...]
    """Special ids after it, or after the second."""
    pad: int
    """The id of padding."""
    between: tuple[int, ...] = ()
    """Special ids between two texts."""
    last_segment: int | None = None
    """Segment of the row's last id (XLNet's classification token); None = that of the text before it."""
    left: bool = False
    """Whether padding stands before the row."""
    classification_last: bool = False
    """Whether the row's last token stands for all of it, not its first."""
    both_orders: bool = False
    """Whether a pair is read in its other order, too."""

    def special(self, texts: int) -> int:
        """How many special ids a row of one text, or of two, has."""
        return len(self.before) + len(self.after) + len(self.between) * (texts - 1)

    def row(self, texts: Sequence[Encoding], length: int) -> Row:
        """The row of a text or a pair, of at most `length` tokens: what is too much is cut off the text's end, off the
        longer one's first of a pair. Words are numbered through both. Raises ValueError for both orders of one text."""
        if self.both_orders:
            if len(texts) != 2:
                raise ValueError("objective.both_orders needs pairs, and the task has one text: leave it out")
            one_way = replace(self, both_orders=False)
            return one_way.row(texts, length)._replace(swapped=one_way.row(texts[::-1], length))
        sizes = [len(text.ids) for text in texts]
        kept = cut(sizes, length - self.special(len(texts)))
        parts: list[Part] = []
        numbered = 0
        for text, size in zip(texts, kept, strict=True):
            own = np.cumsum(text.word_starts(), dtype=np.int32)[:size]
            parts.append(Part(text.ids[:size], np.where(own > 0, own + numbered, 0)))
            numbered += int(own[-1]) if size else 0
        return self.joined(parts)._replace(cut=sum(kept) < sum(sizes))

    def joined(self, parts: Sequence[Part]) -> Row:
        """The row of one text, or of two, in tokens."""
        edges = [self.before, *[self.between] * (len(parts) - 1), self.after]
        tokens, words = [np.array(edges[0], np.int32)], [np.zeros(len(edges[0]), np.int32)]
        segments = [0] * len(edges[0])
        for number, (part, edge) in enumerate(zip(parts, edges[1:], strict=True)):
            tokens += [part.ids, np.array(edge, np.int32)]
            words += [part.words, np.zeros(len(edge), np.int32)]
            segments += [number] * (len(part.ids) + len(edge))
        if self.last_segment is not None:
            segments[-1] = self.last_segment
        return Row(np.concatenate(tokens), np.concatenate(words), np.array(segments, np.int32), False)

    def place(self, size: int, length: int) -> slice:
        """Where a row of `size` tokens stands in one of `length`."""
        return slice(length - size, length) if self.left else slice(size)

    def batch(self, rows: Sequence[Row], size: int, length: int) -> Batch:
        """`tokens`, `documents`, `positions`, `segments` and `words` [size, length], padded with empty rows; of the
        other order the same, as `swapped_tokens` and so on."""
        names = ("tokens", "documents", "positions", "segments", "words")
        batch = {name: np.zeros((size, length), np.int32) for name in names}
        batch["tokens"][:] = self.pad
        for number, row in enumerate(rows):
            n = len(row.tokens)
            place = number, self.place(n, length)
            values = (row.tokens, np.ones(n), np.arange(n), row.segments, row.words)
            for name, value in zip(names, values, strict=True):
                batch[name][place] = value
        if self.both_orders:
            other = [row.swapped for row in rows if row.swapped is not None]
            swapped = replace(self, both_orders=False).batch(other, size, length)
            batch |= {SWAPPED + name: value for name, value in swapped.items()}
        return batch


def cut(sizes: Sequence[int], room: int) -> list[int]:
    """How many tokens of each of one or two texts there is room for: one by one, the longer of a pair loses its last,
    of equal ones the second (the code of BERT, `_truncate_seq_pair`)."""
    if len(sizes) == 1:
        return [min(sizes[0], room)]
    first = min(sizes[0], max(room - sizes[1], -(-room // 2)))
    return [first, min(sizes[1], room - first)]


def template(config: Any, vocabulary: Vocabulary, head: bool = False, both_orders: bool = False) -> Template:
    """How the model of this config reads texts, for its hidden states or for a `head` on the row. Raises ValueError for
    a model that has no way to."""
    return replace(one_order(config, vocabulary, head), both_orders=both_orders)


def one_order(config: Any, vocabulary: Vocabulary, head: bool) -> Template:
    v = vocabulary
    match config:
        case BertConfig():
            # RoBERTa, which is told by its positions, has two of them.
            between = (v.separator,) * (2 if config.position_offset else 1)
            return Template((v.classification,), (v.separator,), v.pad, between)
        case GptConfig(task_tokens=True) if head:
            start, delimiter, extract = (config.vocabulary_size + number for number in range(TASK_TOKENS))
            return Template((start,), (extract,), v.pad, (delimiter,), classification_last=True)
        case GptConfig() | TransformerXLConfig():
            after = (v.classification,) if head else ()
            return Template((v.begin,), after, v.pad, (v.separator,), classification_last=head)
        case XLNetConfig():
            after = (v.separator, v.classification)
            return Template((), after, v.pad, (v.separator,), last_segment=2, left=True, classification_last=True)
    raise ValueError(f"{type(config).__name__} does not say how it reads a text: choose a run of another model")


def row_length(config: Any, template: Template, length: int | None, texts: int = 1) -> int:
    """Tokens of a row of so many texts, at most: `length`, by default as many as the model has positions for, or
    `LENGTH`.

    Raises ValueError if that is more than the model has, or too little for any text.
    """
    longest: int | None = getattr(config, "max_length", None)
    chosen = length if length is not None else longest or LENGTH
    if longest is not None and chosen > longest:
        raise ValueError(f"--length {chosen} is longer than the model's {longest} positions: choose {longest} or less")
    if chosen < (least := template.special(texts) + texts):
        raise ValueError(f"--length {chosen} leaves no room beside the special tokens: choose {least} or more")
    return chosen


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
