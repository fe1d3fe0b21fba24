"""Tokens that need no learning: bytes, characters, words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ctx_jax.contract import Vocabulary
from ctx_jax.data import building, fingerprint
from ctx_jax.data.tokenizers import (
    PIECES,
    SPECIAL,
    Encoding,
    Normalization,
    Tokenizer,
    code_points,
    counted,
    damaged,
    read_part,
    save_config,
    unicode_normalized,
    word_characters,
)

FIRST = len(SPECIAL)
"""The first id that is not special."""

LINE_END = "\n"


@dataclass(frozen=True)
class Bytes:
    """The bytes of UTF-8, as in ByT5 (Xue et al. 2022, arXiv 2105.13626). No text is unknown."""

    normalization: Normalization = "none"
    """Unicode normalisation of all text."""

    @property
    def vocabulary_size(self) -> int:
        """256 bytes and the 7 special ids."""
        return FIRST + 256

    def train(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """There is nothing to learn: the texts are not read."""
        with building(folder) as partial:
            if partial is not None:
                save_config(self, partial)
        return self.load(folder)

    def load(self, folder: Path) -> Tokenizer:
        return BytesTokenizer(folder, self.normalization)


class BytesTokenizer:
    """Nothing is lost but what Unicode normalisation changes."""

    def __init__(self, folder: Path, normalization: Normalization) -> None:
        self.folder = folder
        self.normalization: Normalization = normalization
        self.fingerprint = fingerprint(type(self).__name__, normalization)
        self.vocabulary = Vocabulary(size=FIRST + 256, **SPECIAL)

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.normalization)

    def normalize(self, text: str) -> str:
        return unicode_normalized(text, self.normalization)

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """`continued` changes nothing."""
        text = self.normalize(text)
        codes = np.frombuffer(text.encode(), np.uint8)
        starts = np.arange(len(text)) if text.isascii() else np.cumsum((codes & 0xC0) != 0x80) - 1
        return Encoding(text, codes.astype(np.int32) + FIRST, starts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special ids are left out; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids, np.int32)
        return (ids[ids >= FIRST] - FIRST).astype(np.uint8).tobytes().decode(errors="replace")

    def piece(self, index: int) -> str:
        return special_piece(index) or bytes([index - FIRST]).decode("ascii", errors="backslashreplace")


@dataclass(frozen=True)
class Characters:
    """Single characters; one that is not known is the unknown id."""

    vocabulary_size: int = 8192
    """Ids, the 7 special ones included, at most: the most frequent characters."""
    minimum_count: int = 1
    """Characters that occur less often are unknown."""
    normalization: Normalization = "NFC"
    """Unicode normalisation of all text, in training and in use."""

    def __post_init__(self) -> None:
        check_limits(self.vocabulary_size, self.minimum_count, "7 special ids")

    def train(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """Counts the characters of the texts, or loads them where `folder` is there already. Raises ValueError if there
        are none."""
        with building(folder) as partial:
            if partial is not None:
                counts = counted(list, (unicode_normalized(text, self.normalization) for text in texts))
                characters = frequent(counts, self.vocabulary_size, self.minimum_count)
                (partial / CHARACTERS).write_text(json.dumps(characters), encoding="utf-8")
                save_config(self, partial)
        return self.load(folder)

    def load(self, folder: Path) -> Tokenizer:
        return CharactersTokenizer(folder, self.normalization)


class CharactersTokenizer:
    """All known characters are kept, white space too; each has its own token."""

    def __init__(self, folder: Path, normalization: Normalization) -> None:
        characters, content = read_list(folder, CHARACTERS)
        if any(len(character) != 1 for character in characters):
            raise damaged(folder, CHARACTERS, "it is not a list of characters")
        self.folder = folder
        self.normalization: Normalization = normalization
        self.fingerprint = fingerprint(type(self).__name__, normalization, content)
        self.vocabulary = Vocabulary(size=FIRST + len(characters), **SPECIAL)
        codes = code_points("".join(characters))
        self._ids = np.full(0x110000, SPECIAL["unknown"], np.int32)
        self._ids[codes] = np.arange(FIRST, FIRST + len(codes))
        self._codes = np.concatenate([np.full(FIRST, ord(UNKNOWN), np.uint32), codes])

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.normalization)

    def normalize(self, text: str) -> str:
        """U+FFFD stands for an unknown character."""
        text = unicode_normalized(text, self.normalization)
        unknown = {character for character in set(text) if self._ids[ord(character)] == SPECIAL["unknown"]}
        return text.translate({ord(character): UNKNOWN for character in unknown})

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """`continued` changes nothing."""
        text = unicode_normalized(text, self.normalization)
        return Encoding(text, self._ids[code_points(text)], np.arange(len(text)))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special ids are left out; U+FFFD stands for an unknown character."""
        ids = np.asarray(ids, np.int32)
        kept = ids[(ids >= FIRST) | (ids == SPECIAL["unknown"])]
        return self._codes[kept].astype("<u4").tobytes().decode("utf-32-le")

    def piece(self, index: int) -> str:
        return special_piece(index) or chr(self._codes[index])


@dataclass(frozen=True)
class Words:
    """What stands between white space, as in WikiText (Merity et al. 2017, arXiv 1609.07843): a line end is a word too,
    and a word "<unk>" of the text is the unknown id. Ids fall in frequency, as an adaptive softmax wants them."""

    vocabulary_size: int = 267_740
    """Ids, the 7 special ones included, at most: the most frequent words."""
    minimum_count: int = 1
    """Words that occur less often are unknown."""
    normalization: Normalization = "NFC"
    """Unicode normalisation of all text, in training and in use."""

    def __post_init__(self) -> None:
        check_limits(self.vocabulary_size, self.minimum_count, "the line end and 7 special ids")

    def train(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """Counts the words of the texts, or loads them where `folder` is there already. Raises ValueError if there are
        none."""
        with building(folder) as partial:
            if partial is not None:
                counts = counted(self._words, texts)
                ends = counts.pop(LINE_END, 0)
                del counts[PIECES["unknown"]]
                words = frequent(counts, self.vocabulary_size - 1, self.minimum_count)
                words.insert(sum(counts[word] > ends for word in words), LINE_END)  # always known
                (partial / WORDS).write_text(json.dumps(words, indent=0), encoding="utf-8")
                save_config(self, partial)
        return self.load(folder)

    def load(self, folder: Path) -> Tokenizer:
        return WordsTokenizer(folder, self.normalization)

    def _words(self, text: str) -> list[str]:
        return unicode_normalized(text, self.normalization).split() + [LINE_END] * text.count(LINE_END)


class WordsTokenizer:
    """One token for each word and each line end."""

    def __init__(self, folder: Path, normalization: Normalization) -> None:
        words, content = read_list(folder, WORDS)
        if LINE_END not in words:
            raise damaged(folder, WORDS, "the line end is missing")
        self.folder = folder
        self.normalization: Normalization = normalization
        self.fingerprint = fingerprint(type(self).__name__, normalization, content)
        self.vocabulary = Vocabulary(size=FIRST + len(words), **SPECIAL)
        self._words = [PIECES["unknown"]] * FIRST + words
        self._ids = {word: index for index, word in enumerate(words, FIRST)}

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.normalization)

    def normalize(self, text: str) -> str:
        """Words with a space between them, "<unk>" for an unknown one, in the lines they are in."""
        unknown = self._words[self.vocabulary.unknown]
        lines = self._normalized(text).split(LINE_END)
        known = [[word if word in self._ids else unknown for word in line.split()] for line in lines]
        return LINE_END.join(map(" ".join, known))

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """`continued` changes nothing: where a passage was cut within a word, its parts are two."""
        text = self._normalized(text)
        words = text.split()
        unknown = self.vocabulary.unknown
        ids = np.fromiter((self._ids.get(word, unknown) for word in words), np.int32, len(words))
        starts = np.flatnonzero(word_characters(text))
        if ends := text.count(LINE_END):
            ids = np.concatenate([ids, np.full(ends, self._ids[LINE_END], np.int32)])
            starts = np.concatenate([starts, np.flatnonzero(code_points(text) == ord(LINE_END))])
            order = np.argsort(starts, kind="stable")
            ids, starts = ids[order], starts[order]
        return Encoding(text, ids, starts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special ids are left out, but for one that also is the line end."""
        special = {*self.vocabulary.special} - {self._ids[LINE_END]}
        words = [self._words[index] for index in np.asarray(ids).tolist() if index not in special]
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")

    def piece(self, index: int) -> str:
        return special_piece(index) or self._words[index]

    def _normalized(self, text: str) -> str:
        return unicode_normalized(text, self.normalization)


CHARACTERS, WORDS = "characters.json", "words.json"
UNKNOWN = "\ufffd"


def special_piece(index: int) -> str | None:
    """How a special id is written."""
    return next((PIECES[name] for name, special in SPECIAL.items() if special == index), None)


def check_limits(vocabulary_size: int, minimum_count: int, always: str) -> None:
    if vocabulary_size < FIRST + 2:
        raise ValueError(f"vocabulary_size {vocabulary_size} leaves no room beside {always}: choose 100 or more")
    if minimum_count < 1:
        raise ValueError(f"minimum_count {minimum_count} is less than 1: choose 1 to keep all")


def frequent(counts: Counter[str], size: int, minimum: int) -> list[str]:
    """By falling count, equal ones in their own order; at most `size` with the special ids."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = [item for item, count in ranked[: size - FIRST] if count >= minimum]
    if not counts:
        raise ValueError("there is no text to count in: the train split of the corpus is empty")
    if not kept:
        raise ValueError(f"minimum_count {minimum} leaves nothing: choose at most {ranked[0][1]} or give more text")
    return kept


def read_list(folder: Path, name: str) -> tuple[list[str], str]:
    """The strings in a file, in the order of their ids, and the file's content."""
    content = read_part(folder, name)
    try:
        items = json.loads(content)
    except ValueError:
        raise damaged(folder, name, "it is not JSON") from None
    if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
        raise damaged(folder, name, "it is not a list of strings")
    if len(set(items)) < len(items):
        raise damaged(folder, name, "an entry stands there twice")
    return items, content.decode()
