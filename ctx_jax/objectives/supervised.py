"""Fine-tuning on labelled examples: one linear layer on a vector of each row (Devlin et al. 2018, section 4.1; Radford
et al. 2018, section 3.2; mean pooling: Reimers & Gurevych 2019, arXiv 1908.10084)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ctx_jax.contract import Batch, LossOutput, Reader, TokenCounts, Variables, Vocabulary
from ctx_jax.layers.dropout import dropout
from ctx_jax.objectives import Undrawn, require
from ctx_jax.objectives.pooling import pooled

HEAD = 0x68656164
"""Parts the key of the head's dropout from the model's."""


@dataclass(frozen=True)
class Supervised(Undrawn):
    """Each row predicts its label: a class by cross-entropy, a number by its squared error."""

    pooling: Literal["pooled", "mean", "max", "first", "last"] = "pooled"
    """The vector that the head reads: the model's own (BERT's and XLNet's pooler, GPT's last token), or the mean, the
    maximum, the first or the last of the last layer."""
    dropout: float = 0.1
    """Rate on that vector."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout {self.dropout} is no share: choose one of 0 or more and below 1")

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """Labelled rows that stand for themselves, and a model with a head."""
        name = type(model).__name__
        if not hasattr(reader, "pool"):
            yield "objective Supervised needs labelled rows: choose the reader Examples"
        if not hasattr(model, "classes"):
            yield f"objective Supervised needs a head for classes, which {name} has not: choose another model"
        if getattr(model, "memory_length", 0):
            yield f"rows of examples do not go on from each other: set model.memory_length {model.memory_length} to 0"

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        """Adds `targets` and `target_weights` [B], which are 0 for rows of padding."""
        targets = require(batch, "labels", self, "choose the reader Examples")
        real = jnp.any(jnp.asarray(batch["documents"]) > 0, axis=1)
        return {**batch, "targets": targets, "target_weights": real.astype(jnp.float32)}

    def weights(self, batch: Batch) -> TokenCounts:
        """{"task": examples}."""
        return {"task": batch["target_weights"].sum()}

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Term "task": sum of the cross-entropy in nats, or of the squared error. `outputs` has the rows' `scores`."""
        scores = self.scores(model, variables, batch, key)
        targets, weights = batch["targets"], batch["target_weights"]
        metrics = {}
        if jnp.issubdtype(targets.dtype, jnp.integer):
            losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[:, None], axis=1)[:, 0]
            metrics["accuracy"] = (weights * (scores.argmax(1) == targets)).sum(), weights.sum()
        else:
            losses = (scores[:, 0] - targets) ** 2
        outputs = {"example": batch["example"], "scores": scores}
        return LossOutput({"task": (weights * losses).sum()}, metrics, memory, outputs=outputs)

    def scores(self, model: Any, variables: Variables, batch: Batch, key: jax.Array | None) -> jax.Array:
        """[B, classes] fp32: logits, or the number that is predicted. Raises ValueError for a pooler that the model
        lacks."""
        output = model.apply(variables, batch, None, key=key)
        if self.pooling != "pooled":
            vector = pooled(output.hidden, jnp.asarray(batch["documents"]) > 0, batch["words"], self.pooling)
        elif output.pooled is None:
            raise ValueError(f"objective.pooling pooled: this {type(model).__name__} has no pooler, choose mean")
        else:
            vector = output.pooled
        vector = dropout(vector, self.dropout, None if key is None else jax.random.fold_in(key, HEAD))
        return model.apply(variables, vector, method="classify")
