"""The order in which a store is read: as shuffled blocks, or in lanes that go on where they stopped.

Batch n is a pure function of the store, n, the seed and the rows wanted, so that resuming is a seek and no result
depends on the number of hosts. A stream of N tokens has N - 1 *places*: place p holds token p and predicts token p +
1. Every reader of the stream visits every place of an epoch once, so that each token but the first is a target
exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from ctx_jax.contract import Batch, TokenStore, Vocabulary
from ctx_jax.data.store import SENTENCE, WORD

Numbers = TypeVar("Numbers", int, np.ndarray)

MASK = 2**64 - 1

ID_LIMIT = 2**31 - 2
"""Document ids start anew after so many documents, so that they fit int32."""


@dataclass(frozen=True)
class Blocks:
    """Windows of the packed stream, shuffled without replacement in training."""

    length: int = 512
    """Tokens in a row."""
    join_documents: bool = False
    """Whether attention may cross from one document to the next (GPT); the boundary tokens are predicted then, too."""
    stride: int | None = None
    """Tokens from one window to the next; None: the length. A smaller one gives each target a longer context: the first
    length - stride places of a window, scored by the window before, predict nothing."""

    def __post_init__(self) -> None:
        check_window(self.length, self.stride)

    def passes(self, store: TokenStore, batch_size: int) -> int:
        """Batches in a pass. Training goes on without a break: its batches may hold rows of two epochs."""
        return -(-windows(places(store), self.length, self.stride) // batch_size)

    def batch(self, store: TokenStore, n: int, rows: Sequence[int], *, batch_size: int, seed: int | None) -> Batch:
        """The stream fields of `contract.Batch`."""
        stride = self.stride or self.length
        count = windows(places(store), self.length, stride)
        if seed is not None and count < batch_size:
            raise too_short(store, batch_size, self.length, self.length + (batch_size - 1) * stride + 1)
        example = n * batch_size + np.asarray(rows, np.int64)
        epoch = np.zeros_like(example)
        if seed is not None:
            epoch, example = np.divmod(example, count)
            example = shuffled(example, count, seed, epoch)
        batch = stream_rows(
            store,
            start=example * stride,
            stop=np.where(example < count, places(store), 0),
            scored=np.where(example > 0, self.length - stride, 0),
            epoch=epoch,
            backward=np.zeros(len(example), bool),
            length=self.length,
            join_documents=self.join_documents,
        )
        return batch | {"example": example.astype(np.int32), "epoch": epoch.astype(np.int32)}


@dataclass(frozen=True)
class Lanes:
    """The stream in as many contiguous lanes as the batch has rows, each read in order: row b of batch n + 1 starts
    `stride` tokens after row b of batch n, for models with memory. After its end a lane starts anew as the next epoch.

    In a pass the lanes visit every place once; a lane's last window is padded. With `pairs` (XLNet: Yang et al. 2019,
    arXiv 1906.08237, section 2.5, and its data code) a window is

        [stride tokens of the lane | A SEP B SEP CLS]

    where A continues the lane up to a sentence start drawn at random, and B continues A (relation 0) or, with
    probability 0.5 or where A's part has no sentence start, is as many tokens from a sentence start elsewhere in the
    stream (relation 1). The tokens of A come again in the next window's first part, which is what its memory is
    followed by: windows overlap by design, and there are no `next_tokens`, since the prediction is of the tokens
    themselves. The ordered pass draws with seed 0. Deviation: the original lets B run to its sentence's end and then
    cuts the longer of both on the right; here A and B are cut to size at once, so that a true B always follows A
    without a gap.

    With `direction` "backward" the text is read from its end; with "both" so are the second half of the rows.
    """

    length: int = 512
    """Tokens in a row."""
    stride: int | None = None
    """Tokens from one window to the next; None: the length, or half of it with `pairs`. Places that the window before
    has scored predict nothing."""
    join_documents: bool = False
    """Whether attention may cross from one document to the next. If not, A ends within its document, A SEP B SEP CLS
    are one unit with the id of A's document (B is there to be compared with A), and what would go over the end of B's
    document is padding."""
    pairs: bool = False
    """Whether windows are XLNet's two segments."""
    direction: Literal["forward", "backward", "both"] = "forward"
    """Whether rows read the text forward or from its end."""

    def __post_init__(self) -> None:
        check_window(self.length, self.stride)
        if self.pairs and self.length - self.step < 5:
            raise ValueError(
                f"stride {self.step} leaves {self.length - self.step} of length {self.length} for A SEP B SEP CLS: "
                "choose half the length"
            )

    @property
    def step(self) -> int:
        """Tokens from one window to the next."""
        return self.stride or (self.length // 2 if self.pairs else self.length)

    def passes(self, store: TokenStore, batch_size: int) -> int:
        """Batches in a pass: windows in the longest lane."""
        lanes = self._lanes(batch_size)
        if self.pairs:
            return -(-len(store.tokens) // lanes // self.step)
        return windows(-(-places(store) // lanes), self.length, self.stride)

    def batch(self, store: TokenStore, n: int, rows: Sequence[int], *, batch_size: int, seed: int | None) -> Batch:
        """The stream fields of `contract.Batch`, or with `pairs` those of two segments; `reversed` unless forward."""
        lanes = self._lanes(batch_size)
        if seed is not None and places(store) < lanes * self.length:
            raise too_short(store, batch_size, self.length, lanes * self.length + 1)
        row = np.asarray(rows, np.int64)
        lane = row % lanes
        backward = (row >= lanes) if self.direction == "both" else np.full(len(row), self.direction == "backward")
        count = self.passes(store, batch_size)
        pass_number, window = (0, n) if seed is None else divmod(n, count)
        epoch = np.full_like(row, pass_number)
        example = row * count + window
        if self.pairs:
            start = lane * len(store.tokens) // lanes + window * self.step
            batch = self._pair_rows(store, start, epoch, example, backward, seed or 0)
        else:
            first = lane * places(store) // lanes
            batch = stream_rows(
                store,
                start=first + window * self.step,
                stop=(lane + 1) * places(store) // lanes,
                scored=np.full_like(row, self.length - self.step if window else 0),
                epoch=epoch,
                backward=backward,
                length=self.length,
                join_documents=self.join_documents,
            )
        if self.direction != "forward":
            batch["reversed"] = backward
        return batch | {"example": example.astype(np.int32), "epoch": epoch.astype(np.int32)}

    def _lanes(self, batch_size: int) -> int:
        if self.direction != "both":
            return batch_size
        if batch_size % 2:
            raise ValueError(f"batch_size {batch_size} has no halves for direction 'both': choose an even one")
        return batch_size // 2

    def _pair_rows(
        self,
        store: TokenStore,
        start: np.ndarray,
        epoch: np.ndarray,
        example: np.ndarray,
        backward: np.ndarray,
        seed: int,
    ) -> Batch:
        """XLNet's windows at the stream's tokens `start` [R]; a lane's last window reads on past its end, round the
        stream's."""
        size, reused, text = len(store.tokens), self.step, self.length - self.step - 3
        if size < (needed := max(2 * self.length, self.length + 2 * text + 1)):
            raise too_short(store, 1, self.length, needed)
        chance = uniform(seed, epoch, example, np.arange(3)[:, None])

        # Where A is cut: at a sentence start before the end of its document.
        ahead = (start[:, None] + reused + np.arange(text)) % size
        if self.join_documents:
            limit = np.full(len(start), text)
        else:
            documents = read(store, ahead, backward).documents
            limit = np.logical_and.accumulate(documents == documents[:, :1], axis=1).sum(1)
        cuts = sentence_starts(store, ahead, backward) & (np.arange(text) > 0) & (np.arange(text) < limit[:, None])
        choices = cuts.sum(1)
        chosen = np.floor(chance[0] * choices) + 1
        cut = np.where(
            choices > 0,
            np.argmax(np.cumsum(cuts, axis=1) == chosen[:, None], axis=1),
            np.minimum(limit, text - text // 2),
        )[:, None]

        # Where a false B starts: at the last sentence start before a random place, away from this window.
        elsewhere = start + self.length + text + np.floor(chance[1] * (size - self.length - 2 * text)).astype(np.int64)
        back = sentence_starts(store, (elsewhere[:, None] - np.arange(text)) % size, backward)
        elsewhere -= np.argmax(back, axis=1)  # 0 where there is none
        false = (chance[2] < 0.5) | (choices == 0)

        column = np.arange(self.length)
        b_column = reused + cut + 1
        in_b = (column >= b_column) & (column < self.length - 2)
        separator = (column == b_column - 1) | (column == self.length - 2)
        source = start[:, None] + column - (column >= b_column)
        source = np.where(in_b & false[:, None], elsewhere[:, None] + column - b_column, source)
        found = read(store, source % size, backward)
        begins = found.words | (column == b_column)
        tokens = np.where(separator, store.vocabulary.separator, found.tokens)
        tokens[:, -1] = store.vocabulary.classification
        if self.join_documents:
            documents = document_ids(np.zeros_like(source), epoch[:, None], store)
        else:
            # A wrap round the stream's end is the next pass; the pair has the id of the document in which A begins.
            documents = document_ids(found.documents, epoch[:, None] + source // size, store)
            documents[:, reused:] = documents[:, reused : reused + 1]
            b_document = np.take_along_axis(found.documents, b_column, axis=1)
            documents[in_b & (found.documents != b_document)] = 0
        batch = row_fields(tokens, documents, begins, store.vocabulary)
        segments = np.where(column == self.length - 1, 2, column >= b_column)
        return batch | {"segments": segments.astype(np.int32), "relation": false.astype(np.int32)}


class Found(NamedTuple):
    """What the store holds at some places, [R, T] each."""

    tokens: np.ndarray
    words: np.ndarray
    """bool: a word begins here, in the direction of reading."""
    documents: np.ndarray
    """Numbers from 0."""


def read(store: TokenStore, place: np.ndarray, backward: np.ndarray) -> Found:
    """place [R, T] in the direction of reading; backward [R]: place 0 is the stream's last token."""
    index, border = located(store, place, backward)
    return Found(
        tokens=store.tokens[index].astype(np.int32),
        words=store.flags[border] & WORD > 0,
        documents=np.searchsorted(store.offsets, index, side="right") - 1,
    )


def sentence_starts(store: TokenStore, place: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """place [R, T] -> bool: a segment may begin here, in the direction of reading."""
    _, border = located(store, place, backward)
    # A document's first sentence begins with its begin token: no cut may part the two.
    after_begin = store.tokens[np.maximum(border - 1, 0)] == store.vocabulary.begin
    return (store.flags[border] & SENTENCE > 0) & ~after_begin | (store.tokens[border] == store.vocabulary.begin)


def located(store: TokenStore, place: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a place's token is in the store, and where the flags of the border before it are: read backwards, a word
    begins after the token with which it begins forwards."""
    last = len(store.tokens) - 1
    index = np.where(backward[:, None], last - place, place)
    return index, np.minimum(index + backward[:, None], last)


def stream_rows(
    store: TokenStore,
    *,
    start: np.ndarray,
    stop: np.ndarray,
    scored: np.ndarray,
    epoch: np.ndarray,
    backward: np.ndarray,
    length: int,
    join_documents: bool,
) -> Batch:
    """Rows of `length` places from `start` [R] on; those from `stop` [R] on are padding, the first `scored` [R] no
    targets."""
    column = np.arange(length)
    place = np.minimum(start[:, None] + np.arange(length + 1), places(store))
    found = read(store, place, backward)
    numbers = np.zeros_like(found.documents) if join_documents else found.documents
    documents = document_ids(numbers, epoch[:, None], store)
    real = start[:, None] + column < stop[:, None]
    tokens = np.where(real, found.tokens[:, :-1], store.vocabulary.pad)
    batch = row_fields(tokens, documents[:, :-1] * real, found.words[:, :-1], store.vocabulary)
    return batch | {
        "next_tokens": np.where(real, found.tokens[:, 1:], store.vocabulary.pad),
        "next_documents": documents[:, 1:] * (real & (column >= scored[:, None])),
    }


def row_fields(tokens: np.ndarray, documents: np.ndarray, begins: np.ndarray, vocabulary: Vocabulary) -> Batch:
    """What every row has, from its tokens, packing ids and word starts, [R, T] each."""
    special = np.zeros(vocabulary.size, bool)
    special[list(vocabulary.special)] = True
    text = ~special[tokens] & (documents > 0)
    first = text.copy()
    first[:, 1:] &= ~text[:, :-1]
    return {
        "tokens": np.where(documents > 0, tokens, vocabulary.pad),
        "documents": documents,
        "positions": np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape),
        "words": np.cumsum((begins | first) & text, axis=1, dtype=np.int32) * text,
    }


def document_ids(documents: np.ndarray, epoch: np.ndarray, store: TokenStore) -> np.ndarray:
    """Packing ids: unique along a lane and across epochs, at least 1."""
    return ((epoch * (len(store.offsets) - 1) + documents) % ID_LIMIT + 1).astype(np.int32)


def places(store: TokenStore) -> int:
    """Tokens of the stream that have a next one; raises ValueError if there are none."""
    if len(store.tokens) < 2:
        raise ValueError("the text has no tokens: its split of the corpus is empty")
    return len(store.tokens) - 1


def windows(count: int, length: int, stride: int | None) -> int:
    """Windows that visit `count` places."""
    return 1 + max(0, -(-(count - length) // (stride or length)))


def check_window(length: int, stride: int | None) -> None:
    """Raises ValueError for a window that cannot be read."""
    if length < 2:
        raise ValueError(f"length {length} of a row is too short: choose 2 or more")
    if stride is not None and not 0 < stride <= length:
        raise ValueError(f"stride {stride} is not between 1 and length {length}: a larger one would leave out text")


def too_short(store: TokenStore, batch_size: int, length: int, needed: int) -> ValueError:
    """The error for a store that does not fill a batch."""
    return ValueError(
        f"the text has {len(store.tokens)} tokens, too few for {batch_size} rows of length {length}, "
        f"which need {needed}: give more text, or choose a smaller batch_size or length"
    )


def shuffled(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Where a permutation of range(size), one for each seed and epoch, sends `index` [R]: O(1) memory and time.

    A generalised Feistel network on pairs of numbers (left < a, right < b), walked along its cycles until inside
    (Black & Rogaway 2002, section 5).
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)

    def permuted(value: Any, key: Any) -> Any:
        left, right = value // b, value % b
        for _ in range(6):
            left = (left + scramble(key ^ right) % a) % a
            key = scramble(key)
            right = (right + scramble(key ^ left) % b) % b
            key = scramble(key)
        return left * b + right

    keys = draw(seed, epoch)
    if len(index) <= 4:  # each operation on an array costs as much as ten on a number
        values = []
        for value, key in zip(index.tolist(), keys.tolist(), strict=True):
            while (value := permuted(value, key)) >= size:
                pass
            values.append(value)
        return np.array(values, np.int64)
    value = permuted(index.astype(np.uint64), keys)
    while (outside := value >= size).any():
        value[outside] = permuted(value[outside], keys[outside])
    return value.astype(np.int64)


def draw(*counters: int | np.ndarray) -> np.ndarray:
    """Random uint64, a pure function of non-negative counters (broadcast against each other)."""
    state = np.zeros(1, np.uint64)
    for counter in counters:
        state = scramble(state ^ np.asarray(counter).astype(np.uint64))
    return state


def uniform(*counters: int | np.ndarray) -> np.ndarray:
    """Random float64 in [0, 1), like `draw`."""
    return (draw(*counters) >> 11) * 2.0**-53


def scramble(state: Numbers) -> Numbers:
    """SplitMix64 (Steele, Lea & Flood 2014): a bijection of the 64-bit numbers that mixes all bits; int or uint64."""
    state = state + 0x9E3779B97F4A7C15 & MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31
