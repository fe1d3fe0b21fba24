"""Tokenizers that others published: BERT's WordPiece, GPT's and GPT-2's byte-pair encodings, Transformer-XL's words,
with the ids of the originals.

What a tokenizer drops is dropped before words are found, so `Encoding.text` is without it and a word is what stands
between the white space that is left. SentencePiece's models are in published_pieces.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import models

from ctx_jax.contract import Vocabulary
from ctx_jax.data import fingerprint
from ctx_jax.data.subwords import HAN, ByteLevelBPETokenizer, byte_letters, read_merges
from ctx_jax.data.symbols import LINE_END, WORDS, WordsTokenizer, read_list
from ctx_jax.data.tokenizers import SPECIAL, Encoding, Memo, Tokenizer, damaged, read_part

WORD_END = "</w>"
"""What the last piece of each of GPT's words ends with."""


@dataclass(frozen=True)
class Special:
    """The pieces of the special ids; one piece may stand for several, or for all that a vocabulary lacks."""

    pad: str
    unknown: str
    begin: str
    end: str
    classification: str
    separator: str
    mask: str


@dataclass(frozen=True)
class Published(ABC):
    """A tokenizer that is trained already; its files lie beside its config."""

    vocabulary_size: int
    """Ids, all of them."""
    special: Special
    """Which pieces are special."""
    added: tuple[str, ...] = ()
    """Special pieces whose ids come after those of the files."""

    def train(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """Reads no text: the files must be there. Raises FileNotFoundError if they are not."""
        return self.load(folder)

    @abstractmethod
    def load(self, folder: Path) -> Tokenizer: ...


@dataclass(frozen=True)
class PublishedWordPiece(Published):
    """BERT's tokenizer (google-research/bert, tokenization.py): vocab.txt."""

    lowercase: bool = True
    """Lower-case the text."""
    strip_accents: bool = True
    """Take off accents (Unicode category Mn after NFD)."""
    chinese: bool = True
    """Each CJK character is a word."""
    longest_word: int = 200
    """Characters of a word that is not unknown as a whole, at most: 200 in the original, 100 in transformers."""

    def load(self, folder: Path) -> Tokenizer:
        return PublishedWordPieceTokenizer(folder, self)


@dataclass(frozen=True)
class PublishedWordBPE(Published):
    """OpenAI GPT's tokenizer, with BERT's words as transformers takes them where neither ftfy nor spaCy is installed:
    vocab.json and merges.txt."""

    def load(self, folder: Path) -> Tokenizer:
        return PublishedWordBPETokenizer(folder, self)


@dataclass(frozen=True)
class PublishedByteBPE(Published):
    """GPT-2's tokenizer (openai/gpt-2, encoder.py), and RoBERTa's: vocab.json and merges.txt."""

    def load(self, folder: Path) -> Tokenizer:
        return PublishedByteBPETokenizer(folder, self)


@dataclass(frozen=True)
class PublishedWords(Published):
    """Transformer-XL's vocabulary (kimiyoung/transformer-xl, vocabulary.py): what stands between white space, and at
    the end of each line the piece that ends it; words.json."""

    lowercase: bool = False
    """Lower-case the text."""

    def load(self, folder: Path) -> Tokenizer:
        return PublishedWordsTokenizer(folder, self)


class PublishedWordsTokenizer(WordsTokenizer):
    """One token for each word and each line end; the latter begins and ends a document, too."""

    def __init__(self, folder: Path, config: PublishedWords) -> None:
        words, content = read_list(folder, WORDS)
        self.folder = folder
        self.config = config
        self.fingerprint = fingerprint(type(self).__name__, config, content)
        self.vocabulary = special_vocabulary(words, config, folder)
        end = self.vocabulary.end
        self._words = [*words[:end], LINE_END, *words[end + 1 :]]
        self._ids = {word: index for index, word in enumerate(self._words)}

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.config)

    def piece(self, index: int) -> str:
        return self.config.special.end if index == self.vocabulary.end else self._words[index]

    def _normalized(self, text: str) -> str:
        return text.lower() if self.config.lowercase else text


class PublishedByteBPETokenizer(ByteLevelBPETokenizer):
    """Pieces of bytes. Nothing is lost."""

    def __init__(self, folder: Path, config: PublishedByteBPE) -> None:
        self.config = config
        super().__init__(folder, "none", asdict(config.special), config.added)
        if missing := byte_letters().keys() - self._pieces.values():
            raise damaged(folder, "vocab.json", f"the byte {min(missing)!r} is missing")
        refuse_pieces_of_text(self.config, (a + b for a, b in read_merges(folder)), folder)

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.config)


class BasicWords(ABC):
    """What BERT's and GPT's tokenizers share: the words. White space is lost; control and format characters
    (categories Cc and Cf, white space among them but for tab and line ends) and U+FFFD are dropped before anything
    else, so what stood on their two sides is one word."""

    lowercase = strip_accents = chinese = True

    def __init__(self, folder: Path, config: Published, pieces: list[str], content: bytes, model: Any) -> None:
        self.folder = folder
        self.config: Any = config
        self._list = [*pieces, *config.added]
        self._model = model
        self.fingerprint = fingerprint(type(self).__name__, config, hashlib.sha256(content).hexdigest())
        self.vocabulary = special_vocabulary(self._list, config, folder)
        self._memo = Memo(self._encode_word)

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.config)

    def normalize(self, text: str) -> str:
        """The words with a space between them, the unknown piece for what is unknown."""
        parts = (part for word in cleaned(text).split() for part, _ in self._parts(word))
        return self.decode([index for part in parts for index, _ in self._pieces(part)])

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """`continued` changes nothing: where a passage was cut within a word, its parts are two."""
        return self._memo.encoding(cleaned(text))

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...

    def piece(self, index: int) -> str:
        return self._list[index]

    def _parts(self, word: str) -> Iterator[tuple[str, list[int]]]:
        return basic_words(word, self.lowercase, self.strip_accents, self.chinese)

    @abstractmethod
    def _pieces(self, part: str) -> list[tuple[int, int]]:
        """The ids of a word without punctuation, and the number of its characters that each one covers."""

    def _encode_word(self, word: str) -> list[int]:
        """The id and the place in the word of each token; the first is at its start even if characters were dropped."""
        found: list[int] = []
        for part, places in self._parts(word):
            at = 0
            for index, length in self._pieces(part):
                found += (index, places[at] if found else 0)
                at += length
        return found


class PublishedWordPieceTokenizer(BasicWords):
    """Pieces of words, or the unknown id for a whole word."""

    def __init__(self, folder: Path, config: PublishedWordPiece) -> None:
        content = read_part(folder, "vocab.txt")
        try:
            pieces = [line.strip() for line in content.decode().removesuffix("\n").split("\n")]
        except UnicodeDecodeError:
            raise damaged(folder, "vocab.txt", "it is not UTF-8") from None
        self.lowercase, self.strip_accents, self.chinese = config.lowercase, config.strip_accents, config.chinese
        ids = {piece: index for index, piece in enumerate(pieces)}  # of equal pieces the last counts
        model = models.WordPiece(ids, unk_token=config.special.unknown, max_input_chars_per_word=config.longest_word)
        super().__init__(folder, config, pieces, content, model)
        reachable = (piece for piece in pieces if piece.startswith("##") or self._whole(piece))
        refuse_pieces_of_text(config, reachable, folder)

    def _whole(self, piece: str) -> bool:
        return [part for part, _ in self._parts(piece)] == [piece]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Words with a space between them; special ids are left out."""
        special = set(self.vocabulary.special)
        pieces = [self._list[index] for index in np.asarray(ids).tolist() if index not in special]
        return "".join(piece[2:] if piece.startswith("##") else f" {piece}" for piece in pieces).removeprefix(" ")

    def _pieces(self, part: str) -> list[tuple[int, int]]:
        tokens = self._model.tokenize(part)
        return [(token.id, len(token.value) - 2 * (place > 0)) for place, token in enumerate(tokens)]


class PublishedWordBPETokenizer(BasicWords):
    """Pieces of words; a character that is unknown is the unknown id."""

    def __init__(self, folder: Path, config: PublishedWordBPE) -> None:
        vocabulary, merges = read_part(folder, "vocab.json"), read_merges(folder)
        try:
            ids = json.loads(vocabulary)
            unknown = config.special.unknown
            model = models.BPE(ids, merges, unk_token=unknown, end_of_word_suffix=WORD_END)
            pieces = sorted(ids, key=ids.__getitem__)
        except Exception as error:  # the library raises nothing narrower
            what = f"{type(error).__name__}: {error}".split("\n")[0]
            raise damaged(folder, "vocab.json or merges.txt", what) from None
        if sorted(ids.values()) != list(range(len(ids))):
            raise damaged(folder, "vocab.json", "its ids are not 0, 1, 2, ...")
        super().__init__(folder, config, pieces, vocabulary + read_part(folder, "merges.txt"), model)
        single = (piece for piece in pieces if len(piece.removesuffix(WORD_END)) == 1 and not piece.isspace())
        reachable = (piece for piece in single if piece.removesuffix(WORD_END).strip())
        refuse_pieces_of_text(config, itertools.chain(reachable, (a + b for a, b in merges)), folder)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Words with a space between them; special ids are left out. After an unknown character there is a space, for
        a word may end with it."""
        special, unknown = set(self.vocabulary.special), self.vocabulary.unknown
        pieces = [self._list[i] + WORD_END * (i == unknown) for i in np.asarray(ids).tolist() if i not in special]
        return "".join(pieces).replace(WORD_END, " ").removesuffix(" ")

    def _pieces(self, part: str) -> list[tuple[int, int]]:
        unknown = self.vocabulary.unknown
        return [
            (token.id, 1 if token.id == unknown else len(token.value.removesuffix(WORD_END)))
            for token in self._model.tokenize(part)
        ]


def special_vocabulary(pieces: list[str], config: Published, folder: Path) -> Vocabulary:
    """The vocabulary of these pieces in the order of their ids, the special ones among them."""
    special = asdict(config.special)
    missing = sorted(set(special.values()) - set(pieces))
    if missing or len(pieces) != config.vocabulary_size:
        what = f"{missing[0]!r} is missing" if missing else f"{len(pieces)} pieces, not {config.vocabulary_size}"
        raise damaged(folder, "its vocabulary", what)
    ids = {piece: index for index, piece in enumerate(pieces)}
    vocabulary = Vocabulary(size=len(pieces), **{kind: ids[special[kind]] for kind in SPECIAL})
    if vocabulary.unknown in vocabulary.special:
        raise damaged(folder, "its vocabulary", f"{config.special.unknown!r} is both unknown text and a special piece")
    return vocabulary


def refuse_pieces_of_text(config: Published, reachable: Iterable[str], folder: Path) -> None:
    """Raises ValueError if text can become a special piece."""
    special = {piece for kind, piece in asdict(config.special).items() if kind != "unknown"} | {*config.added}
    if found := special & {*reachable}:
        raise ValueError(f"special piece {min(found)!r} of {folder} can be made of text: name one that cannot")


def cleaned(text: str) -> str:
    """The text without what BERT drops."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate({ord(character): None for character in set(text) if is_dropped(character)})


def is_dropped(character: str) -> bool:
    if character in "\t\n\r":
        return False
    return character == "\ufffd" or unicodedata.category(character) in ("Cc", "Cf")


def is_punctuation(character: str) -> bool:
    """For BERT all of ASCII is that is neither letter, digit nor control character."""
    if character.isascii():
        return not character.isalnum() and " " < character < "\x7f"
    return unicodedata.category(character).startswith("P")


def basic_words(word: str, lowercase: bool, strip_accents: bool, chinese: bool) -> Iterator[tuple[str, list[int]]]:
    """BERT's words in what stands between white space, and the place in it of each of their characters."""
    for match in re.finditer(f"{HAN.pattern}|{HAN.pattern.replace('[', '[^', 1)}+" if chinese else ".+", word, re.S):
        text, places = match[0], list(range(match.start(), match.end()))
        if lowercase:
            text, places = text.lower(), spread(map(str.lower, text), places)
        if strip_accents and not text.isascii():
            apart = (unicodedata.normalize("NFD", character) for character in text)
            text, places = unicodedata.normalize("NFD", text), spread(apart, places)
            kept = [unicodedata.category(character) != "Mn" for character in text]
            text, places = "".join(itertools.compress(text, kept)), list(itertools.compress(places, kept))
        start = 0
        for at, character in enumerate(text):
            if is_punctuation(character):
                if start < at:
                    yield text[start:at], places[start:at]
                yield character, places[at : at + 1]
                start = at + 1
        if start < len(text):
            yield text[start:], places[start:]


def spread(texts: Iterable[str], places: list[int]) -> list[int]:
    """The place of each character where each place now has a text."""
    return [place for text, place in zip(texts, places, strict=True) for _ in text]
