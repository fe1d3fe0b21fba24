"""What is in a token store: counts, lengths, and samples as text and as tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ctx_jax.data.store import SENTENCE, WORD, Store
from ctx_jax.data.tokenizers import Tokenizer

BAR = 40
"""Characters of the longest bar."""


def describe(store: Store, tokenizer: Tokenizer, samples: int, length: int, seed: int) -> dict[str, Any]:
    """Counts of the store, a histogram of its documents' lengths, and stretches of `length` tokens.

    Returns {"documents", "tokens" (begin and end tokens included), "bytes" (of text), "bytes_per_token", "words",
    "sentences", "unknown", "vocabulary", "used" (ids that occur), "lengths": [{"from", "to", "documents"}, ...] in
    tokens, "samples": [{"document", "at", "text", "pieces"}, ...]}. Reads tokens and flags once, a part at a time.
    """
    vocabulary = store.vocabulary
    counts = store.counts()
    words = sentences = 0
    for start in range(0, len(store.tokens), 1 << 22):
        part = slice(start, start + (1 << 22))
        words += int(np.count_nonzero(store.flags[part] & WORD))
        sentences += int(np.count_nonzero(store.flags[part] & SENTENCE))
    size = int(store.document_bytes.sum())
    return {
        "store": str(store.folder),
        "split": store.split,
        "documents": len(store.document_bytes),
        "tokens": len(store.tokens),
        "bytes": size,
        "bytes_per_token": round(size / max(1, len(store.tokens)), 3),
        "words": words,
        "sentences": sentences,
        "unknown": 0 if vocabulary.unknown in vocabulary.special else int(counts[vocabulary.unknown]),
        "vocabulary": vocabulary.size,
        "used": int(np.count_nonzero(counts)),
        "lengths": histogram(np.diff(store.offsets)),
        "samples": [sample(store, tokenizer, at, length) for at in places(store, samples, length, seed)],
    }


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """How many documents have from 2^k up to 2^(k+1) - 1 tokens, for every k from the shortest to the longest."""
    if not len(lengths):
        return []
    powers = np.frexp(np.maximum(lengths, 1))[1] - 1
    counts = np.bincount(powers)
    return [
        {"from": 1 << k, "to": (2 << k) - 1, "documents": int(counts[k])} for k in range(int(powers.min()), len(counts))
    ]


def places(store: Store, samples: int, length: int, seed: int) -> list[int]:
    """Where the stretches start: one in each of as many equal parts of the store, at random, in order."""
    room = max(0, len(store.tokens) - length)
    if samples < 1 or not len(store.tokens):
        return []
    draws = np.random.default_rng(seed).random(samples)
    return sorted(set(((np.arange(samples) + draws) * room / samples).astype(int).tolist()))


def sample(store: Store, tokenizer: Tokenizer, at: int, length: int) -> dict[str, Any]:
    """A stretch of tokens."""
    ids = store.tokens[at : at + length]
    return {
        "document": int(np.searchsorted(store.offsets, at, side="right")) - 1,
        "at": at,
        "text": tokenizer.decode(ids),
        "pieces": [tokenizer.piece(index) for index in ids.tolist()],
    }


def show(about: dict[str, Any], console: Console) -> None:
    """The description for people."""
    console.print(f"{about['split']} store {about['store']}", style="bold", highlight=False)
    facts = Table(show_header=False, box=None)
    facts.add_column(justify="right")
    for name in ("documents", "tokens", "bytes", "words", "sentences", "unknown"):
        facts.add_row(f"{about[name]:,}", name)
    facts.add_row(f"{about['bytes_per_token']:.2f}", "bytes per token")
    facts.add_row(f"{about['used']:,}", f"of {about['vocabulary']:,} ids occur")
    console.print(facts)

    console.print("tokens in a document", style="bold")
    lengths = Table(show_header=False, box=None)
    lengths.add_column(justify="right")
    lengths.add_column(justify="right")
    most = max((row["documents"] for row in about["lengths"]), default=1)
    for row in about["lengths"]:
        bar = "█" * -(-BAR * row["documents"] // most)
        lengths.add_row(f"{row['from']:,} to {row['to']:,}", f"{row['documents']:,}", bar)
    console.print(lengths)

    for example in about["samples"]:
        console.print(f"document {example['document']:,}, token {example['at']:,}", style="bold", highlight=False)
        console.print(Text(visible(example["text"])))
        console.print(Text("|").join(Text(visible(piece)) for piece in example["pieces"]), style="dim")


def visible(text: str) -> str:
    """The text on one line, without control characters."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
