"""Text to ids and back, with the place of every token in the text: what every tokenizer is.

The kinds are in sentencepieces.py (unigram, BPE), subwords.py (WordPiece, byte-level BPE) and symbols.py (bytes,
characters, words).
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from ctx_jax.contract import Vocabulary
from ctx_jax.data import fingerprint
from ctx_jax.data.corpora import Corpus
from ctx_jax.serialization import from_json, to_json

Normalization = Literal["none", "NFC", "NFKC"]
"""Unicode normalisation of all text, in training and in use."""

SPACES = np.array([chr(code).isspace() for code in range(0x3002)])
"""Whether a code point is white space; U+3000 is the last that is."""


class Encoding(NamedTuple):
    """A text in tokens."""

    text: str
    """The text after Unicode normalisation: what `starts` counts in."""
    ids: np.ndarray
    """[n] int32; no special ids, whatever the text says."""
    starts: np.ndarray
    """[n] int64, never falling: the character at which each token starts. A space that only joins a token to the word
    before it does not count; bytes of one character share its place."""

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
        document's passages, joined, are the document's. Nothing in the text ever becomes a special id."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """`decode(encode(text).ids) == normalize(text)`; special ids are left out."""
        ...

    def normalize(self, text: str) -> str:
        """The text as far as this tokenizer keeps it."""
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


CONFIG = "config.json"
"""The file in a tokenizer's folder that says what it is."""


def save_config(config: Any, folder: Path) -> None:
    """Writes which tokenizer a folder holds."""
    (folder / CONFIG).write_text(json.dumps(to_json(config), indent=1) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`. Raises FileNotFoundError if there is none."""
    file = folder / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer in {folder}: train one into it first")
    return from_json(json.loads(file.read_text()), str(file)).load(folder)


def prepare_tokenizer(
    config: TokenizerConfig, corpus: Corpus, folder: Path, log: Callable[[str], None] = lambda text: None
) -> Tokenizer:
    """The tokenizer of `config` for this corpus: from `folder` where it has been trained, else trained on the train
    split, which is told to `log`."""
    path = folder / f"tokenizer-{fingerprint(config, corpus.fingerprint())[:16]}"
    if not path.exists():
        log(f"training a tokenizer: {config}")
    return config.train((passage.text for passage in corpus.passages("train")), path)


def unicode_normalized(text: str, form: Normalization) -> str:
    """The text in a Unicode normalisation form."""
    return text if form == "none" or text.isascii() else unicodedata.normalize(form, text)


def word_characters(text: str) -> np.ndarray:
    """[len(text) + 1] bool: a word starts here, with a character that is not white space and is first or after some."""
    if text.isascii():
        codes = np.frombuffer(text.encode("ascii"), np.uint8)
    else:
        codes = np.minimum(np.frombuffer(text.encode("utf-32-le"), np.uint32), len(SPACES) - 1)
    space = np.concatenate([[True], SPACES[codes], [True]])
    return space[:-1] & ~space[1:]
