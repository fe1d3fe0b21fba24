"""Permutation language modelling (XLNet; Yang et al. 2019, arXiv 1906.08237, section 2; zihangdai/xlnet's code).

A target predicts its own token, at its own place, from what comes before it in a random order: the published code
shifts the next tokens back by one, so that a target's label is the token that the content stream reads there.

Deviations from the published code: it may choose SEP and CLS and then loses the prediction, here never (`num_predict`
is exact), nor the end of a document (its <eod>), which it may predict; a row's first piece begins a word here, even if
the word began before; it fixes the choice of targets in preprocessing and redraws only the order, here both are redrawn
unless `fixed_targets`; it drops a span that reaches the end of its block, here it stays; in reversed rows it begins
spans at the word's first piece in reading order of the text, here at the first in the row; blocks shorter than the
reused half see the context of later blocks in that half, here of no later block (the same for the published block of a
half).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ctx_jax.contract import Batch, LossOutput, Reader, TokenCounts, Variables, Vocabulary
from ctx_jax.objectives import (
    Penalized,
    memory_requirements,
    place_targets,
    predict,
    row_keys,
    row_noise,
    sample,
    sample_lengths,
    token_metrics,
    validate,
)


@dataclass(frozen=True)
class Permutation(Penalized):
    """Predicts spans of each block in a random order, drawn inside the block (XLNet: each half of the window)."""

    num_predict: int = 85
    """Predicted positions of a row (XLNet: 85 of 512, 1/6)."""
    perm_size: int = 256
    """Positions of a block; a block sees the earlier ones whole and the later ones not at all."""
    spans: tuple[float, ...] = (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5)
    """Relative frequencies of spans of 1, 2, ... pieces (words with whole_words)."""
    context: int = 6
    """A span of n stands in a context of this many times n positions."""
    whole_words: bool = False
    """Spans are counted in words (as the code's comments have it) instead of pieces (as it computes)."""
    fixed_targets: bool = False
    """An example has the same targets at each visit and in each run; only the order is redrawn."""
    copies: int | None = None
    """Different targets and orders of an example before they repeat; None = fresh ones at each visit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_predict < 1:
            raise ValueError(f"num_predict {self.num_predict} predicts nothing: choose 1 or more")
        if self.perm_size < 1:
            raise ValueError(f"perm_size {self.perm_size} holds no position: choose a divisor of the row's length")
        if self.context < 1:
            raise ValueError(f"context {self.context} leaves no room for a span: choose 1 or more")
        validate(self.spans, self.copies)

    @property
    def in_loader(self) -> bool:
        return True

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """Blocks that divide the window and what the memory keeps of it."""
        yield from super().requirements(model, reader)
        if reader.length % self.perm_size:
            yield f"objective.perm_size {self.perm_size} does not divide the reader's length {reader.length}"
        yield from memory_requirements(model, reader)
        kept = getattr(model, "reuse_length", None) or reader.length
        if getattr(model, "memory_length", 0) and kept % self.perm_size:
            yield (
                f"objective.perm_size {self.perm_size} does not divide model.reuse_length {kept}: the memory would "
                f"know targets of the next window, choose a divisor"
            )

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        """Adds `target_positions`, `targets`, `target_weights`, each [B, num_predict], and `ranks` [B, T] int32.

        Position i's content stream sees j iff ranks[j] <= ranks[i], its query stream iff ranks[j] < ranks[i]. Context
        of block n has rank n (perm_size + 1); a target, SEP or CLS has that + 1 + its place in the block's order. So
        context is seen by its own and all later blocks and sees no target, SEP or CLS of its own; the published ranks,
        with -1 for context, say the same of one block. The tokens stay as they are: the content stream reads them.

        Raises ValueError if perm_size does not divide T or a row cannot hold num_predict.
        """
        tokens, words = jnp.asarray(batch["tokens"]), jnp.asarray(batch["words"])
        (rows, length), size = tokens.shape, self.perm_size
        if length % size:
            raise ValueError(f"perm_size {size} does not divide the length {length} of a row: choose a divisor")
        if self.num_predict > length:
            raise ValueError(
                f"num_predict {self.num_predict} exceeds the length {length} of a row: choose about 1/6 of it"
            )
        blocks = length // size

        def draw(keys: jax.Array) -> jax.Array:
            return row_noise(keys, (blocks, size + 2 * self._contexts + size))

        def in_blocks(x: jax.Array) -> jax.Array:
            return x.reshape(rows, blocks, size)

        noise = draw(keys)
        choice = draw(row_keys(0, 0, batch["example"])) if self.fixed_targets else noise
        text = words > 0
        begins = text & (words != jnp.roll(words, 1, axis=1).at[:, 0].set(0))
        goals = (self.num_predict + jnp.arange(blocks, dtype=jnp.int32)[::-1]) // blocks  # the first take the remainder
        choose = jax.vmap(jax.vmap(self._choose), in_axes=(0, 0, 0, None))
        chosen = choose(choice[..., size:], in_blocks(text), in_blocks(begins), goals).reshape(rows, length)

        special = (tokens == vocabulary.separator) | (tokens == vocabulary.classification)
        place = jnp.argsort(noise[..., :size]).reshape(rows, length)
        context_rank = jnp.arange(length) // size * (size + 1)
        ranks = (context_rank + jnp.where(chosen | special, 1 + place, 0)).astype(jnp.int32)
        return {**batch, "ranks": ranks, **place_targets(chosen, tokens, self.num_predict)}

    @property
    def _contexts(self) -> int:
        """The most contexts that a block has: each takes `context` positions and a span of one, or more."""
        return -(-self.perm_size // (self.context + 1))

    def _choose(self, noise: jax.Array, text: jax.Array, begins: jax.Array, goal: jax.Array) -> jax.Array:
        """Targets of one block, `goal` of them if it has so much text; text, begins (of words) and result [P] bool."""
        size, contexts = self.perm_size, self._contexts
        lengths_noise, places_noise, rest_noise = jnp.split(noise, (contexts, 2 * contexts))
        places = jnp.arange(size, dtype=jnp.int32)
        next_begin = jax.lax.cummin(jnp.where(begins, places, size), reverse=True)
        next_break = jax.lax.cummin(jnp.where(text, size, places), reverse=True)
        word_begins, word = jnp.sort(jnp.where(begins, places, size)), jnp.cumsum(begins, dtype=jnp.int32) - 1

        def context(state: tuple[jax.Array, jax.Array], drawn: tuple[jax.Array, jax.Array]) -> Any:
            """Goes on to a context's end; returns its span's [begin, end), empty and at the end if there is none."""
            reached, left = state
            count = jnp.minimum(drawn[0], left)
            width = self.context * count
            before = (drawn[1] % jnp.maximum(width, 1).astype(jnp.uint32)).astype(jnp.int32)
            place = reached + before
            begin = jnp.where((place < size) & (left > 0), next_begin[place], size)
            if self.whole_words:
                last = word[begin] + count
                end = jnp.minimum(jnp.where(last < size, word_begins[last], size), begin + left)
            else:
                end = begin + count
            end = jnp.where(begin < size, jnp.minimum(end, next_break[begin]), size)
            return (jnp.minimum(end + width - before, size), left - (end - begin)), (begin, end)

        drawn = sample_lengths(lengths_noise, self.spans), places_noise
        (_, left), (begin, end) = jax.lax.scan(context, (jnp.int32(0), goal), drawn, unroll=4)
        spans = jnp.cumsum(jnp.zeros(size, jnp.int32).at[begin].add(1).at[end].add(-1)) > 0  # `size` is out of bounds
        return spans | sample(rest_noise, text & ~spans, left)

    def weights(self, batch: Batch) -> TokenCounts:
        """{"lm": predicted tokens}."""
        return {"lm": batch["target_weights"].sum()}

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Term "lm": sum of the targets' negative log-likelihood in nats, by the query stream, in training with the
        penalties; and the memory."""
        output, scores = predict(model, variables, batch, memory, key, self.penalties)
        return LossOutput({"lm": scores.total}, token_metrics(scores, batch), output.memory)
