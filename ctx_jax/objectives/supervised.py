"""Fine-tuning on labelled examples: one linear layer on a vector of each row (Devlin et al. 2018, section 4.1; Radford
et al. 2018, section 3.2; mean pooling: Reimers & Gurevych 2019, arXiv 1908.10084).

GPT's fine-tuning has two things more: language modelling of the text as an auxiliary loss (its equation 5, L = L_task +
0.5 L_lm), and pairs without an order are read in both, the two vectors added before the head (section 3.3).

Deviations: the language model's loss is a mean over the tokens of the batch, not of each row first; its targets are the
tokens of text alone, where the published code predicts delimiter and extract token, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ctx_jax.contract import Batch, LossOutput, ModelOutput, Reader, TokenCounts, Variables, Vocabulary
from ctx_jax.layers.dropout import dropout
from ctx_jax.models.gpt import GptConfig
from ctx_jax.objectives import Undrawn, require
from ctx_jax.objectives.pooling import pooled

SWAPPED = "swapped_"
"""Before the names of what a batch holds of pairs in their other order."""
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
    language_model: float = 0.0
    """Coefficient of the auxiliary loss, next tokens of the text (GPT: 0.5); causal models only."""
    both_orders: bool = False
    """Whether a pair is read in both orders, and the head reads the sum of the two vectors (GPT's similarity)."""

    def __post_init__(self) -> None:
        if not self.language_model >= 0.0:
            raise ValueError(f"language_model {self.language_model} rewards bad predictions: choose 0 or more")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout {self.dropout} is no share: choose one of 0 or more and below 1")

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """Labelled rows that stand for themselves, and a model with a head."""
        name = type(model).__name__
        if not hasattr(reader, "pool"):
            yield "objective Supervised needs labelled rows: choose the reader Examples"
        if not hasattr(model, "classes"):
            yield f"objective Supervised needs a head for classes, which {name} has not: choose another model"
        if self.language_model and not isinstance(model, GptConfig):
            yield (
                f"objective.language_model {self.language_model} needs a causal model, and in {name} tokens see "
                "those that they predict: set it to 0, or choose a GPT"
            )
        if memory := getattr(model, "memory_length", 0):
            yield f"rows of examples do not go on from each other: set model.memory_length {memory} to 0"

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        """Adds `targets` and `target_weights` [B], which are 0 for rows of padding."""
        targets = require(batch, "labels", self, "choose the reader Examples")
        real = jnp.any(jnp.asarray(batch["documents"]) > 0, axis=1)
        prepared = {**batch, "targets": targets, "target_weights": real.astype(jnp.float32)}
        if self.language_model:
            for prefix, order in self._orders(batch).items():
                prepared |= {prefix + name: value for name, value in next_tokens(order, vocabulary).items()}
        return prepared

    def weights(self, batch: Batch) -> TokenCounts:
        """{"task": examples} and, with the auxiliary loss, {"lm": tokens that are predicted}."""
        counts = {"task": batch["target_weights"].sum()}
        if self.language_model:
            counts["lm"] = jnp.stack([order["lm_weights"].sum() for order in self._orders(batch).values()]).sum()
        return counts

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Term "task": sum of the cross-entropy in nats, or of the squared error; term "lm": the coefficient times the
        sum of the next tokens' negative log-likelihood. `outputs` has the rows' `scores`."""
        scores, read = self._read(model, variables, batch, key)
        targets, weights = batch["targets"], batch["target_weights"]
        metrics = {}
        if jnp.issubdtype(targets.dtype, jnp.integer):
            losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[:, None], axis=1)[:, 0]
            metrics["accuracy"] = (weights * (scores.argmax(1) == targets)).sum(), weights.sum()
        else:
            losses = (scores[:, 0] - targets) ** 2
        outputs = {"example": batch["example"], "scores": scores}
        totals = {"task": (weights * losses).sum()}
        if self.language_model:
            totals["lm"] = self.language_model * sum(
                model.apply(variables, hidden, order["lm_targets"], order["lm_weights"], method="score").total
                for order, hidden in zip(self._orders(batch).values(), read, strict=True)
            )
        return LossOutput(totals, metrics, memory, outputs=outputs)

    def scores(self, model: Any, variables: Variables, batch: Batch, key: jax.Array | None) -> jax.Array:
        """[B, classes] fp32: logits, or the number that is predicted. Raises ValueError for a pooler that the model
        lacks."""
        return self._read(model, variables, batch, key)[0]

    def _read(
        self, model: Any, variables: Variables, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The scores, and the hidden states of each order [B, T, D]."""
        vectors, hidden = [], []
        for number, order in enumerate(self._orders(batch).values()):
            own = None if key is None else jax.random.fold_in(key, number) if number else key
            output = model.apply(variables, order, None, key=own)
            vectors.append(self._vector(model, output, order))
            hidden.append(output.hidden)
        vector = sum(vectors[1:], vectors[0])
        vector = dropout(vector, self.dropout, None if key is None else jax.random.fold_in(key, HEAD))
        return model.apply(variables, vector, method="classify"), hidden

    def _vector(self, model: Any, output: ModelOutput, batch: Batch) -> jax.Array:
        """[B, D]."""
        if self.pooling != "pooled":
            return pooled(output.hidden, jnp.asarray(batch["documents"]) > 0, batch["words"], self.pooling)
        if output.pooled is None:
            raise ValueError(f"objective.pooling pooled: this {type(model).__name__} has no pooler, choose mean")
        return output.pooled

    def _orders(self, batch: Batch) -> dict[str, Batch]:
        """The batch, by the prefix of its names: as it is and, if that is read, the pairs in the other order."""
        if not self.both_orders:
            return {"": batch}
        require(batch, SWAPPED + "tokens", self, "choose a task of pairs")
        names = [name for name in batch if name.startswith(SWAPPED)]
        return {"": batch, SWAPPED: {name.removeprefix(SWAPPED): batch[name] for name in names}}


def next_tokens(batch: Batch, vocabulary: Vocabulary) -> Batch:
    """`lm_targets` [B, T], the token after each, and `lm_weights` [B, T], 1 where that is one of a text."""
    following, documents = (
        jnp.pad(jnp.asarray(batch[name])[:, 1:], ((0, 0), (0, 1))) for name in ("tokens", "documents")
    )
    special = jnp.isin(following, jnp.array(vocabulary.special)) | (following >= vocabulary.size)
    weights = ((documents > 0) & ~special).astype(jnp.float32)
    return {"lm_targets": jnp.where(special, 0, following), "lm_weights": weights}
