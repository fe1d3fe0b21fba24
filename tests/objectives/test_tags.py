"""Losses of words, spans and choices by hand, with a model whose hidden states are its tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import ModelOutput
from ctx_jax.data.examples import Examples, Windows
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.objectives.choices import READ, Choices
from ctx_jax.objectives.spans import NOWHERE, Spans
from ctx_jax.objectives.tags import Tags

TOKENS = np.array([[1, 3, 2], [2, 5, 9], [9, 9, 9]], np.int32)
DOCUMENTS = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]], np.int32)


class Identity:
    """Hidden states [t, 1], pooled the first token's; a head's logits are the vector, or its first number."""

    def apply(self, variables, inputs, *rest, method=None, key=None):
        if method is not None:
            return inputs
        hidden = jnp.stack([inputs["tokens"], jnp.ones_like(inputs["tokens"])], -1).astype(jnp.float32)
        return ModelOutput(hidden, pooled=hidden[:, 0])


def loss(objective, **arrays):
    batch = {"tokens": TOKENS, "documents": DOCUMENTS, "words": DOCUMENTS, "example": np.array([4, 2, -1]), **arrays}
    batch = objective.prepare(batch, None, None)
    return objective.loss(Identity(), {}, batch, None, None), float(objective.weights(batch)["task"])


def log_softmax(scores) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    return scores - np.log(np.exp(scores).sum())


def test_only_labelled_pieces_count():
    found, count = loss(Tags(), labels=np.array([[-1, 0, 1], [1, -1, -1], [-1, -1, -1]], np.int32))
    expected = -(log_softmax([3, 1])[0] + log_softmax([2, 1])[1] + log_softmax([2, 1])[1])
    assert count == 3
    np.testing.assert_allclose(found.totals["task"], expected, rtol=1e-6)
    assert tuple(map(float, found.metrics["accuracy"])) == (1, 3)
    assert found.outputs["scores"].shape == (3, 3, 2)


def test_a_span_is_at_two_places_of_those_that_may_be():
    places = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 0]], np.int32)
    found, count = loss(Spans(), labels=np.array([[0, 2], [1, 1], [0, 0]], np.int32), places=places)
    starts, ends = [log_softmax([1, 2])[0], log_softmax([2, 5])[1]], [log_softmax([1, 1])[1], log_softmax([1, 1])[1]]
    assert count == 2
    np.testing.assert_allclose(found.totals["task"], -(sum(starts) + sum(ends)) / 2, rtol=1e-6)
    assert tuple(map(float, found.metrics["spans"])) == (0, 2)  # of equal places the first is said
    assert found.outputs["scores"][0, 1].tolist() == [np.float32(NOWHERE)] * 2


def choices() -> dict[str, np.ndarray]:
    """Four examples of three choices, whose first tokens are their scores, and one of padding in their place."""
    tokens = np.random.default_rng(0).integers(1, 6, (4, 3, 5)).astype(np.int32)
    documents = np.ones_like(tokens)
    documents[3] = 0
    return {"tokens": tokens, "documents": documents, **dict.fromkeys(("positions", "segments", "words"), documents)}


def test_choices_compete_in_their_example():
    labels = np.array([2, 0, 1, 0], np.int32)
    found, count = loss(Choices(), **choices(), example=np.array([0, 1, 2, -1]), labels=labels)
    expected = [-log_softmax(choices()["tokens"][n, :, 0])[labels[n]] for n in range(3)]
    assert count == 3
    np.testing.assert_allclose(found.totals["task"], sum(expected), rtol=1e-6)
    np.testing.assert_allclose(found.outputs["scores"], choices()["tokens"][:, :, 0])


def test_choices_stay_together_in_micro_batches():
    labels, example = np.array([2, 0, 1, 0], np.int32), np.array([0, 1, 2, -1])
    whole, _ = loss(Choices(), **choices(), example=example, labels=labels)
    batch = Choices().prepare({**choices(), "example": example, "labels": labels}, None, None)  # pyright: ignore[reportArgumentType]
    assert all(batch[name].shape == (12, 5) for name in READ)
    halves = [jax.tree.map(lambda x, n=n: x.reshape(-1, 2, *x.shape[1:])[:, n], batch) for n in (0, 1)]
    parts = [Choices().loss(Identity(), {}, half, None, None).totals["task"] for half in halves]
    np.testing.assert_allclose(sum(parts), whole.totals["task"], rtol=1e-6)


def test_what_does_not_fit():
    for objective in (Tags(), Spans()):
        assert not list(objective.requirements(BertConfig(), Windows()))
        assert "choose the reader Windows" in next(objective.requirements(BertConfig(), Examples()))
        assert "needs a head at every token" in next(
            objective.requirements(TransformerXLConfig(memory_length=0), Windows())
        )
    with pytest.raises(ValueError, match="needs 'labels' in the batch: choose the reader Windows on a task of tagging"):
        Tags().prepare({}, jax.random.key(0), None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"dropout 1.0 is no share"):
        Spans(dropout=1.0)
