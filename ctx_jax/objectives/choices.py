"""Fine-tuning on multiple choice: one number for each choice (Radford et al. 2018, figure 1; Devlin et al. 2018,
section 4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ctx_jax.contract import Batch, Variables, Vocabulary
from ctx_jax.objectives.supervised import Supervised

READ = ("tokens", "documents", "positions", "segments", "words")
"""Arrays [B, choices, T], which the model reads as rows."""


@dataclass(frozen=True)
class Choices(Supervised):
    """Each choice is a row of its own, with one score; the right one by cross-entropy over an example's scores."""

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        """As `Supervised`, and the choices of the examples [B, C, T] as rows."""
        batch = as_rows(batch)
        prepared = super().prepare(batch, keys, vocabulary)
        return {**prepared, "target_weights": prepared["target_weights"][: len(batch["example"])]}

    def _read(
        self, model: Any, variables: Variables, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The scores [B, C] fp32, and the hidden states of the rows [C * B, T, D]."""
        scores, hidden = super()._read(model, variables, as_rows(batch), key)
        return scores[:, 0].reshape(-1, batch["example"].shape[0]).T, hidden


def as_rows(batch: Batch) -> Batch:
    """[B, C, T] -> [C * B, T], the first choices of all first: so row n belongs to example n modulo B, and goes to its
    micro-batch. Rows stay as they are."""
    if batch["tokens"].ndim == 2:
        return batch
    read = {name: jnp.asarray(batch[name]) for name in READ}
    return {**batch, **{name: value.swapaxes(0, 1).reshape(-1, value.shape[-1]) for name, value in read.items()}}
