"""The smallest pieces of an experiment that have everything that training must get right: a stack of named layers,
dropout, a memory, two terms with uneven counts, random corruption, and rows that are padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ctx_jax.contract import Batch, LossOutput, Memory, ModelOutput, Vocabulary
from ctx_jax.layers.dropout import dropout
from ctx_jax.layers.linear import Linear, split_key
from ctx_jax.layers.norm import LayerNorm
from ctx_jax.layers.parameters import parameter
from ctx_jax.layers.stack import Stack
from ctx_jax.objectives import row_keys
from ctx_jax.parallel.sharding import constrain

VOCABULARY = Vocabulary(size=32, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)
INIT = nn.initializers.normal(0.25)  # of both signs: sums of one sign cancel in the norms and magnify rounding


class Layer(nn.Module):
    width: int
    rate: float

    def setup(self) -> None:
        self.norm = LayerNorm(self.width, 0.1)
        self.up = Linear((self.width,), (2 * self.width,), ("width", "feed_forward"), INIT)
        self.down = Linear((2 * self.width,), (self.width,), ("feed_forward", "width"), INIT, use_bias=False)

    def __call__(self, x: Any, memory: Any, shared: Any, key: Any) -> Any:
        """Each position sees the mean of the memory and of what came before it."""
        kept, documents = shared
        count = (documents > 0).sum(1)[:, None, None] + 1 + jnp.arange(x.shape[1])[:, None]
        past = (memory * (documents > 0)[..., None]).sum(1, keepdims=True) + jnp.cumsum(x, axis=1)
        y = self.down(jnp.tanh(self.up(self.norm(past / count))))
        return x + dropout(y, self.rate, key), jnp.concatenate([memory, x], axis=1)[:, -kept:]


class Model(nn.Module):
    width: int = 16
    depth: int = 2
    memory_length: int = 4
    rate: float = 0.0

    def setup(self) -> None:
        self.embedding = parameter(self, "embedding", INIT, (VOCABULARY.size, self.width), ("vocabulary", "table"))
        self.stack = Stack(partial(Layer, self.width, self.rate), self.depth)
        self.norm = LayerNorm(self.width, 0.1)

    def __call__(self, batch: Batch, memory: Any = None, *, key: Any = None, collect: Any = ()) -> ModelOutput:
        if memory is None:
            memory = self.init_memory(batch["tokens"].shape[0])
        embedding_key, stack_key = split_key(key, 2)
        x = dropout(self.embedding[batch["tokens"]], self.rate, embedding_key)
        x = constrain(x, ("batch", "length", "activation"))
        x, hidden = self.stack(x, memory.hidden, (self.memory_length, memory.documents), stack_key)
        documents = jnp.concatenate([memory.documents, batch["documents"]], axis=1)[:, -self.memory_length :]
        return ModelOutput(self.norm(x), memory=Memory(jax.lax.stop_gradient(hidden), documents))

    def logits(self, hidden: Any) -> Any:
        return hidden @ self.embedding.T

    def initialize(self, batch: Batch) -> None:
        self(batch)

    def init_memory(self, batch_size: int) -> Memory:
        hidden = jnp.zeros((batch_size, self.depth, self.memory_length, self.width))
        return Memory(hidden, jnp.zeros((batch_size, self.memory_length), jnp.int32))


class Forgetful(Model):
    """The model without memory."""

    def init_memory(self, batch_size: int) -> Any:
        return None

    def __call__(self, batch: Batch, memory: Any = None, *, key: Any = None, collect: Any = ()) -> ModelOutput:
        empty = Model.init_memory(self, batch["tokens"].shape[0])
        return Model.__call__(self, batch, empty, key=key)._replace(memory=None)


@dataclass(frozen=True)
class Objective:
    """Predicts each token of a random half of the positions ("lm"), and each row's first vector ("row")."""

    in_loader: bool = False
    copies: int | None = None
    explode_at: int | None = None
    """The example whose loss is infinite."""

    def prepare(self, batch: Batch, keys: Any, vocabulary: Vocabulary) -> Batch:
        chosen = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, batch["tokens"].shape[1:]))(keys)
        weights = (chosen & (batch["documents"] > 0)).astype(jnp.float32)
        tokens = jnp.where(chosen, vocabulary.mask, batch["tokens"])
        return {**batch, "tokens": tokens, "targets": jnp.asarray(batch["tokens"]), "target_weights": weights}

    def weights(self, batch: Batch) -> Any:
        return {"lm": batch["target_weights"].sum(), "row": (batch["documents"][:, 0] > 0).sum()}

    def loss(self, model: Any, variables: Any, batch: Batch, memory: Any, key: Any) -> LossOutput:
        output = model.apply(variables, batch, memory, key=key)
        logits = model.apply(variables, output.hidden, method="logits")
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
        weights, rows = batch["target_weights"], batch["documents"][:, 0] > 0
        row = (jnp.square(output.hidden[:, 0, 0] - 1) * rows).sum()
        if self.explode_at is not None:
            row = row + jnp.where((batch["example"] == self.explode_at).any(), jnp.inf, 0.0)
        right = (weights * (logits.argmax(-1) == batch["targets"])).sum()
        totals = {"lm": (weights * nll).sum(), "row": 0.5 * row}
        return LossOutput(totals, {"accuracy": (right, weights.sum())}, output.memory)


@dataclass(frozen=True)
class Store:
    """No text at all: `Rows` makes it up."""

    rows: int = 24
    vocabulary: Vocabulary = VOCABULARY


@dataclass(frozen=True)
class Rows:
    """Random rows, some short, as a pure function of seed, batch and row."""

    length: int = 6

    def passes(self, store: Any, batch_size: int) -> int:
        return -(-store.rows // batch_size)

    def batch(self, store: Any, n: int, rows: Sequence[int], *, batch_size: int, seed: int | None) -> Batch:
        passes = self.passes(store, batch_size)
        result = [self._row(store, n % passes * batch_size + row, n // passes, seed) for row in rows]
        return {name: np.stack([row[name] for row in result]) for name in result[0]}

    def _row(self, store: Any, example: int, epoch: int, seed: int | None) -> Batch:
        generator = np.random.default_rng([example, epoch, 2**20 if seed is None else seed])
        filled = int(generator.integers(1, self.length + 1)) if example < store.rows else 0
        places = np.arange(self.length, dtype=np.int32)
        return {
            "tokens": np.where(places < filled, generator.integers(7, 32, self.length), 0).astype(np.int32),
            "documents": np.where(places < filled, 1 + example, 0).astype(np.int32),
            "positions": places,
            "words": np.where(places < filled, 1 + places, 0).astype(np.int32),
            "example": np.int32(example),
            "epoch": np.int32(epoch),
        }


def make_batch(batch_size: int = 8, n: int = 0, rows: int = 1000) -> Batch:
    return Rows().batch(Store(rows), n, range(batch_size), batch_size=batch_size, seed=0)


def prepared(batch: Batch, seed: int = 0) -> Batch:
    return Objective().prepare(batch, row_keys(seed, batch["epoch"], batch["example"]), VOCABULARY)


def assert_equal(one: Any, other: Any) -> None:
    """Equal to the last bit."""
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), one, other)


def assert_near(one: Any, other: Any, tolerance: float) -> None:
    """Equal up to `tolerance`, relative to the largest entry of each array."""

    def near(x: Any, y: Any) -> None:
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(np.abs(y).max(initial=0), 1e-6))

    jax.tree.map(near, one, other)


def assert_near_together(one: Any, other: Any, tolerance: float) -> None:
    """The whole trees differ by at most `tolerance`, relative to their norm: for gradients and what comes of them, of
    which some are what is left of large terms that cancel."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = [(np.float64(x), np.float64(y)) for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)]
    difference = np.sqrt(sum(np.square(x - y).sum() for x, y in pairs))
    assert difference <= tolerance * np.sqrt(sum(np.square(y).sum() for _, y in pairs))
