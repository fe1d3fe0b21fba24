"""Text to ids and back, with the place of every token in the text: what every tokenizer is.

The kinds are in sentencepieces.py (unigram, BPE), subwords.py (WordPiece, byte-level BPE) and symbols.py (bytes,
characters, words).
"""

from __future__ import annotations

import json
import time
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from ctx_jax.contract import Vocabulary
from ctx_jax.data import TELL_SECONDS, check_unchanged, fingerprint
from ctx_jax.data.corpora import Corpus
from ctx_jax.serialization import from_json, nearest, to_json

Normalization = Literal["none", "NFC", "NFKC"]
"""Unicode normalisation of all text, in training and in use."""

SPACES = np.array([chr(code).isspace() for code in range(0x3002)])
"""Whether a code point is white space; U+3000 is the last that is."""

ASCII_SPACES = SPACES[:256].tobytes()
"""The same for one-byte characters, as a table for `bytes.translate`."""

SPECIAL = {"pad": 0, "unknown": 1, "begin": 2, "end": 3, "classification": 4, "separator": 5, "mask": 6}
"""The special ids of every tokenizer that is trained here; text comes after them."""


PIECES = dict(zip(SPECIAL, ("<pad>", "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<mask>"), strict=True))
"""What stands for them in lists of tokens."""


class Encoding(NamedTuple):
    """A text in tokens."""

    text: str
    """The text after Unicode normalisation: what `starts` counts in."""
    ids: np.ndarray
    """[n] int32; no special ids, whatever the text says."""
    starts: np.ndarray
    """[n] int64, never falling: the character at which each token starts. A space that only joins a token to the word
    before it does not count; bytes of one character share its place; a word's first token starts where it does."""

    def tokens_at(self, characters: np.ndarray) -> np.ndarray:
        """The first token of each of these characters of the text, as indices."""
        before = np.searchsorted(self.starts, characters, side="left")
        return np.minimum(before, np.searchsorted(self.starts, characters, side="right") - 1)

    def word_starts(self) -> np.ndarray:
        """[n] bool: a word starts with this token. A word is what stands between white space, for every tokenizer."""
        return word_characters(self.text)[self.starts] & (np.diff(self.starts, prepend=-1) > 0)


class Tokenizer(Protocol):
    """A trained tokenizer. It can be pickled: other processes load it from its folder."""

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def fingerprint(self) -> str:
        """A key of everything that decides the ids."""
        ...

    def encode(self, text: str, continued: bool = False) -> Encoding:
        """A text, or with `continued` a passage of a document that is not its first (`corpora.Passage`): the ids of a
        document's passages, joined, are the document's. Nothing in the text ever becomes a special id, except that
        `contract.Vocabulary.unknown` stands for what a tokenizer does not know."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """`decode(encode(text).ids) == normalize(text)`; special ids are left out."""
        ...

    def normalize(self, text: str) -> str:
        """The text as far as this tokenizer keeps it."""
        ...

    def piece(self, index: int) -> str:
        """How an id is written, for people."""
        ...


class TokenizerConfig(Protocol):
    """How to make a tokenizer. A frozen dataclass; its fields are its config."""

    @property
    def vocabulary_size(self) -> int:
        """Ids, special ones included; at most so many where the text decides."""
        ...

    def train(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """Reads the texts (documents or passages of them) once, writes `folder`, whole or not at all, or loads what is
        there already. The same texts give the same ids. Raises ValueError for too little text."""
        ...

    def load(self, folder: Path) -> Tokenizer:
        """The tokenizer that `train` wrote."""
        ...


MOST_IDS = 1 << 24
"""Ids of a learned tokenizer, at most: far more than any has, and few enough for the libraries not to break down."""

CONFIG = "config.json"
"""The file in a tokenizer's folder that says what it is."""

KINDS: dict[str, dict[str, str]] = {
    "unigram": {"type": "ctx_jax.data.sentencepieces:SentencePiece"},
    "bpe": {"type": "ctx_jax.data.sentencepieces:SentencePiece", "model_type": "bpe"},
    "wordpiece": {"type": "ctx_jax.data.subwords:WordPiece"},
    "byte_bpe": {"type": "ctx_jax.data.subwords:ByteLevelBPE"},
    "bytes": {"type": "ctx_jax.data.symbols:Bytes"},
    "characters": {"type": "ctx_jax.data.symbols:Characters"},
    "words": {"type": "ctx_jax.data.symbols:Words"},
}
"""What a tokenizer may be called in one word, with its defaults."""


def named(text: str) -> TokenizerConfig:
    """The tokenizer of a kind, or the trained one that the folder of this name holds. Raises ValueError for neither."""
    if text in KINDS:
        return from_json(KINDS[text])
    if (Path(text) / CONFIG).is_file():
        return Pretrained(Path(text))
    what = "is a folder without a tokenizer" if Path(text).is_dir() else "is neither a kind nor a tokenizer's folder"
    raise ValueError(f"tokenizer {text!r} {what}: choose {', '.join(KINDS)} or a folder{nearest(text, list(KINDS))}")


@dataclass(frozen=True)
class Pretrained:
    """A tokenizer that is trained already, used where it is. Raises FileNotFoundError or ValueError if there is no
    sound one, or one of another size."""

    path: str | Path
    """Its folder."""
    vocabulary_size: int = 0
    """Its ids; 0 = look how many there are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if not self.vocabulary_size:
            object.__setattr__(self, "vocabulary_size", load_tokenizer(Path(self.path)).vocabulary.size)

    def train(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """Reads no text and writes nothing."""
        return self.load(folder)

    def load(self, folder: Path) -> Tokenizer:
        """The tokenizer at `path`."""
        tokenizer = load_tokenizer(Path(self.path))
        if tokenizer.vocabulary.size != self.vocabulary_size:
            raise ValueError(
                f"tokenizer {self.path} has {tokenizer.vocabulary.size} ids, not vocabulary_size {self.vocabulary_size}"
                ": it is another one, name the one that was meant"
            )
        return tokenizer


def save_config(config: Any, folder: Path) -> None:
    """Writes which tokenizer a folder holds."""
    (folder / CONFIG).write_text(json.dumps(to_json(config), indent=1) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`. Raises FileNotFoundError if there is none, ValueError if it is damaged."""
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"no tokenizer in {folder}: train one into it first")
    try:
        config = from_json(json.loads(read_part(folder, CONFIG)), CONFIG)
    except ValueError as error:
        raise damaged(folder, CONFIG, str(error)) from None
    if not hasattr(config, "load") or isinstance(config, Pretrained):
        raise damaged(folder, CONFIG, "it does not describe a tokenizer")
    return config.load(folder)


def read_part(folder: Path, name: str) -> bytes:
    """One of the files that make a tokenizer. Raises FileNotFoundError if it is missing."""
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"tokenizer {folder} is damaged: {name} is missing; delete the folder") from None


def damaged(folder: Path, name: str, what: str) -> ValueError:
    """The error of a file that cannot be what `train` wrote."""
    return ValueError(f"tokenizer {folder} is damaged: {name} cannot be read ({what}); delete the folder")


def tokenizer_name(config: TokenizerConfig, corpus: Corpus) -> str:
    """The name of its folder: a key of what decides its content."""
    return f"tokenizer-{fingerprint(config, corpus.fingerprint('train'))[:16]}"


def train_texts(corpus: Corpus, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
    """The passages of the train split. `progress` is told the documents and the bytes of text read so far, some times a
    second and at the end. Raises ValueError at the end if the text has changed meanwhile."""
    before = corpus.fingerprint("train")
    documents = read = 0
    told = time.monotonic()
    for passage in corpus.passages("train"):
        yield passage.text
        documents, read = documents + passage.last, read + utf8_size(passage.text)
        if progress is not None and (now := time.monotonic()) - told > TELL_SECONDS:
            told = now
            progress(documents, read)
    if progress is not None:
        progress(documents, read)
    check_unchanged(before, corpus.fingerprint("train"), corpus)


def utf8_size(text: str) -> int:
    """Bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


class Memo(dict[str, bytes]):
    """The ids of words, each encoded by itself, once: words repeat, and to look one up is far cheaper. Memory is
    bounded."""

    words = 1 << 18
    characters = 40
    """Longer words are not kept."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def __missing__(self, word: str) -> bytes:
        ids = array("i", self._encode(word)).tobytes()
        if len(word) <= self.characters:
            if len(self) >= self.words:
                self.clear()
            self[word] = ids
        return ids

    def joined(self, words: Iterable[str]) -> bytes:
        """The ids of all, as int32."""
        return b"".join(map(self.__getitem__, words))

    def encoding(self, text: str) -> Encoding:
        """The words of the text, where each is kept as id, place in the word, id, place, ..."""
        parts = list(map(self.__getitem__, text.split()))
        pairs = np.frombuffer(b"".join(parts), np.int32).reshape(-1, 2)
        counts = np.fromiter(map(len, parts), np.int64, len(parts)) // 8
        places = np.repeat(np.flatnonzero(word_characters(text)), counts)
        return Encoding(text, pairs[:, 0], places + pairs[:, 1])


def counted(split: Callable[[str], Iterable[str]], texts: Iterable[str], memory: int = 1 << 28) -> Counter[str]:
    """How often each word occurs in the texts. Where the words need more than about so many bytes, the rarest are
    forgotten on the way."""
    counts: Counter[str] = Counter()
    fresh = 0
    for text in texts:
        counts.update(split(text))
        fresh += len(text)
        if fresh > memory >> 4:
            fresh, least = 0, 1
            while sum(map(len, counts)) + 100 * len(counts) > memory:
                counts = Counter({word: count for word, count in counts.items() if count > least})
                least *= 2
    return counts


def unicode_normalized(text: str, form: Normalization) -> str:
    """The text in a Unicode normalisation form."""
    if form == "none" or text.isascii() or unicodedata.is_normalized(form, text):
        return text
    return unicodedata.normalize(form, text)


def code_points(text: str) -> np.ndarray:
    """[len(text)] uint32."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def word_characters(text: str) -> np.ndarray:
    """[len(text) + 1] bool: a word starts here, with a character that is not white space and is first or after some."""
    starts = np.zeros(len(text) + 1, bool)
    if text.isascii():
        space = np.frombuffer(text.encode("ascii").translate(ASCII_SPACES), bool)
    else:
        codes = code_points(text)
        space = codes == ord(" ")
        others = np.flatnonzero((codes < ord(" ")) | (codes > 0x7E))  # few
        space[others] = SPACES[np.minimum(codes[others], len(SPACES) - 1)]
    starts[:-1] = ~space
    starts[1:-1] &= space[:-1]
    return starts
