"""Rows made of whole sentences: BERT's pairs and RoBERTa's formats, from plans that are built once per store."""

from __future__ import annotations

import itertools
import random
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np

from ctx_jax.contract import Batch, TokenStore
from ctx_jax.data.readers import row_fields, shuffled
from ctx_jax.data.store import SENTENCE, WORD


@dataclass(frozen=True)
class Pairs:
    """Two segments and their relation: [CLS] A [SEP] B [SEP] (Devlin et al. 2018, arXiv 1810.04805, appendix A.2, and
    its data code).

    Whole sentences of a document are gathered up to a target length and cut between two of them at random. With
    probability 0.5, or if there is only one, B is replaced by sentences of another document (relation 1), and the
    sentences that it replaces start the next pair; else B follows A (relation 0). A pair that is too long loses
    tokens of its longer segment (of equal ones, the second), each at the front or at the back.

    Relation "order" (ALBERT: Lan et al. 2019, arXiv 1909.11942, section 3.1): A and B always follow each other,
    swapped with probability 0.5 (relation 1); a sentence that has no neighbour left in its document is left out.
    """

    length: int = 128
    """Tokens in a row, special ones included."""
    unit: Literal["segment", "sentence"] = "segment"
    """Whether a segment is several sentences, up to the length, or one (RoBERTa's SENTENCE-PAIR, arXiv 1907.11692,
    section 4.2)."""
    relation: Literal["next", "order"] = "next"
    """What relation 1 is: B is from another document, or A and B are swapped."""
    short_probability: float = 0.1
    """How often, per document and copy, the target length is drawn from 2 up to the full one."""
    copies: int = 10
    """How many ways of cutting the store into pairs are used in turn, one an epoch."""
    separators: int = 1
    """Separators between A and B: 1 (BERT) or 2 (RoBERTa)."""

    def __post_init__(self) -> None:
        if self.length - 2 - self.separators < 2:
            raise ValueError(
                f"length {self.length} is too short for two segments: choose {4 + self.separators} or more"
            )
        if not 0 <= self.short_probability <= 1:
            raise ValueError(f"short_probability {self.short_probability} is not a probability: choose 0.1")
        if self.copies < 1 or self.separators not in (1, 2):
            raise ValueError(f"copies {self.copies} must be 1 or more, separators {self.separators} 1 or 2")

    def passes(self, store: TokenStore, batch_size: int) -> int:
        """Batches in the ordered pass; an epoch of training has about as many, and its batches may hold rows of two."""
        return -(-pair_count(store, self, 0, 0) // batch_size)

    def batch(self, store: TokenStore, n: int, rows: Sequence[int], *, batch_size: int, seed: int | None) -> Batch:
        """The fields of `contract.Batch` with `segments` and `relation`. Epoch e reads copy e mod `copies`, shuffled;
        the ordered pass reads copy 0 of seed 0."""
        row = n * batch_size + np.asarray(rows, np.int64)
        if seed is None:
            plan = pair_plan(store, self, 0, 0)
            pairs = plan[np.minimum(row, len(plan) - 1)]
            return self._rows(store, pairs, row < len(plan)) | {
                "example": row.astype(np.int32),
                "epoch": np.zeros(len(row), np.int32),
            }
        if (count := pair_count(store, self, seed, 0)) < batch_size:
            raise too_few(count, "pairs", batch_size, self.length)
        epoch, start = self._epoch(store, n * batch_size, seed)
        epochs, examples = np.zeros_like(row), np.zeros_like(row)
        pairs = np.zeros(len(row), PAIR)
        while start <= row.max():
            plan = pair_plan(store, self, seed, epoch % self.copies)
            inside = (row >= start) & (row < start + len(plan))
            epochs[inside] = epoch
            examples[inside] = shuffled(row[inside] - start, len(plan), seed, epochs[inside])
            pairs[inside] = plan[examples[inside]]
            epoch, start = epoch + 1, start + len(plan)
        return self._rows(store, pairs, np.ones(len(row), bool)) | {
            "example": examples.astype(np.int32),
            "epoch": epochs.astype(np.int32),
        }

    def _epoch(self, store: TokenStore, row: int, seed: int) -> tuple[int, int]:
        """The epoch of a row of the endless order, and the row with which it starts: copies differ in size."""
        start = 0
        for copy in range(self.copies):
            count = pair_count(store, self, seed, copy)
            if row < start + count:
                return copy, start
            start += count
        rounds, rest = divmod(row, start)
        epoch, within = self._epoch(store, rest, seed)
        return rounds * self.copies + epoch, rounds * start + within

    def _rows(self, store: TokenStore, pairs: np.ndarray, real: np.ndarray) -> Batch:
        a_length, b_length = pairs["a_length"][:, None], pairs["b_length"][:, None]
        column = np.arange(self.length)
        b_column = 1 + a_length + self.separators
        in_a = (column >= 1) & (column <= a_length)
        in_b = (column >= b_column) & (column < b_column + b_length)
        source = np.where(in_a, pairs["a"][:, None] + column - 1, pairs["b"][:, None] + column - b_column)
        source = np.where(in_a | in_b, source, 0)
        tokens = np.where(in_a | in_b, store.tokens[source].astype(np.int32), store.vocabulary.separator)
        tokens[:, 0] = store.vocabulary.classification
        filled = (column <= b_column + b_length) & real[:, None]
        batch = row_fields(tokens, filled.astype(np.int32), store.flags[source] & WORD > 0, store.vocabulary)
        return batch | {
            "segments": ((column >= b_column) & filled).astype(np.int32),
            "relation": pairs["relation"] * real.astype(np.int32),
        }


@dataclass(frozen=True)
class Sentences:
    """Rows filled with whole consecutive sentences, [CLS] s1 s2 ... [SEP] (RoBERTa: Liu et al. 2019, arXiv
    1907.11692, section 4.2, FULL-SENTENCES and DOC-SENTENCES); shuffled without replacement in training.

    A sentence longer than a row is cut into rows. Deviation: where the paper enlarges the batch to make up for the
    shorter rows of DOC-SENTENCES, the batch keeps its size.
    """

    length: int = 512
    """Tokens in a row, special ones included."""
    cross_documents: bool = True
    """Whether a row goes on with the next document after one separator more (FULL-SENTENCES), attending across, or ends
    with its document (DOC-SENTENCES)."""

    def __post_init__(self) -> None:
        if self.length < 3:
            raise ValueError(f"length {self.length} is too short for [CLS] text [SEP]: choose 3 or more")

    def passes(self, store: TokenStore, batch_size: int) -> int:
        """Batches in a pass. Training goes on without a break: its batches may hold rows of two epochs."""
        return -(-len(sentence_plan(store, self)) // batch_size)

    def batch(self, store: TokenStore, n: int, rows: Sequence[int], *, batch_size: int, seed: int | None) -> Batch:
        """The fields of `contract.Batch` that every reader gives."""
        plan = sentence_plan(store, self)
        if seed is not None and len(plan) < batch_size:
            raise too_few(len(plan), "rows", batch_size, self.length)
        example = n * batch_size + np.asarray(rows, np.int64)
        epoch = np.zeros_like(example)
        if seed is not None:
            epoch, example = np.divmod(example, len(plan))
            example = shuffled(example, len(plan), seed, epoch)
        vocabulary = store.vocabulary
        tokens = np.full((len(example), self.length), vocabulary.pad, np.int32)
        documents = np.zeros_like(tokens)
        begins = np.zeros(tokens.shape, bool)
        for row, index in enumerate(example.tolist()):
            if index >= len(plan):
                continue
            span = store.tokens[slice(*plan[index])]
            kept = (span != vocabulary.begin) | (vocabulary.begin == vocabulary.end)
            text = np.where(span == vocabulary.end, vocabulary.separator, span)[kept]
            last = len(text) + 1
            tokens[row, 0], tokens[row, last] = vocabulary.classification, vocabulary.separator
            tokens[row, 1:last] = text
            documents[row, : last + 1] = 1
            begins[row, 1:last] = store.flags[slice(*plan[index])][kept] & WORD > 0
        batch = row_fields(tokens, documents, begins, vocabulary)
        return batch | {
            "example": example.astype(np.int32),
            "epoch": epoch.astype(np.int32),
        }


PAIR = np.dtype(
    [("a", np.int64), ("a_length", np.int32), ("b", np.int64), ("b_length", np.int32), ("relation", np.int8)]
)
"""A pair in a plan: where its segments start in the store, their lengths, their relation."""


class SentenceTable(NamedTuple):
    """The sentences of a store, in order; those of a document follow each other without a gap."""

    start: np.ndarray
    """[S] int64: the first token."""
    end: np.ndarray
    """[S] int64: one past the last token."""
    document: np.ndarray
    """[S] int64: the number of the document."""


P = ParamSpec("P")
T = TypeVar("T")


def once(cached: Callable[P, T]) -> Callable[P, T]:
    """A cached function that several threads may call: the first makes the value, the others wait for it."""
    lock = threading.RLock()

    @wraps(cached)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return cached(*args, **kwargs)

    return locked


@once
@lru_cache(maxsize=4)
def sentence_table(store: TokenStore) -> SentenceTable:
    """Raises ValueError if the store holds no sentence."""
    start = np.flatnonzero(store.flags & SENTENCE)
    if not len(start):
        raise ValueError("the store holds no sentence: its split of the corpus is empty")
    document = np.searchsorted(store.offsets, start, side="right") - 1
    end = store.offsets[document + 1] - (store.vocabulary.begin != store.vocabulary.end)
    end[:-1] = np.minimum(end[:-1], start[1:])
    return SentenceTable(start, end, document)


@once
@lru_cache(maxsize=4)
def pair_plan(store: TokenStore, reader: Pairs, seed: int, copy: int) -> np.ndarray:
    """The pairs of a copy, [E] of PAIR, in the store's order."""
    start, end, document = sentence_table(store)
    firsts = np.flatnonzero(np.diff(document, prepend=-1)).tolist()
    bounds = [*firsts, len(start)]
    order = reader.relation == "order"
    if len(firsts) < 2 and not order:
        raise ValueError(
            "a false second segment comes from another document and the store has one: give several "
            "documents, or cut the text into some (--data.corpus.document), or choose --data.reader.relation order"
        )
    room = reader.length - 2 - reader.separators
    rng = random.Random(f"{seed} {copy}")
    # Per pair: tokens [a, a_end) and [b, b_end), relation. Of a false B, first its sentence and the tokens wanted.
    pairs: list[tuple[int, int, int, int, bool]] = []
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        target = rng.randint(2, room) if rng.random() < reader.short_probability else room
        edges = [start[low].item(), *end[low:high].tolist()]
        count, i = high - low, 0
        while i < count - order:
            least = min(i + 1 + order, count)
            if reader.unit == "sentence":
                j = min(i + 2, count)
            else:
                j = min(bisect_left(edges, edges[i] + target, least), count)
            middle = i + 1 if j - i == 1 else rng.randint(i + 1, j - 1)
            relation = j - i == 1 or rng.random() < 0.5
            if relation and not order:
                other = int(rng.random() * (len(firsts) - 1))
                other += other >= number
                b = bounds[other] + int(rng.random() * (bounds[other + 1] - bounds[other]))
                wanted = 1 if reader.unit == "sentence" else max(1, edges[i] + target - edges[middle])
                pairs.append((edges[i], edges[middle], b, wanted, True))
                i = middle
            else:
                pairs.append((edges[i], edges[middle], edges[middle], edges[j], relation))
                i = j
    table = np.array(pairs, np.int64).reshape(-1, 5)
    a, a_end, b, b_end, relation = table.T
    if not order:
        false = relation > 0
        sentence = b[false]
        last = np.searchsorted(end, start[sentence] + b_end[false])
        final = np.searchsorted(document, document[sentence], side="right") - 1
        b[false], b_end[false] = start[sentence], end[np.minimum(last, final)]
    a_length, b_length = truncated(a_end - a, b_end - b, room)
    a = a + front(rng, a_end - a - a_length)
    b = b + front(rng, b_end - b - b_length)
    swapped = order & (relation > 0)
    plan = np.zeros(len(table), PAIR)
    plan["a"], plan["b"] = np.where(swapped, b, a), np.where(swapped, a, b)
    plan["a_length"], plan["b_length"] = np.where(swapped, b_length, a_length), np.where(swapped, a_length, b_length)
    plan["relation"] = relation
    return plan


@once
@lru_cache(maxsize=256)
def pair_count(store: TokenStore, reader: Pairs, seed: int, copy: int) -> int:
    """The size of a plan, which outlives the plan itself."""
    return len(pair_plan(store, reader, seed, copy))


def truncated(a: np.ndarray, b: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths after tokens were taken off the longer segment (of equal ones, the second) until both fit `room`."""
    return np.minimum(a, np.maximum(room - b, room - room // 2)), np.minimum(b, np.maximum(room - a, room // 2))


def front(rng: random.Random, removed: np.ndarray) -> np.ndarray:
    """How many of the removed tokens go at the front: each with probability 0.5."""
    return np.array([rng.getrandbits(count).bit_count() for count in removed.tolist()], np.int64)


@once
@lru_cache(maxsize=4)
def sentence_plan(store: TokenStore, reader: Sentences) -> np.ndarray:
    """[rows, 2] int64: the tokens that each row spans, in order."""
    start, end, document = sentence_table(store)
    room = reader.length - 2
    parts = -(-(end - start) // room)
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    start = np.repeat(start, parts) + part * room
    end, document = np.minimum(np.repeat(end, parts), start + room), np.repeat(document, parts)
    borders = np.diff(document, prepend=document[0])
    total = np.concatenate([[0], np.cumsum(end - start + borders)])
    following = np.searchsorted(total, total[:-1] + borders + room, side="right") - 1
    if not reader.cross_documents:
        following = np.minimum(following, np.searchsorted(document, document, side="right"))
    firsts, at, steps = [], 0, following.tolist()
    while at < len(steps):
        firsts.append(at)
        at = steps[at]
    return np.stack([start[firsts], end[following[firsts] - 1]], axis=1)


def too_few(count: int, what: str, batch_size: int, length: int) -> ValueError:
    """The error for a store that does not fill a batch."""
    return ValueError(
        f"the text makes {count} {what} of length {length}, too few for a batch of {batch_size}: "
        "give more text, or choose a smaller batch_size or length"
    )
