"""Causal language modelling: each position predicts the next token (GPT; Radford et al. 2018, equation 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ctx_jax.contract import Batch, LossOutput, Reader, TokenCounts, Variables, Vocabulary
from ctx_jax.objectives import Penalized, Undrawn, predict, require, token_metrics


@dataclass(frozen=True)
class Causal(Undrawn, Penalized):
    """Every position predicts `next_tokens`, unless the next token belongs to another document or to none.

    No memory is read, and the one that comes is given back as it is: `segment.Segment` carries it.
    """

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """A reader of streams."""
        yield from super().requirements(model, reader)
        if not hasattr(reader, "join_documents") or getattr(reader, "pairs", False):
            yield f"objective {type(self).__name__} needs a reader of streams: choose Blocks, or Lanes without pairs"

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        """Adds `targets` [B, T] and `target_weights` [B, T]. Raises ValueError without `next_tokens`."""
        targets = require(batch, "next_tokens", self, "choose a reader of streams (Blocks, Lanes)")
        documents = jnp.asarray(batch["documents"])
        predicted = (documents > 0) & (jnp.asarray(batch["next_documents"]) == documents)
        return {**batch, "targets": targets, "target_weights": predicted.astype(jnp.float32)}

    def weights(self, batch: Batch) -> TokenCounts:
        """{"lm": predicted tokens}."""
        return {"lm": batch["target_weights"].sum()}

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Term "lm": sum of the negative log-likelihood in nats, in training with the penalties."""
        _, scores = predict(model, variables, batch, None, key, self.penalties)
        return LossOutput({"lm": scores.total}, token_metrics(scores, batch), memory)
