"""Words and texts in pieces, each with its place in the text as it was given, whatever the tokenizer makes of it.

A text is spelled in passages of one word and the space before it, which any tokenizer may be given one by one (see
data/passages.py): their ids, joined, are the text's. So no piece belongs to two words, and where a tokenizer changes
the text (Unicode normalisation, characters that it drops), what it changed lies within one word.
"""

from __future__ import annotations

import difflib
import itertools
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ctx_jax.data.tokenizers import Encoding, Tokenizer

CUT = re.compile(r"(?s:(?<=[^\n])(?= \S)|(?<=.)(?=\n\S))")
"""Where passages are cut: before the last white-space character of a run, which a space is not that begins a line."""


class Located(NamedTuple):
    """A text in pieces."""

    text: str
    ids: np.ndarray
    """[n] int32."""
    words: np.ndarray
    """[n] int32: the number of the piece's word, from 1."""
    starts: np.ndarray
    """[n] int64, never falling: the character of the text at which each piece starts; those of one character share it.
    """
    ends: np.ndarray
    """[n] int64, never falling: the character behind the last of each piece, white space left out."""

    def find(self, start: int, end: int) -> tuple[int, int] | None:
        """The first and the last piece of these characters, or None if they have none (they are dropped)."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return (first, last) if first <= last else None

    def between(self, first: int, last: int) -> str:
        """The text of these pieces, both included."""
        return self.text[int(self.starts[first]) : int(self.ends[last])]


class Spelled(NamedTuple):
    """Words in pieces."""

    ids: np.ndarray
    """[n] int32."""
    words: np.ndarray
    """[n] int32: the number of the piece's word, from 1."""
    firsts: np.ndarray
    """[words]: the first piece of each word, -1 where it has none (all of it is dropped)."""


class Speller:
    """A tokenizer that keeps what it has spelled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._words: dict[tuple[str, bool], tuple[np.ndarray, int]] = {}
        self._passages: dict[tuple[str, bool], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def words(self, words: Sequence[str]) -> Spelled:
        """The pieces of a sentence of these words."""
        found = [self._word(f" {word}" if number else word, number > 0) for number, word in enumerate(words)]
        sizes = np.array([len(ids) for ids, _ in found])
        before = np.cumsum(sizes) - sizes
        firsts = np.array([first for _, first in found])
        ids = np.concatenate([ids for ids, _ in found]).astype(np.int32)
        return Spelled(ids, np.repeat(np.arange(1, len(words) + 1), sizes), np.where(firsts < 0, -1, before + firsts))

    def text(self, text: str) -> Located:
        """The pieces of a text."""
        ids, words, starts, ends = [], [], [], []
        at = 0
        for number, passage in enumerate(CUT.split(text), 1):
            own, begin, end = self._passage(passage, number > 1)
            ids.append(own)
            words.append(np.full(len(own), number, np.int32))
            starts.append(begin + at)
            ends.append(end + at)
            at += len(passage)
        return Located(text, np.concatenate(ids).astype(np.int32), *map(np.concatenate, (words, starts, ends)))

    def _word(self, passage: str, continued: bool) -> tuple[np.ndarray, int]:
        """The pieces of a word, and the number of its first, -1 without one."""
        if (passage, continued) not in self._words:
            encoding = self.tokenizer.encode(passage, continued)
            firsts = np.flatnonzero(encoding.word_starts())
            self._words[passage, continued] = encoding.ids, int(firsts[0]) if len(firsts) else -1
        return self._words[passage, continued]

    def _passage(self, passage: str, continued: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, starts and ends of the pieces of a passage, in its characters."""
        if (passage, continued) not in self._passages:
            encoding = self.tokenizer.encode(passage, continued)
            self._passages[passage, continued] = encoding.ids, *places(encoding, passage)
        return self._passages[passage, continued]


def places(encoding: Encoding, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Where each token of the encoding starts and ends in the text that was encoded."""
    kept, starts = encoding.text, np.maximum(encoding.starts, 0)
    border = np.append(starts, len(kept))[np.searchsorted(starts, starts, side="right")]
    ends = [
        max(start + len(kept[start:end].rstrip()), min(start + 1, end))
        for start, end in zip(starts, border, strict=True)
    ]
    begins, finishes = origins(kept, text)
    return begins[starts], finishes[np.array(ends, np.int64)]


def origins(kept: str, text: str) -> tuple[np.ndarray, np.ndarray]:
    """[len(kept) + 1] twice: where each character of `kept`, which was made of the text, starts in that, and where the
    character before it ends."""
    if kept == text:
        same = np.arange(len(text) + 1)
        return same, same
    begins, finishes = np.full(len(kept) + 1, len(text)), np.zeros(len(kept) + 1, np.int64)
    letters = ([unicodedata.normalize("NFKD", character)[0].lower()[0] for character in part] for part in (kept, text))
    for _, a, b, c, d in difflib.SequenceMatcher(None, *letters, autojunk=False).get_opcodes():
        alike = b - a == d - c
        begins[a:b] = np.arange(c, d) if alike else max(c - (c == d), 0)  # what was added, where that before it is
        finishes[a + 1 : b + 1] = np.arange(c + 1, d + 1) if alike else d
        if a == b:  # what was dropped; a mark belongs to the character that it stands on
            finishes[a] += sum(1 for _ in itertools.takewhile(unicodedata.combining, text[c:d]))
    return begins, finishes
