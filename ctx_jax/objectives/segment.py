"""Segment-recurrent language modelling (Transformer-XL; Dai et al. 2019, arXiv 1901.02860, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ctx_jax.contract import Batch, LossOutput, Reader, Variables
from ctx_jax.objectives import memory_requirements, predict, token_metrics
from ctx_jax.objectives.causal import Causal


@dataclass(frozen=True)
class Segment(Causal):
    """Causal over lanes: row b goes on where row b of the batch before stopped, and the memory is read and renewed."""

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """A model with memory, and lanes for it."""
        yield from super().requirements(model, reader)
        if not getattr(model, "memory_length", 0):
            yield "objective Segment needs a model with memory: choose TransformerXLConfig with memory_length 1 or more"
        yield from memory_requirements(model, reader)

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Term "lm", as `Causal`'s, and the memory after this window."""
        output, scores = predict(model, variables, batch, memory, key, self.penalties)
        return LossOutput({"lm": scores.total}, token_metrics(scores, batch), output.memory)
