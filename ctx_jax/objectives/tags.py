"""Fine-tuning on labels of words: one linear layer on each hidden state (Devlin et al. 2018, section 5.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ctx_jax.contract import Batch, LossOutput, Reader, TokenCounts, Variables, Vocabulary
from ctx_jax.layers.dropout import dropout
from ctx_jax.objectives import Undrawn, require
from ctx_jax.objectives.supervised import HEAD


@dataclass(frozen=True)
class OnTokens(Undrawn):
    """What objectives share whose head is at every token."""

    dropout: float = 0.1
    """Rate on the hidden states that the head reads."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout {self.dropout} is no share: choose one of 0 or more and below 1")

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """Windows of examples that stand for themselves, and a model with a head at every token."""
        name = type(self).__name__
        if not (hasattr(reader, "pool") and hasattr(reader, "stride")):
            yield f"objective {name} needs windows of examples: choose the reader Windows"
        if not hasattr(model, "token_classes"):
            yield f"objective {name} needs a head at every token, which {type(model).__name__} has not: choose another"
        if getattr(model, "memory_length", 0):
            yield f"rows of examples do not go on from each other: set model.memory_length {model.memory_length} to 0"

    def logits(self, model: Any, variables: Variables, batch: Batch, key: jax.Array | None) -> jax.Array:
        """[B, T, token_classes] fp32."""
        hidden = model.apply(variables, batch, None, key=key).hidden
        hidden = dropout(hidden, self.dropout, None if key is None else jax.random.fold_in(key, HEAD))
        return model.apply(variables, hidden, method="classify_tokens")


@dataclass(frozen=True)
class Tags(OnTokens):
    """The first piece of each word predicts the word's label by cross-entropy; all else predicts nothing."""

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        """Adds `targets` and `target_weights` [B, T] from `labels` [B, T], in which -1 stands for none."""
        labels = require(batch, "labels", self, "choose the reader Windows on a task of tagging")
        return {**batch, "targets": jnp.maximum(labels, 0), "target_weights": (labels >= 0).astype(jnp.float32)}

    def weights(self, batch: Batch) -> TokenCounts:
        """{"task": words}."""
        return {"task": batch["target_weights"].sum()}

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Term "task": sum of the cross-entropy in nats. `outputs` has the `scores` of all positions."""
        scores = self.scores(model, variables, batch, key)
        targets, weights = batch["targets"], batch["target_weights"]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)[..., 0]
        metrics = {"accuracy": ((weights * (scores.argmax(-1) == targets)).sum(), weights.sum())}
        outputs = {"example": batch["example"], "scores": scores}
        return LossOutput({"task": (weights * losses).sum()}, metrics, memory, outputs=outputs)

    def scores(self, model: Any, variables: Variables, batch: Batch, key: jax.Array | None) -> jax.Array:
        """[B, T, labels] fp32."""
        return self.logits(model, variables, batch, key)
