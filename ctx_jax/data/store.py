"""Tokens on disk: written once for a corpus and a tokenizer, memory-mapped, read at any sequence length."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]  # compiled, without stubs

from ctx_jax.contract import Vocabulary
from ctx_jax.data import building, fingerprint
from ctx_jax.data.corpora import Corpus, Passage, Split
from ctx_jax.data.tokenizers import Tokenizer

FORMAT = 2
"""Raised whenever a store of the same corpus and tokenizer would come out different."""

WORD, SENTENCE = 1, 2
"""Bits of `Store.flags`: a word begins here, a sentence begins here."""

OTHER_SPACES = re.compile(r"[^\S\x00-\x7f]")


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


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    split: Split,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """The store of a split, in a folder of its own inside `folder`; written only if it is not there yet.

    The folder's name is a key of all that decides its content; it appears when everything is written, so that a killed
    preparation leaves nothing that looks finished, and one of two processes waits for the other. `progress` is told the
    documents and the bytes of text done so far. Memory holds one document.
    """
    splitter = f"sentencex {version('sentencex')}"
    keys = {"corpus": corpus.fingerprint(), "tokenizer": tokenizer.fingerprint, "split": split, "splitter": splitter}
    path = folder / f"{split}-{fingerprint(FORMAT, keys)[:16]}"
    with building(path) as partial:
        if partial is not None:
            written = _write(corpus, tokenizer, split, partial, progress)
            about = {"format": FORMAT, **written, "vocabulary": dataclasses.asdict(tokenizer.vocabulary), **keys}
            (partial / "store.json").write_text(json.dumps(about, indent=1) + "\n")
    return open_store(path)


def open_store(path: Path) -> Store:
    """The store in `path`. Raises FileNotFoundError if there is none, ValueError if it is of another format or
    damaged."""
    if not (path / "store.json").is_file():
        raise FileNotFoundError(f"no token store in {path}: prepare the data first")
    about = json.loads((path / "store.json").read_text())
    if about["format"] != FORMAT:
        raise ValueError(f"store {path} has format {about['format']}, this version reads {FORMAT}: prepare it anew")
    vocabulary = Vocabulary(**about["vocabulary"])

    def array(name: str, dtype: np.dtype[Any], size: int) -> np.ndarray:
        file = path / f"{name}.bin"
        if not file.is_file() or file.stat().st_size != size * dtype.itemsize:
            raise ValueError(
                f"store {path} is damaged: {file.name} is not {size * dtype.itemsize} bytes; delete the folder"
            )
        # A plain view: slices of np.memmap itself cost several times as much.
        return np.asarray(np.memmap(file, dtype, mode="r", shape=(size,))) if size else np.zeros(0, dtype)

    return Store(
        folder=path,
        vocabulary=vocabulary,
        tokens=array("tokens", token_dtype(vocabulary), about["tokens"]),
        flags=array("flags", np.dtype(np.uint8), about["tokens"]),
        offsets=array("offsets", np.dtype(np.int64), about["documents"] + 1),
        document_bytes=array("document_bytes", np.dtype(np.int64), about["documents"]),
        **{name: about[name] for name in ("corpus", "tokenizer", "split", "splitter")},
    )


def token_dtype(vocabulary: Vocabulary) -> np.dtype[Any]:
    """The smallest of the two types that hold every id."""
    return np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.uint32)


def encode_passage(passage: Passage, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids and flags of a passage as they are stored, with the begin token before a document's first and the end token
    after its last."""
    vocabulary = tokenizer.vocabulary
    encoding = tokenizer.encode(passage.text, continued=not passage.first)
    flags = encoding.word_starts() * np.uint8(WORD)
    characters = sentence_characters(encoding.text, passage.language)
    if not (passage.first or passage.text.startswith("\n")):
        characters = characters[1:]  # the document was cut within a line
    sentences = encoding.tokens_at(characters)
    if passage.first:
        sentences[:1] = 0  # white space before the first sentence is part of it
    flags[sentences] |= SENTENCE
    begin = [vocabulary.begin] if passage.first else []
    end = [vocabulary.end] if passage.last and vocabulary.end != vocabulary.begin else []
    ids = np.concatenate([begin, encoding.ids, end]).astype(token_dtype(vocabulary))
    return ids, np.pad(flags, (len(begin), len(end)))


def sentence_characters(text: str, language: str) -> np.ndarray:
    """The characters at which sentences start, none of them white space."""
    # sentencex 1.0.32 panics on some white space outside ASCII; in its place, a space changes no offset.
    plain = text if text.isascii() else OTHER_SPACES.sub(" ", text)
    starts: list[int] = []
    place = 0
    for sentence in segment(language, plain):
        if solid := len(sentence.lstrip()):
            starts.append(place + len(sentence) - solid)
        place += len(sentence)
    return np.array(starts, np.int64)


def _write(
    corpus: Corpus, tokenizer: Tokenizer, split: Split, folder: Path, progress: Callable[[int, int], None] | None
) -> dict[str, int]:
    documents = total = read = 0
    with (
        (folder / "tokens.bin").open("wb") as tokens_file,
        (folder / "flags.bin").open("wb") as flags_file,
        (folder / "offsets.bin").open("wb") as offsets_file,
        (folder / "document_bytes.bin").open("wb") as bytes_file,
    ):
        offsets_file.write(np.int64(0).tobytes())
        size = 0
        for passage in corpus.passages(split):
            tokens, flags = encode_passage(passage, tokenizer)
            tokens_file.write(tokens.tobytes())
            flags_file.write(flags.tobytes())
            total, size = total + len(tokens), size + len(passage.text.encode())
            if not passage.last:
                continue
            offsets_file.write(np.int64(total).tobytes())
            bytes_file.write(np.int64(size).tobytes())
            documents, read, size = documents + 1, read + size, 0
            if progress is not None:
                progress(documents, read)
    return {"documents": documents, "tokens": total}
