"""Our batches from the random choices that the original data code of BERT and XLNet made (`record_pretraining`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.data import pairs
from ctx_jax.data.pairs import Pairs
from ctx_jax.data.readers import row_fields
from ctx_jax.data.store import SENTENCE, WORD
from ctx_jax.objectives import masked, permutation
from ctx_jax.objectives.masked import Masked
from ctx_jax.objectives.permutation import Permutation

HERE = Path(__file__).parent / "tensorflow"
Arrays = dict[str, np.ndarray]
PIECES = (HERE / "bert" / "vocab.txt").read_text().split()
BERT = Vocabulary(len(PIECES), pad=0, unknown=1, begin=2, end=3, classification=2, separator=3, mask=4)
XLNET = Vocabulary(43, pad=5, unknown=0, begin=1, end=7, classification=3, separator=4, mask=6)
READER = Pairs(length=32, short_probability=0.3)
MASK, RANDOM, KEPT = 0, int(0.85 * 2**32), int(0.95 * 2**32)
"""Noise that makes a position show each."""


def load_record(name: str) -> Arrays:
    with np.load(HERE / f"{name}.npz") as file:
        return dict(file)


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@dataclass(frozen=True, eq=False)
class Store:
    """The sentences of a record as a `contract.TokenStore`."""

    vocabulary: Vocabulary
    tokens: np.ndarray
    flags: np.ndarray
    offsets: np.ndarray
    document_bytes: np.ndarray

    @classmethod
    def of(cls, record: Arrays) -> Store:
        ends = np.cumsum(record["sentence_lengths"])
        sentences = np.split(record["sentence_ids"], ends[:-1])
        tokens: list[int] = []
        flags: list[int] = []
        offsets = [0]
        for document in range(record["sentence_documents"].max() + 1):
            tokens, flags = [*tokens, BERT.begin], [*flags, 0]
            for sentence, number in zip(sentences, record["sentence_documents"], strict=True):
                if number == document:
                    words = [0 if PIECES[token].startswith("##") else WORD for token in sentence]
                    tokens, flags = [*tokens, *sentence], [*flags, words[0] | SENTENCE, *words[1:]]
            tokens, flags = [*tokens, BERT.end], [*flags, 0]
            offsets.append(len(tokens))
        return cls(
            BERT, np.array(tokens, np.uint16), np.array(flags, np.uint8), np.array(offsets), np.diff(np.array(offsets))
        )


class Told:
    """In place of `random.Random` in `pair_plan`: the original's choices, by what each of our draws means."""

    def __init__(self, documents: list[np.ndarray], sizes: list[int], short: float) -> None:
        self.answers: list[float | tuple[int, int]] = []
        self.fronts: list[list[tuple[int, int]]] = [[], []]
        for number, draws in enumerate(documents):
            rows = iter(draws)
            self.answers.append(chance := next(rows)[1])
            if chance < short:
                self.answers.append(self.place(next(rows)))
            for row in rows:
                self.pair(row, rows, number, sizes)
        self.rest = iter(self.answers)
        self.cuts = iter([*self.fronts[0], *self.fronts[1]])

    @staticmethod
    def place(row: np.ndarray) -> tuple[int, int]:
        """What `randint` gives, as its place from the first on, and how many there are."""
        _, low, high, value, _ = row.astype(int)
        return value - low, high - low + 1

    def pair(self, row: np.ndarray, rows: Iterator[np.ndarray], number: int, sizes: list[int]) -> None:
        """A, whether B is another's and whose, and where both were cut."""
        if row[0] == 1 and row[1] == 1:
            self.answers.append(self.place(row))
            self.answers.append((row := next(rows))[1])
            row = next(rows)
        if row[0] == 1:
            while (other := int(row[3])) == number:
                row = next(rows)
            (sentence, count), row = self.place(next(rows)), next(rows)
            assert count == sizes[other]
            self.answers.append((other - (other > number) + 0.5) / (len(sizes) - 1))
            self.answers.append((sentence + 0.5) / count)
        kind, *cut = row.astype(int)
        assert kind == 2
        self.fronts[0].append((cut[0], cut[1]))
        self.fronts[1].append((cut[2], cut[3]))

    def random(self) -> float:
        answer = next(self.rest)
        assert isinstance(answer, float)
        return answer

    def randint(self, low: int, high: int) -> int:
        answer = next(self.rest)
        assert isinstance(answer, tuple) and answer[1] == high - low + 1
        return low + answer[0]

    def getrandbits(self, count: int) -> int:
        front, removed = next(self.cuts)
        assert count == removed
        return (1 << front) - 1


def bert_rows(record: Arrays) -> Batch:
    """What our reader of pairs gives of the record's text, for all its instances."""
    counts, sizes = record["counts"], np.bincount(record["sentence_documents"]).tolist()
    draws = np.split(record["draws"], np.cumsum(counts[:, 1])[:-1])
    found = []
    for start in range(0, len(counts), len(sizes)):  # each copy of the text
        told = Told(draws[start : start + len(sizes)], sizes, READER.short_probability)
        count = int(counts[start : start + len(sizes), 0].sum())
        with replaced(pairs, random=SimpleNamespace(Random=lambda seed, told=told: told)):
            found.append(READER.batch(Store.of(record), 0, range(count), batch_size=count, seed=None))
        assert next(told.rest, None) is None and next(told.cuts, None) is None
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


def bert_prepared(record: Arrays, whole_words: bool = False) -> Batch:
    """The same, corrupted."""
    batch = bert_rows(record)
    rows, length = record["input_ids"].shape
    noise = np.zeros((rows, 4, length), np.uint32)
    order, _, kinds, others = np.moveaxis(noise, 1, 0)
    shown, own = record["input_ids"], record["original_ids"]
    for row in range(rows):
        places = record["order"][row][record["order"][row] >= 0]
        candidates = batch["words"][row, places] - 1 if whole_words else places
        order[row, candidates] = 2 * np.arange(len(places))
    kinds[:] = np.where(shown == BERT.mask, MASK, np.where(shown == own, KEPT, RANDOM))
    others[:] = shown
    objective = Masked(max_predictions=5, whole_words=whole_words, relation=1.0)
    with replaced(masked, row_noise=lambda keys, shape: noise):
        return jax.tree.map(np.asarray, objective.prepare(batch, jax.random.split(jax.random.key(0), rows), BERT))


def xlnet_prepared(record: Arrays, number: int) -> Batch:
    """A batch of the record as a reader gives it, permuted."""
    tokens = record["input_k"][number].astype(np.int32)
    rows, length = tokens.shape
    size = length // 2
    starts = (tokens % 3 != 0) | (tokens < 9)  # as in `record_pretraining.Pieces`
    batch = row_fields(tokens, np.ones_like(tokens), starts, XLNET) | {
        "segments": record["seg_id"][number],
        "reversed": np.arange(rows) >= rows // 2,
        "example": np.arange(rows),
    }
    objective = Permutation(num_predict=record["target"].shape[-1], perm_size=size)
    targets = record["input_q"][number].reshape(rows, 2, size)
    order = np.argsort(record["permutation"][number].reshape(rows, 2, size), axis=-1)

    def noise(keys: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
        middle = np.zeros((rows, 2, shape[-1] - 2 * size))
        return np.concatenate([order, middle, targets], axis=-1).astype(np.uint32)

    def choose(self: Any, noise: jax.Array, *_: Any) -> jax.Array:
        return noise[-size:] > 0

    with replaced(permutation, row_noise=noise), replaced(Permutation, _choose=choose):
        return jax.tree.map(np.asarray, objective.prepare(batch, jax.random.split(jax.random.key(0), rows), XLNET))
