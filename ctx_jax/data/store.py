"""Tokens on disk: written once for a corpus and a tokenizer, memory-mapped, read at any sequence length."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ctx_jax.contract import Vocabulary
from ctx_jax.data import sentences
from ctx_jax.data.corpora import Passage, Split
from ctx_jax.data.sentences import sentence_characters
from ctx_jax.data.tokenizers import Encoding, Tokenizer, utf8_size

FORMAT = 4
"""Raised whenever a store of the same corpus and tokenizer would come out different."""

WORD, SENTENCE = 1, 2
"""Bits of `Store.flags`: a word begins here, a sentence begins here."""

KEYS = ("corpus", "tokenizer", "split", "splitter", "tokenizer_folder")
"""What store.json says of the origin, under the names that `Store` has for it."""


@dataclass(frozen=True, eq=False)
class Store:
    """The `contract.TokenStore` in a folder. Its arrays are read-only views of files: opening costs nothing."""

    folder: Path
    vocabulary: Vocabulary
    tokens: np.ndarray
    flags: np.ndarray
    offsets: np.ndarray
    document_bytes: np.ndarray
    corpus: str
    """The fingerprint of the corpus."""
    tokenizer: str
    """The fingerprint of the tokenizer."""
    split: Split
    splitter: str
    """What found the sentences: library and version."""
    tokenizer_folder: str
    """Where the tokenizer is, from the folder that holds the store."""

    def counts(self) -> np.ndarray:
        """[V] int64: how often each id occurs. Reads all tokens once, a part at a time."""
        counts = np.zeros(self.vocabulary.size, np.int64)
        for start in range(0, len(self.tokens), 1 << 22):
            counts += np.bincount(self.tokens[start : start + (1 << 22)], minlength=len(counts))
        return counts


def open_store(path: Path) -> Store:
    """The store in `path`. Raises FileNotFoundError if there is none, ValueError if it is of another format or
    damaged."""
    if not (path / "store.json").is_file():
        raise FileNotFoundError(f"no token store in {path}: prepare the data first")
    try:
        about = json.loads((path / "store.json").read_text())
        found = about["format"]
        if found != FORMAT:
            raise ValueError(f"store {path} has format {found}, this version reads {FORMAT}: prepare the data anew")
        vocabulary = Vocabulary(**about["vocabulary"])
        tokens, documents = int(about["tokens"]), int(about["documents"])
        origin = {name: about[name] for name in KEYS}
        if not all(0 <= index < vocabulary.size for index in vars(vocabulary).values() if index != vocabulary.size):
            raise KeyError
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError(f"store {path} is damaged: store.json is not readable; delete the folder") from None

    def array(name: str, dtype: np.dtype[Any], size: int) -> np.ndarray:
        file = path / f"{name}.bin"
        if not file.is_file() or file.stat().st_size != size * dtype.itemsize:
            raise ValueError(
                f"store {path} is damaged: {file.name} is not {size * dtype.itemsize} bytes; delete the folder"
            )
        # A plain view: slices of np.memmap itself cost several times as much.
        return np.asarray(np.memmap(file, dtype, mode="r", shape=(size,))) if size else np.zeros(0, dtype)

    store = Store(
        folder=path,
        vocabulary=vocabulary,
        tokens=array("tokens", token_dtype(vocabulary), tokens),
        flags=array("flags", np.dtype(np.uint8), tokens),
        offsets=array("offsets", np.dtype(np.int64), documents + 1),
        document_bytes=array("document_bytes", np.dtype(np.int64), documents),
        **origin,
    )
    if (store.offsets[0], store.offsets[-1]) != (0, tokens) or (np.diff(store.offsets) < 0).any():
        raise ValueError(f"store {path} is damaged: offsets.bin does not fit {tokens} tokens; delete the folder")
    return store


def check_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    """Raises ValueError if the store's tokens are not this tokenizer's."""
    if store.tokenizer != tokenizer.fingerprint:
        raise ValueError(
            f"store {store.folder} holds tokens of tokenizer {store.tokenizer} (folder {store.tokenizer_folder}), not "
            f"{tokenizer.fingerprint} ({tokenizer.folder}): use that tokenizer, or prepare the data with this one"
        )


def token_dtype(vocabulary: Vocabulary) -> np.dtype[Any]:
    """The smallest of the two types that hold every id."""
    return np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.uint32)


class Encoded(NamedTuple):
    """Passages as they are stored."""

    tokens: np.ndarray
    """[n], of `token_dtype`: begin and end tokens included."""
    flags: np.ndarray
    """[n] uint8."""
    lengths: np.ndarray
    """[passages] int64: tokens of each."""
    sizes: np.ndarray
    """[passages] int64: UTF-8 bytes of the text of each."""
    last: np.ndarray
    """[passages] bool: whether a document ends with it."""


InContext = tuple[str, bool, bool, str, str, str]
"""The fields of a `corpora.Passage`, and what stands before and after it in its document. (Processes exchange plain
tuples faster.)"""


def in_context(passages: Iterable[Passage]) -> Iterator[InContext]:
    """Each passage with as much of the passages around it as its sentences may depend on."""
    held: tuple[str, bool, bool, str] | None = None
    before = ""
    for text, first, last, language in passages:
        if held is not None:
            yield (*held, before, text[: sentences.AFTER])
            before, held = sentences.tail(before + held[0]), None
        if last:
            yield text, first, last, language, before, ""
            before = ""
        else:
            held = text, first, last, language
    if held is not None:
        yield (*held, before, "")


def encode_passages(passages: Sequence[InContext], tokenizer: Tokenizer) -> Encoded:
    """Encodes each passage.

    The begin token stands before a document's first passage, the end token after its last. A document's first sentence
    starts with its first token, be it white space; others start after it. Words and sentences do not depend on where a
    document is cut into passages, but for sentences in a paragraph that began more than `sentences.BEFORE` characters
    before the cut: there they are found as from there on.
    """
    vocabulary = tokenizer.vocabulary
    texts, firsts, lasts, languages, befores, afters = zip(*passages, strict=True)
    first, last = np.array(firsts, bool), np.array(lasts, bool)
    encodings = [tokenizer.encode(text, not is_first) for text, is_first in zip(texts, firsts, strict=True)]

    # Words and sentences are found in all texts at once, with a blank line between them: most documents are short.
    around = [[tokenizer.encode(text, True).text if text else "" for text in side] for side in (befores, afters)]
    contexts = [
        (before, encoding.text, after) for before, encoding, after in zip(around[0], encodings, around[1], strict=True)
    ]
    counts = np.array([len(encoding.ids) for encoding in encodings], np.int64)
    places = np.cumsum([0] + [sum(map(len, context)) + len(GAP) for context in contexts])
    begins = places[:-1] + [len(before) for before, _, _ in contexts]
    ends = begins + [len(text) for _, text, _ in contexts]
    whole = Encoding(
        GAP.join(before + text + after for before, text, after in contexts),
        np.concatenate([encoding.ids for encoding in encodings]),
        np.concatenate([encoding.starts for encoding in encodings]) + np.repeat(begins, counts),
    )
    marks = whole.word_starts() * np.uint8(WORD)
    starts = _sentences(whole.text, languages, places)
    found = np.searchsorted(places, starts, side="right") - 1
    inside = (starts >= begins[found]) & (starts < ends[found]) & (counts[found] > 0)
    starts, found = starts[inside], found[inside]
    opens = first[found] & (np.diff(found, prepend=-1) > 0)
    tokens = np.where(opens, 0, whole.tokens_at(starts))
    # A tokenizer may leave out what a text begins with.
    marks[np.maximum(tokens, (np.cumsum(counts) - counts)[found])] |= SENTENCE

    ended = last & (vocabulary.end != vocabulary.begin)
    lengths = counts + first + ended
    stops = np.cumsum(lengths)
    is_text = np.ones(stops[-1], bool)
    ids, flags = np.empty(len(is_text), token_dtype(vocabulary)), np.zeros(len(is_text), np.uint8)
    for border, token in (((stops - lengths)[first], vocabulary.begin), (stops[ended] - 1, vocabulary.end)):
        is_text[border] = False
        ids[border] = token
    ids[is_text], flags[is_text] = whole.ids, marks
    sizes = np.array([utf8_size(text) for text in texts], np.int64)
    return Encoded(ids, flags, lengths, sizes, last)


GAP = "\n\n"


def _sentences(text: str, languages: Sequence[str], places: np.ndarray) -> np.ndarray:
    """The characters of the joined text at which sentences start."""
    parts, at = [], 0
    for language, run in itertools.groupby(languages):
        start, at = at, at + sum(1 for _ in run)
        parts.append(places[start] + sentence_characters(text[places[start] : places[at]], language))
    return np.concatenate(parts)
