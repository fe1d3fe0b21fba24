"""What must be predicted: each objective is a frozen dataclass of pure functions (`contract.Objective`).

Here is what they share: the random keys of a batch's rows, the drawing of targets, and the one way in which a prepared
batch is predicted. Axes: B batch, T positions, K predicted positions, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import NO_PENALTIES, Batch, ModelOutput, Penalties, Reader, TokenScores, Variables

CORRUPTION = 0x6D61736B
"""Parts the keys of corruption from other keys folded from the same seed (dropout's, by step)."""
LAST = np.uint32(0xFFFFFFFF)
"""Sorts behind the noise of every candidate, which is shifted by a bit to stay below."""


@dataclass(frozen=True, kw_only=True)
class Penalized:
    """Fields of the objectives that predict tokens: what training adds to their term "lm".

    Training reports what it minimises, with them, as "lm" and "loss", and without them as "nll". Evaluation is without.
    """

    label_smoothing: float = 0.0
    """Probability of all tokens but the target together, in training (Vaswani et al. 2017, section 5.4: 0.1)."""
    z_loss: float = 0.0
    """Coefficient of log(Z)^2 in training, Z the softmax's denominator (PaLM, section 5: 1e-4)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing {self.label_smoothing} is no share: choose one of 0 or more and below 1")
        if not self.z_loss >= 0.0:
            raise ValueError(f"z_loss {self.z_loss} rewards a large denominator: choose 0 or more")

    @property
    def penalties(self) -> Penalties:
        return Penalties(self.label_smoothing, self.z_loss)

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """One softmax over the whole vocabulary."""
        cutoffs = getattr(model, "cutoffs", ())
        for name, value in self.penalties._asdict().items():
            if value and cutoffs:
                yield (
                    f"objective.{name} {value} needs one softmax, and model.cutoffs {cutoffs} make an adaptive one: "
                    f"set objective.{name} to 0, or choose a model without cutoffs"
                )


class Undrawn:
    """Objectives whose preparation draws nothing: it is the same at each visit, and light enough for the step."""

    @property
    def copies(self) -> None:
        return None

    @property
    def in_loader(self) -> bool:
        return False


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


def validate(spans: tuple[float, ...], copies: int | None) -> None:
    """What configs with these fields check of them. Raises ValueError."""
    if not spans or min(spans) < 0.0 or sum(spans) <= 0.0:
        raise ValueError(f"spans {spans} are no frequencies: give one of 0 or more for each length 1, 2, ...")
    if copies is not None and copies < 1:
        raise ValueError(f"copies {copies} leaves no corruption: choose 1 or more, or None for a fresh one each time")


def memory_requirements(model: Any, reader: Reader) -> Iterator[str]:
    """What a model's memory needs of the reader: lanes, whose next window starts where the memory ends."""
    if not getattr(model, "memory_length", 0):
        return
    step, kept = getattr(reader, "step", None), model.reuse_length or reader.length
    if step is None:
        yield f"memory_length {model.memory_length} needs rows that go on from batch to batch: choose the reader Lanes"
    elif step != kept:
        yield (
            f"the reader's stride {step} is not the model's reuse_length {kept}: the memory would end "
            f"elsewhere than the next window starts, choose model.reuse_length {step} or the stride {kept}"
        )


def require(batch: Batch, name: str, objective: Any, remedy: str) -> jax.Array:
    """The batch's array of that name; ValueError if the reader did not give what the objective needs."""
    if name not in batch:
        raise ValueError(f"objective {type(objective).__name__} needs {name!r} in the batch: {remedy}")
    return jnp.asarray(batch[name])


def row_noise(keys: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random words of 32 bits for each row, [B, *shape] uint32; all draws of a row are made from them by exact
    arithmetic, so that they are the same on every device."""
    return jax.vmap(lambda key: jax.random.bits(key, shape, jnp.uint32))(keys)


def uniform(noise: jax.Array) -> jax.Array:
    """uint32 -> fp32 in [0, 1)."""
    return (noise >> 8).astype(jnp.float32) * 2.0**-24


def sample(noise: jax.Array, candidates: jax.Array, count: jax.Array | int) -> jax.Array:
    """`count` of the candidates [T] (all, if they are fewer), each equally likely; noise [T] -> chosen [T] bool.

    Those with the least noise, of equal ones the first. The greatest noise that is chosen is found two bits at a time,
    which takes a CPU an eighth of the time of sorting.
    """
    noise = jnp.where(candidates, noise >> 1, LAST)
    greatest = jnp.uint32(0)
    for shift in range(30, -1, -2):
        higher = greatest + (jnp.arange(1, 4, dtype=jnp.uint32) << shift)
        greatest += ((noise[:, None] < higher).sum(0) < count).sum(dtype=jnp.uint32) << shift
    below, equal = noise < greatest, noise == greatest
    return candidates & (below | equal & (jnp.cumsum(equal) <= count - below.sum()))


def sample_lengths(noise: jax.Array, frequencies: tuple[float, ...]) -> jax.Array:
    """Lengths 1, 2, ... in proportion to `frequencies`; noise [...] -> [...] int32."""
    shares = np.cumsum(frequencies) / sum(frequencies)
    return 1 + jnp.searchsorted(jnp.asarray(shares[:-1], jnp.float32), uniform(noise), side="right").astype(jnp.int32)


def place_targets(chosen: jax.Array, targets: jax.Array, count: int) -> Batch:
    """The part of a prepared batch that names what is predicted where only some positions are.

    chosen [B, T] bool, with at most `count` True in a row; targets [B, T]. Returns `target_positions` (ascending),
    `targets` and `target_weights`, each [B, count]; places that a row leaves unused stand at 0 with weight 0.
    """
    places = jnp.arange(chosen.shape[1], dtype=jnp.int32)
    # A place that is not chosen is sent out of bounds, each to another index, so that these are unique and no order of
    # the hardware's counts.
    index = jnp.where(chosen, jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1, count + places)

    def row(index: jax.Array) -> jax.Array:
        return jnp.zeros(count, jnp.int32).at[index].set(places, mode="drop", unique_indices=True)

    positions = jax.vmap(row)(index)  # by `vmap`, XLA knows that rows are apart, and devices exchange nothing
    used = jnp.arange(count) < chosen.sum(-1, keepdims=True)
    return {
        "target_positions": positions,
        "targets": jnp.take_along_axis(targets, positions, axis=1),
        "target_weights": used.astype(jnp.float32),
    }


def predict(
    model: Any,
    variables: Variables,
    batch: Batch,
    memory: Any,
    key: jax.Array | None,
    penalties: Penalties = NO_PENALTIES,
) -> tuple[ModelOutput, TokenScores]:
    """Runs the model on a prepared batch and scores its targets, wherever the model has put what predicts them: in a
    query stream, at `target_positions`, or everywhere. Only those places reach the projection to the vocabulary.
    Evaluation (key None) has no penalties.

    Raises ValueError for a permuted batch and a model without a query stream, whose hidden states know their own token.
    """
    output = model.apply(variables, batch, memory, key=key)
    if "ranks" in batch and output.query is None:
        raise ValueError(
            f"permutation needs a model of two streams, {type(model).__name__} has one: choose XLNetConfig"
        )
    if output.query is not None:
        hidden = output.query
    elif "target_positions" in batch:
        hidden = jnp.take_along_axis(output.hidden, batch["target_positions"][..., None], axis=1)
    else:
        hidden = output.hidden
    if key is None:
        penalties = NO_PENALTIES
    scores = model.apply(variables, hidden, batch["targets"], batch["target_weights"], penalties, method="score")
    return output, scores


def token_metrics(scores: TokenScores, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
    """What is reported of the weighted targets, as (sum, count): negative log-likelihood in nats, its square (for the
    standard error), accuracy."""
    weights = batch["target_weights"]
    count = weights.sum()
    return {
        "nll": ((weights * scores.nll).sum(), count),
        "nll_squared": ((weights * scores.nll**2).sum(), count),
        "accuracy": ((weights * (scores.best == batch["targets"])).sum(), count),
    }
