"""Masked language modelling, with next-sentence or sentence-order prediction beside it.

BERT (Devlin et al. 2018, arXiv 1810.04805, section 3.1 and appendix A.1); dynamic and static masking: RoBERTa (Liu et
al. 2019, arXiv 1907.11692, section 4.1); n-grams and sentence order: ALBERT (Lan et al. 2020, arXiv 1909.11942,
sections 3.1 and 4.1); spans: SpanBERT (Joshi et al. 2020, arXiv 1907.10529, section 3.1).

Deviations: RoBERTa's code masks floor(0.15 n + U) positions and may hit <s> and </s>: here BERT's count and never a
special token. SpanBERT replaces a span as a whole: here each piece is drawn for itself. Neither n-grams nor spans run
over a special token, and one that would overshoot the count is shortened to the words that fit (as ALBERT's code does).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Batch, LossOutput, Reader, TokenCounts, Variables, Vocabulary
from ctx_jax.objectives import (
    LAST,
    Penalized,
    place_targets,
    predict,
    require,
    row_noise,
    sample,
    sample_lengths,
    token_metrics,
    uniform,
    validate,
)

NGRAMS = (1.0, 1 / 2, 1 / 3)
"""`Masked.spans` of ALBERT, equation 1: p(n) proportional to 1/n, up to 3."""
GEOMETRIC = tuple(0.2 * 0.8**n for n in range(10))
"""`Masked.spans` of SpanBERT: geometric with p = 0.2, clipped at 10; mean 3.8."""


@dataclass(frozen=True)
class Masked(Penalized):
    """Some positions are corrupted and predicted; `relation` adds the classification of sentence pairs."""

    rate: float = 0.15
    """Share of a row's positions, special tokens counted, that is predicted."""
    max_predictions: int = 76
    """At most so many positions in a row (BERT: 20 at length 128, 76 at 512)."""
    mask: float = 0.8
    """Share of the predicted positions that show the mask token."""
    random: float = 0.1
    """Share of the predicted positions that show a random token; the rest show their own."""
    whole_words: bool = False
    """Choose whole words: all pieces of one or none."""
    spans: tuple[float, ...] = (1.0,)
    """Relative frequencies of spans of 1, 2, ... words (pieces without whole_words): NGRAMS, GEOMETRIC."""
    rarity: float = 0.0
    """r: a position is drawn with probability proportional to count^-r, the count that of its token in the text that is
    read, held out or not (DistilBERT: 0.7); 0 = each is as likely as another."""
    copies: int | None = None
    """Different corruptions of an example before they repeat (static masking); None = a fresh one at each visit."""
    relation: float = 0.0
    """Weight of next-sentence or sentence-order prediction (the reader draws the pairs); 0 leaves it out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(f"rate {self.rate} is no share of the positions: choose one above 0 and up to 1")
        if self.max_predictions < 1:
            raise ValueError(f"max_predictions {self.max_predictions} predicts nothing: choose 1 or more")
        if self.mask < 0.0 or self.random < 0.0 or self.mask + self.random > 1.0:
            raise ValueError(
                f"mask {self.mask} and random {self.random} are no shares: choose two that add up to at most 1"
            )
        if self.relation < 0.0:
            raise ValueError(f"relation {self.relation} rewards errors: choose 0 or more")
        if not 0.0 <= self.rarity < math.inf:
            raise ValueError(f"rarity {self.rarity} is no such exponent: choose 0 or more")
        if self.rarity and self.groups:
            raise ValueError(
                f"rarity {self.rarity} is of single pieces: choose no whole_words and no spans, or rarity 0"
            )
        validate(self.spans, self.copies)

    @property
    def groups(self) -> bool:
        """Whether what is chosen is more than single pieces: words, or spans."""
        return self.whole_words or len(self.spans) > 1

    @property
    def in_loader(self) -> bool:
        return self.groups or self.rarity > 0

    def counts(self, length: int) -> np.ndarray:
        """[length + 1]: predictions in a row of n = 0, 1, ... positions: min(cap, max(1, round(rate n))), 0 for none.

        The rounding is Python's, of the float64 product: half to even, as in BERT's code under Python 3.
        """
        counts = [min(self.max_predictions, max(1, round(self.rate * n))) for n in range(1, length + 1)]
        return np.array([0, *counts], np.int32)

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """For the relation of two segments: a reader that draws them, and a head of two classes."""
        yield from super().requirements(model, reader)
        if self.relation and not hasattr(reader, "relation"):
            yield f"objective.relation {self.relation} needs pairs of segments: choose the reader Pairs, or relation 0"
        if self.relation and getattr(model, "classes", None) != 2:
            yield f"objective.relation {self.relation} needs model.classes 2, not {getattr(model, 'classes', None)}"

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        """Corrupts `tokens` and adds `target_positions`, `targets`, `target_weights`, each [B, K] with the K of a full
        row. Raises ValueError where `relation` is wanted and the reader gives none, and where the tokenizer has no
        mask, so that its end stands for one."""
        if self.mask and vocabulary.mask == vocabulary.end:
            raise ValueError(f"objective.mask {self.mask} needs a tokenizer that has a mask: choose one, or mask 0")
        if self.relation:
            require(batch, "relation", self, "choose a reader of pairs or set relation to 0")
        tokens, words, documents = (jnp.asarray(batch[name]) for name in ("tokens", "words", "documents"))
        counts = self.counts(tokens.shape[1])
        count = jnp.asarray(counts)[(documents > 0).sum(-1)]
        order, lengths, kinds, others = jnp.moveaxis(row_noise(keys, (4, tokens.shape[1])), 1, 0)
        if self.rarity:
            order = jax.vmap(partial(favour_rare, exponent=self.rarity))(order, jnp.asarray(batch["counts"]))
        if self.groups:
            units = words if self.whole_words else jnp.where(words > 0, jnp.cumsum(words > 0, axis=1), 0)
            chosen = jax.vmap(partial(sample_spans, frequencies=self.spans))(order, lengths, units, count)
        else:
            chosen = jax.vmap(sample)(order, words > 0, count)
        other = (others % vocabulary.size).astype(tokens.dtype)
        kind = uniform(kinds)
        shown = jnp.where(kind < self.mask, vocabulary.mask, jnp.where(kind < self.mask + self.random, other, tokens))
        corrupted = jnp.where(chosen, shown, tokens)
        batch = {name: value for name, value in batch.items() if name != "counts"}
        return {**batch, "tokens": corrupted, **place_targets(chosen, tokens, int(counts[-1]))}

    def weights(self, batch: Batch) -> TokenCounts:
        """{"lm": predicted tokens, "relation": rows that are not padding}."""
        counts = {"lm": batch["target_weights"].sum()}
        return {**counts, "relation": real_rows(batch).sum()} if self.relation else counts

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Term "lm": sum of the negative log-likelihood in nats, in training with the penalties; term "relation": the
        weighted sum of the pairs', without."""
        output, scores = predict(model, variables, batch, memory, key, self.penalties)
        totals, metrics = {"lm": scores.total}, token_metrics(scores, batch)
        if self.relation:
            logits = model.apply(variables, output.pooled, method="classify")
            label, real = batch["relation"], real_rows(batch)
            nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], axis=-1)[:, 0]
            totals["relation"] = self.relation * (real * nll).sum()
            metrics["relation_accuracy"] = ((real * (logits.argmax(-1) == label)).sum(), real.sum())
        return LossOutput(totals, metrics, output.memory)


def favour_rare(noise: jax.Array, counts: jax.Array, exponent: float) -> jax.Array:
    """Noise [T] uint32 by which `sample` draws one position after another in proportion to count^-exponent, counts [T].

    Those with the least of exponentially distributed E / weight (Efraimidis and Spirakis 2006), here by their ranks:
    a compiler may compute a logarithm in several places, not always to the same bits, but an order only once.
    """
    waiting = jnp.log(-jnp.log1p(-uniform(noise))) + exponent * jnp.log(jnp.maximum(counts, 1))
    return jnp.argsort(jnp.argsort(waiting)).astype(jnp.uint32) << 1


def real_rows(batch: Batch) -> jax.Array:
    """[B] fp32: 1 for rows of text, 0 for rows that pad a short batch."""
    return (batch["documents"] > 0).any(-1).astype(jnp.float32)


def sample_spans(
    order: jax.Array, lengths: jax.Array, words: jax.Array, count: jax.Array, frequencies: tuple[float, ...]
) -> jax.Array:
    """Whole words [T] (0 = not to be chosen), in spans, with at most `count` tokens in all -> chosen [T] bool.

    Every word in random order is offered a span of a random number of words that begins with it; `order` and `lengths`
    [T] are the noise of word 1, 2, ... A span stops before a word that was chosen, that would overshoot, or that does
    not follow at once; nothing is left of it if that is its first word. Spans of one word are whole-word masking; if
    every token is a word besides, the choice is that of `sample`.
    """
    length, longest = words.shape[0], len(frequencies)
    rooms = 1 + length + longest  # words are numbered from 1, and a span may look past the last
    places = jnp.arange(length, dtype=jnp.int32)
    sizes = jnp.zeros(rooms, jnp.int32).at[words].add(1).at[0].set(0)
    starts = jnp.zeros(rooms, jnp.int32).at[words].max(places) + 1 - sizes
    queue = 1 + jnp.argsort(jnp.where(sizes[1 : length + 1] > 0, order >> 1, LAST))
    spans = jnp.zeros(rooms, jnp.int32).at[1 : length + 1].set(sample_lengths(lengths, frequencies))
    offsets = jnp.arange(longest)

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        step, _, left = state
        return (step < length) & (sizes[queue[step]] > 0) & (left > 0)

    def offer(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        step, taken, left = state
        first = queue[step]
        span = first + offsets
        size = sizes[span]
        end = jnp.cumsum(size)
        fits = (size > 0) & ~taken[span] & (offsets < spans[first]) & (end <= left)
        fits = jnp.cumprod(fits & (starts[span] == starts[first] + end - size))
        return step + 1, taken.at[span].max(fits.astype(bool)), left - (fits * size).sum(dtype=left.dtype)

    _, taken, _ = jax.lax.while_loop(unfinished, offer, (jnp.int32(0), jnp.zeros(rooms, bool), count))
    return taken[words]
