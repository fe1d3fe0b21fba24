"""Small texts, a small tokenizer, and stores whose tokens tell where they are from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ctx_jax.contract import Vocabulary
from ctx_jax.data.corpora import Sotu, documents
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.subwords import ByteLevelBPE, WordPiece
from ctx_jax.data.symbols import Bytes, Characters, Words
from ctx_jax.data.tokenizers import Tokenizer, TokenizerConfig
from ctx_jax.interop.tokenizers import import_tokenizer
from tests.golden.published import FAMILIES, write_family


@dataclass(eq=False)
class MadeStore:
    """A `contract.TokenStore` in memory."""

    vocabulary: Vocabulary
    tokens: np.ndarray
    flags: np.ndarray
    offsets: np.ndarray
    document_bytes: np.ndarray


def _make_store(documents: list[list[int]], one_boundary: bool = False) -> MadeStore:
    """A store of documents given as the lengths of their sentences. Text tokens count up from 10 through the store; a
    word begins at the first, fourth, seventh ... token of each sentence; begin 2, end 3 (or 2), CLS 4, SEP 5."""
    tokens, flags, offsets = [], [], [0]
    text = itertools.count(10)
    for sentences in documents:
        tokens.append(2)
        flags.append(0)
        for length in sentences:
            tokens += [next(text) for _ in range(length)]
            flags += [(i % 3 == 0) + 2 * (i == 0) for i in range(length)]
        if not one_boundary:
            tokens.append(3)
            flags.append(0)
        offsets.append(len(tokens))
    vocabulary = Vocabulary(
        size=next(text), pad=0, unknown=1, begin=2, end=2 if one_boundary else 3, classification=4, separator=5, mask=6
    )
    return MadeStore(
        vocabulary=vocabulary,
        tokens=np.array(tokens, np.uint16),
        flags=np.array(flags, np.uint8),
        offsets=np.array(offsets),
        document_bytes=np.diff(offsets),
    )


@pytest.fixture(scope="session")
def make_store() -> Callable[..., MadeStore]:
    return _make_store


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """400 pieces, learned from five speeches."""
    folder: Path = tmp_path_factory.mktemp("tokenizer") / "pieces"
    return SentencePiece(vocabulary_size=400).train(itertools.islice(documents(Sotu().passages("train")), 5), folder)


KINDS: dict[str, TokenizerConfig] = {
    "unigram": SentencePiece(vocabulary_size=400),
    "bpe": SentencePiece(vocabulary_size=400, model_type="bpe", normalization="NFKC"),
    "wordpiece": WordPiece(vocabulary_size=500),
    "wordpiece_cased": WordPiece(vocabulary_size=500, lowercase=False, character_coverage=1.0),
    "byte_bpe": ByteLevelBPE(vocabulary_size=500),
    "bytes": Bytes(),
    "characters": Characters(vocabulary_size=70),
    "words": Words(vocabulary_size=1000, minimum_count=2),
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """The small tokenizer of a kind, learned from five speeches, or of a family that others published."""
    folder = tmp_path_factory.mktemp("kinds")
    speeches = list(itertools.islice(documents(Sotu().passages("train")), 5))

    @functools.cache
    def make(name: str) -> Tokenizer:
        if name not in FAMILIES:
            return KINDS[name].train(speeches, folder / name)
        write_family(name, folder / f"{name}-published")
        return import_tokenizer(folder / f"{name}-published", folder / name)

    return make
