"""The kernel of the cross-entropy, interpreted, against the formula."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Penalties
from ctx_jax.kernels import losses


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(losses, "WIDTH", 16)


@pytest.mark.parametrize("penalties", [Penalties(), Penalties(0.1), Penalties(0.0, 0.01), Penalties(0.2, 0.05)])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradient(biased, penalties):
    """Several steps with a short last one; padding of the vocabulary; a position without weight that holds NaN."""
    size, padded, rng = 41, 48, np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, padded)) * 4
    logits[0, 1, :] = np.nan
    logits[..., size:] = 50.0  # never predicted
    bias = rng.normal(size=padded) if biased else np.zeros(padded)
    targets = rng.integers(0, size, (2, 3))
    weights = np.array([[0.5, 0.0, 1.0], [2.0, 1.0, 1.0]])
    results = losses.cross_entropy(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(bias, jnp.float32) if biased else None,
        jnp.asarray(targets, jnp.int32),
        jnp.asarray(weights, jnp.float32),
        penalties,
        vocabulary_size=size,
        interpret=True,
    )
    nll, cost, normalizer, prediction, gradient = map(np.asarray, results)
    full = (logits + bias)[..., :size]
    wanted = np.log(np.exp(full).sum(-1))
    real = weights != 0
    np.testing.assert_allclose(normalizer[real], wanted[real], rtol=1e-6)
    picked = np.take_along_axis(full, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(nll[real], (wanted - picked)[real], rtol=1e-5)
    np.testing.assert_array_equal(prediction[real], full.argmax(-1)[real])
    others = penalties.label_smoothing / (size - 1)
    spread = np.where(np.eye(size)[targets] == 1, 1 - penalties.label_smoothing, others)
    penalized = wanted - (spread * full).sum(-1) + penalties.z_loss * wanted**2
    np.testing.assert_allclose(cost[real], penalized[real], rtol=1e-5)
    slope = 1 + 2 * penalties.z_loss * wanted[..., None]
    by_logits = weights[..., None] * (np.exp(full - wanted[..., None]) * slope - spread)
    np.testing.assert_allclose(gradient[..., :size][real], by_logits[real], atol=1e-6)
    assert not gradient[0, 1].any()
    assert not gradient[..., size:].any()


@pytest.mark.parametrize("equal", [(5, 23, 37), (12, 17), (3, 6), (7, 8), (39, 38), (15, 31, 16)])
def test_of_equal_logits_the_first_is_predicted(equal):
    """Of one thread and of several, in one step and in several."""
    logits = jnp.zeros((1, 40)).at[0, jnp.array(equal)].set(3.0)
    zeros = jnp.zeros(1)
    results = losses.cross_entropy(logits, None, zeros.astype(jnp.int32), zeros, vocabulary_size=40, interpret=True)
    assert results[3].tolist() == [min(equal)]
    assert not results[4].any()


def test_large_logits_leave_exact_probabilities():
    logits = 1e4 + np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32)
    targets, weights = jnp.array([3, 7, 39]), jnp.ones(3)
    gradient = losses.cross_entropy(jnp.asarray(logits), None, targets, weights, vocabulary_size=40, interpret=True)[4]
    powers = np.exp(logits.astype(np.float64) - 1e4)
    wanted = powers / powers.sum(-1, keepdims=True) - np.eye(40)[np.array(targets)]
    np.testing.assert_allclose(gradient, wanted, atol=1e-6)
