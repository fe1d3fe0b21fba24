"""What must be predicted: each objective is a frozen dataclass of pure functions (`contract.Objective`).

Here is what they share: the random keys of a batch's rows, and the one way in which a prepared batch is predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ctx_jax.contract import Batch, ModelOutput, TokenScores, Variables

CORRUPTION = 0x6D61736B
"""Parts the keys of corruption from other keys folded from the same seed (dropout's, by step)."""


def row_keys(seed: Any, epoch: Any, example: Any, copies: int | None = None) -> jax.Array:
    """One typed key per row, [B], a function of the row alone: not of its batch, its place in it or the host.

    `epoch` and `example` are the batch's, [B] (or one epoch for all). Every example comes once per epoch, so None is a
    fresh corruption at each visit (dynamic); `copies` repeats the first so many epochs' (static: BERT 1, RoBERTa's
    ablation 10).
    """
    epoch, example = jnp.broadcast_arrays(jnp.asarray(epoch), jnp.asarray(example))
    if copies is not None:
        epoch = epoch % copies
    root = jax.random.fold_in(jax.random.key(seed), CORRUPTION)
    return jax.vmap(lambda e, x: jax.random.fold_in(jax.random.fold_in(root, e), x))(epoch, example)


def require(batch: Batch, names: Iterable[str], objective: Any, remedy: str) -> None:
    """Raises ValueError if the reader did not give what the objective needs."""
    for name in names:
        if name not in batch:
            raise ValueError(f"objective {type(objective).__name__} needs {name!r} in the batch: {remedy}")


def gather(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of hidden [B, T, D] at positions [B, K] -> [B, K, D]."""
    return jnp.take_along_axis(hidden, positions[..., None], axis=1)


def predict(
    model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None
) -> tuple[ModelOutput, TokenScores]:
    """Runs the model on a prepared batch and scores its targets: wherever the model has put what predicts them, in a
    query stream, at `target_positions`, or everywhere. Only those places reach the projection to the vocabulary."""
    output = model.apply(variables, batch, memory, key=key)
    if output.query is not None:
        hidden = output.query
    elif "target_positions" in batch:
        hidden = gather(output.hidden, batch["target_positions"])
    else:
        hidden = output.hidden
    scores = model.apply(variables, hidden, batch["targets"], batch["target_weights"], method="score")
    return output, scores


def token_metrics(scores: TokenScores, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Negative log-likelihood in nats and accuracy, as (sum, count) over the weighted targets."""
    weights = batch["target_weights"]
    count = weights.sum()
    return {
        "nll": ((weights * scores.nll).sum(), count),
        "accuracy": ((weights * (scores.best == batch["targets"])).sum(), count),
    }


def target_count(batch: Batch) -> jax.Array:
    """Sum of the weights of a prepared batch's targets."""
    return batch["target_weights"].sum()
