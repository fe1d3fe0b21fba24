"""Losses of rows by hand, with a model whose hidden states are its tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import ModelOutput
from ctx_jax.data.examples import Examples
from ctx_jax.data.readers import Blocks
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.objectives.supervised import Supervised


class Identity:
    """Hidden states [t, 1], pooled the first token's; its head's logits are the vector, or its first number."""

    def __init__(self, has_pooler: bool = True) -> None:
        self.has_pooler = has_pooler

    def apply(self, variables, inputs, *rest, method=None, key=None):
        if method == "classify":
            return inputs
        hidden = jnp.stack([inputs["tokens"], jnp.ones_like(inputs["tokens"])], -1).astype(jnp.float32)
        return ModelOutput(hidden, pooled=hidden[:, 0] if self.has_pooler else None)


def rows(labels) -> dict[str, np.ndarray]:
    """[1, 3, -], [2, -, -] and a row of padding."""
    tokens = np.array([[1, 3, 9], [2, 9, 9], [9, 9, 9]], np.int32)
    documents = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], np.int32)
    example = np.array([4, 2, -1], np.int32)
    return {"tokens": tokens, "documents": documents, "words": documents, "labels": labels, "example": example}


def loss(objective: Supervised, labels, model=None):
    batch = objective.prepare(rows(labels), None, None)  # pyright: ignore[reportArgumentType]
    assert float(objective.weights(batch)["task"]) == 2
    return objective.loss(model or Identity(), {}, batch, None, None)


@pytest.mark.parametrize(
    ("pooling", "numbers"), [("pooled", [1, 2]), ("mean", [2, 2]), ("first", [1, 2]), ("last", [3, 2]), ("max", [3, 2])]
)
def test_losses_are_sums_over_rows_without_padding(pooling, numbers):
    found = loss(Supervised(pooling), np.array([0, 1, 0], np.int32))
    logits = np.stack([numbers, np.ones(2)], 1).astype(np.float64)
    nll = np.log(np.exp(logits).sum(1)) - logits[[0, 1], [0, 1]]
    np.testing.assert_allclose(found.totals["task"], nll.sum(), rtol=1e-6)
    right = (logits.argmax(1) == [0, 1]).sum()
    assert tuple(map(float, found.metrics["accuracy"])) == (right, 2)
    assert found.outputs["example"].tolist() == [4, 2, -1]
    np.testing.assert_allclose(found.outputs["scores"][:2], logits)


def test_a_number_costs_its_squared_error():
    found = loss(Supervised("mean"), np.array([0.5, 4.0, 7.0], np.float32))
    np.testing.assert_allclose(found.totals["task"], 1.5**2 + 2.0**2)
    assert not found.metrics


def test_what_does_not_fit():
    with pytest.raises(ValueError, match="Identity has no pooler, choose mean"):
        loss(Supervised(), np.zeros(3, np.int32), Identity(has_pooler=False))
    with pytest.raises(ValueError, match="needs 'labels' in the batch: choose the reader Examples"):
        Supervised().prepare({}, jax.random.key(0), None)  # pyright: ignore[reportArgumentType]
    assert not list(Supervised().requirements(BertConfig(), Examples()))
    assert "choose the reader Examples" in next(Supervised().requirements(BertConfig(), Blocks()))
    assert "needs a head" in next(Supervised().requirements(TransformerXLConfig(memory_length=0), Examples()))
    assert "set model.memory_length 384 to 0" in next(Supervised().requirements(XLNetConfig(), Examples()))
