"""Fine-tuning on answers that are spans of a text: two numbers at each token, how well an answer starts and ends there
(Devlin et al. 2018, sections 4.2 and 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ctx_jax.contract import Batch, LossOutput, TokenCounts, Variables, Vocabulary
from ctx_jax.objectives import require
from ctx_jax.objectives.tags import OnTokens

NOWHERE = -1e9
"""The logit of a place where no answer can start or end."""


@dataclass(frozen=True)
class Spans(OnTokens):
    """Start and end of the answer, each by cross-entropy over the places where it may be: the text's tokens, and the
    token that stands for the whole row, which is where the answer of a window without one starts and ends."""

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        """Adds `targets` [B, 2], columns of the batch, and `target_weights` [B], which are 0 for rows of padding."""
        targets = require(batch, "labels", self, "choose the reader Windows on a task of answers")
        real = jnp.any(jnp.asarray(batch["documents"]) > 0, axis=1)
        return {**batch, "targets": targets, "target_weights": real.astype(jnp.float32)}

    def weights(self, batch: Batch) -> TokenCounts:
        """{"task": rows}."""
        return {"task": batch["target_weights"].sum()}

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Term "task": sum of the mean of both cross-entropies in nats. The metric "spans" is the share of rows where
        both are right; `outputs` has the `scores`."""
        scores = self.scores(model, variables, batch, key)
        targets, weights = batch["targets"], batch["target_weights"]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(scores, axis=1), targets[:, None], axis=1)[:, 0]
        right = jnp.all(scores.argmax(1) == targets, axis=1)
        outputs = {"example": batch["example"], "scores": scores}
        metrics = {"spans": ((weights * right).sum(), weights.sum())}
        return LossOutput({"task": (weights * losses.mean(1)).sum()}, metrics, memory, outputs=outputs)

    def scores(self, model: Any, variables: Variables, batch: Batch, key: jax.Array | None) -> jax.Array:
        """[B, T, 2] fp32: of start and end."""
        places = require(batch, "places", self, "choose the reader Windows on a task of answers")
        return jnp.where(places[..., None] > 0, self.logits(model, variables, batch, key), NOWHERE)
