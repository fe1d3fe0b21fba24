"""Distillation: a smaller encoder learns what a trained one predicts, and the masked tokens beside it.

DistilBERT (Sanh et al. 2019, arXiv 1910.01108, sections 2 and 3, and its published code): the student has every second
layer of the teacher, and begins with that layer's parameters.

Deviation: masked positions are drawn as `Masked` draws them, row by row; the published code draws them from the whole
batch. Rare tokens come more often in both (`rarity`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ctx_jax.contract import Batch, LossOutput, Reader, TokenCounts, Variables
from ctx_jax.layers.losses import LOGITS, batch_shards
from ctx_jax.models.bert import BertConfig
from ctx_jax.objectives import predict, token_metrics
from ctx_jax.objectives.masked import Masked

TEACHER = "teacher"
"""Where the teacher's parameters are in `TrainState.fixed`, and so beside the student's."""
TINY = 1e-12
"""Added to squared norms, as in PyTorch's cosine loss."""


@dataclass(frozen=True)
class Distillation(Masked):
    """Masked LM, the teacher's softened predictions as targets at all positions, and hidden states of its direction.

    The teacher reads the same corrupted tokens, without dropout. Where its parameters are not at hand (a run that is
    evaluated later) the student is scored alone, as a masked LM.
    """

    teacher: BertConfig = BertConfig()
    """The network that is learned from; --from names its run."""
    temperature: float = 2.0
    """Both networks' logits are divided by this for the soft targets, whose loss is multiplied by its square."""
    soft: float = 5.0
    """Weight of the Kullback-Leibler divergence from the teacher's predictions."""
    lm: float = 2.0
    """Weight of masked language modelling."""
    cosine: float = 1.0
    """Weight of 1 - cosine between the last hidden states of student and teacher; 0 leaves it out."""
    masked_only: bool = False
    """Soft targets at the masked positions alone, which saves most of the logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0.0:
            raise ValueError(f"temperature {self.temperature} divides nothing: choose one above 0")
        for name in ("soft", "lm"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} {getattr(self, name)} teaches nothing: choose a weight above 0")
        if self.cosine < 0.0:
            raise ValueError(f"cosine {self.cosine} rewards distance: choose 0 or more")

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """A student that can be compared with the teacher."""
        yield from super().requirements(model, reader)
        names = ("vocabulary_size", "width") if self.cosine else ("vocabulary_size",)
        for name in names:
            ours, theirs = getattr(model, name), getattr(self.teacher, name)
            if ours != theirs:
                yield (
                    f"model.{name} {ours} is not objective.teacher.{name} {theirs}: choose the same, or name the "
                    "teacher's run with --from"
                )
        if reader.length > self.teacher.max_length:
            yield f"the reader's length {reader.length} exceeds objective.teacher.max_length {self.teacher.max_length}"

    def weights(self, batch: Batch) -> TokenCounts:
        """{"lm": masked tokens, "soft": positions with soft targets, "cosine": positions that are no padding}."""
        counts = super().weights(batch)
        counts["soft"] = counts["lm"] if self.masked_only else real(batch).sum()
        return {**counts, "cosine": real(batch).sum()} if self.cosine else counts

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Terms "lm", "soft" and "cosine", each with its weight; "nll" and the other metrics are the student's."""
        output, scores = predict(model, variables, batch, memory, key, self.penalties)
        totals, metrics = {"lm": self.lm * scores.total}, token_metrics(scores, batch)
        if TEACHER not in variables["params"]:
            return LossOutput(totals, metrics, output.memory)
        teacher: Any = self.teacher.build()
        theirs = {"params": jax.lax.stop_gradient(variables["params"][TEACHER])}
        ours, goal = output.hidden, teacher.apply(theirs, batch).hidden
        if self.cosine:
            totals["cosine"] = self.cosine * (real(batch) * (1 - cosine(ours, goal))).sum()
        weights = real(batch)
        if self.masked_only:
            weights, places = batch["target_weights"], batch["target_positions"][..., None]
            ours, goal = (jnp.take_along_axis(x, places, axis=1) for x in (ours, goal))

        def divergences(ours: jax.Array, goal: jax.Array) -> jax.Array:
            student = model.apply(variables, ours, method="logits")
            return divergence(student, teacher.apply(theirs, goal, method="logits"), self.temperature)

        total = chunked(divergences, ours, goal, weights, self.teacher.vocabulary_size)
        totals["soft"] = self.soft * self.temperature**2 * total
        return LossOutput(totals, metrics, output.memory)

    def student(self, teacher: Any, params: Any) -> tuple[Any, list[str]]:
        """Parameters of a student that begins as the teacher: what has the teacher's name and shape, and of the stack
        the layers of `chosen`. Returns them, and the names of those that stay as they are."""
        theirs, ours = (dict[Any, Any](flatten_dict(tree)) for tree in (teacher, params))
        found, rest = {}, []
        for path, leaf in ours.items():
            taken = theirs.get(path)
            if taken is not None and "layers" in path:
                taken = taken[chosen(len(taken), len(leaf))]
            if taken is None or taken.shape != leaf.shape:
                rest.append("/".join(path))
                taken = leaf
            found[path] = taken
        return unflatten_dict(found), rest


def chosen(teacher: int, student: int) -> np.ndarray:
    """Numbers of the teacher's layers that a student of so many begins with, evenly from the first to the last: of
    twelve and six 0, 2, 4, 7, 9, 11, as published. A student that is deeper takes some twice."""
    return np.round(np.linspace(0, teacher - 1, student)).astype(np.int32)


def real(batch: Batch) -> jax.Array:
    """[B, T] fp32: 1 where there is no padding."""
    return (batch["documents"] > 0).astype(jnp.float32)


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """[..., D], [..., D] -> [...] in fp32."""
    a, b = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (a, b))
    squares = ((a * a).sum(-1) + TINY) * ((b * b).sum(-1) + TINY)
    return (a * b).sum(-1) * jax.lax.rsqrt(squares)


def divergence(student: jax.Array, teacher: jax.Array, temperature: float) -> jax.Array:
    """Logits [..., V] -> KL(teacher || student) [...] in nats, both softened."""
    ours, theirs = (jax.nn.log_softmax(logits / temperature) for logits in (student, teacher))
    return (jnp.exp(theirs) * (theirs - ours)).sum(-1)


def chunked(
    score: Callable[[jax.Array, jax.Array], jax.Array],
    a: jax.Array,
    b: jax.Array,
    weights: jax.Array,
    vocabulary_size: int,
) -> jax.Array:
    """Sum of weights [B, T] * score(a, b) [B, T], of a and b [B, T, D]: of so many positions at a time that `LOGITS`
    are held, which are computed again for the gradient."""
    rows, length = weights.shape
    chunks = -(-length // max(LOGITS * batch_shards() // (rows * vocabulary_size), 1))
    even = -(-length // chunks)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * even - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(rows, chunks, even, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        a, b, w = part
        return total + jnp.where(w != 0, w * score(a, b), 0).sum(), None

    return jax.lax.scan(step, jnp.zeros(()), (split(a), split(b), split(weights)))[0]
