"""Baselines by counting: what a language model must beat, fitted on the same tokens and scored on the same targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ctx_jax.contract import Batch


def transitions(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(previous, targets), [N] each: what a batch of a stream reader predicts, as the causal objective counts it."""
    documents = np.asarray(batch["documents"])
    predicted = (documents != 0) & (np.asarray(batch["next_documents"]) == documents)
    return np.asarray(batch["tokens"])[predicted], np.asarray(batch["next_tokens"])[predicted]


@dataclass(frozen=True, eq=False)
class Unigram:
    """Add-one smoothed frequencies, P(w) = (c(w) + 1) / (N + V)."""

    probabilities: np.ndarray
    """[V] float64."""

    @classmethod
    def fit(cls, tokens: np.ndarray, vocabulary_size: int) -> Unigram:
        """`tokens` of any shape, ids below `vocabulary_size` (ValueError otherwise)."""
        counts = np.bincount(_ids(tokens, vocabulary_size), minlength=vocabulary_size)
        return cls((counts + 1) / (counts.sum() + vocabulary_size))

    def nll(self, targets: np.ndarray) -> np.ndarray:
        """Negative log-likelihood in nats of each target, in the shape of `targets`."""
        return -np.log(self.probabilities[_ids(targets, self.probabilities.size)]).reshape(np.shape(targets))

    @property
    def best(self) -> int:
        """The most frequent id: what a unigram answers everywhere, for accuracy."""
        return int(self.probabilities.argmax())


@dataclass(frozen=True, eq=False)
class Bigram:
    """Witten-Bell smoothing (Witten and Bell 1991, method C; Chen and Goodman 1998, section 2.4), with no free weight:

        P(w | v) = (c(v, w) + k(v) P(w)) / (c(v) + k(v))

    with k(v) the number of different tokens seen after v and P(w) the `Unigram` of the same targets, which stands
    alone where v was never seen. Only the pairs that occur are kept.
    """

    unigram: Unigram
    pairs: np.ndarray
    """[pairs + 1] int64, sorted: v V + w of each pair that occurs, and an upper end, V V."""
    counts: np.ndarray
    """[pairs + 1] int64: c(v, w); 0 for the upper end."""
    totals: np.ndarray
    """[V] int64: c(v)."""
    kinds: np.ndarray
    """[V] int64: k(v)."""

    @classmethod
    def fit(cls, previous: np.ndarray, targets: np.ndarray, vocabulary_size: int) -> Bigram:
        """Counts each target after the token that stands before it; both of one shape, ids below `vocabulary_size`."""
        previous, targets = _ids(previous, vocabulary_size), _ids(targets, vocabulary_size)
        pairs, counts = np.unique(previous * vocabulary_size + targets, return_counts=True)
        return cls(
            unigram=Unigram.fit(targets, vocabulary_size),
            pairs=np.append(pairs, vocabulary_size**2),
            counts=np.append(counts, 0),
            totals=np.bincount(previous, minlength=vocabulary_size),
            kinds=np.bincount(pairs // vocabulary_size, minlength=vocabulary_size),
        )

    def nll(self, previous: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Negative log-likelihood in nats of each target after its predecessor, in the shape of `targets`."""
        size = self.totals.size
        v, w = _ids(previous, size), _ids(targets, size)
        place = np.searchsorted(self.pairs, v * size + w)
        count = np.where(self.pairs[place] == v * size + w, self.counts[place], 0)
        unigram, total, kinds = self.unigram.probabilities[w], self.totals[v], self.kinds[v]
        probability = np.where(total > 0, (count + kinds * unigram) / np.maximum(total + kinds, 1), unigram)
        return -np.log(probability).reshape(np.shape(targets))


def _ids(tokens: np.ndarray, vocabulary_size: int) -> np.ndarray:
    ids = np.asarray(tokens).reshape(-1).astype(np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary_size):
        bad = ids.max() if ids.max() >= vocabulary_size else ids.min()
        raise ValueError(f"token {bad} is outside the vocabulary of {vocabulary_size}: use the tokenizer's size")
    return ids
