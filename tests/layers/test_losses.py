from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_jax.contract import NO_PENALTIES, Penalties
from ctx_jax.layers.losses import token_scores, vocabulary_logits

B, K, D, V, PADDED = 3, 7, 4, 11, 16


def problem(dtype: Any = np.float64, seed: int = 0) -> tuple[np.ndarray, ...]:
    """hidden, table, bias, targets, weights; uneven weights, some of them 0."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.1, 3.0, (B, K)) * (rng.uniform(size=(B, K)) < 0.7)
    weights[0, 0], weights[2, 6] = 0.0, 2.0
    shapes = ((B, K, D), (PADDED, D), (PADDED,))
    hidden, table, bias = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return hidden, table, bias, rng.integers(0, V, (B, K)), weights.astype(dtype)


def naive(
    hidden: Any, table: Any, bias: Any, targets: Any, weights: Any, penalties: Penalties = NO_PENALTIES
) -> jax.Array:
    """All at once, the cross-entropy with the whole smoothed distribution."""
    logits = hidden @ table[:V].T + bias[:V]
    others = penalties.label_smoothing / (V - 1)
    wanted = jnp.where(jax.nn.one_hot(targets, V) == 1, 1 - penalties.label_smoothing, others)
    cost = -(wanted * jax.nn.log_softmax(logits)).sum(-1)
    return (weights * (cost + penalties.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2)).sum()


BOTH = Penalties(label_smoothing=0.2, z_loss=0.3)


@pytest.mark.parametrize(
    ("chunk", "penalties"),
    [
        (1, NO_PENALTIES),
        (3, NO_PENALTIES),
        (None, NO_PENALTIES),
        (3, Penalties(label_smoothing=0.1)),
        (3, Penalties(z_loss=0.01)),
        (1, BOTH),
        (None, BOTH),
    ],
)
def test_value_and_gradients_are_the_naive_ones(chunk: int | None, penalties: Penalties):
    hidden, table, bias, targets, weights = problem()
    with jax.enable_x64(True):

        def total(hidden: Any, table: Any, bias: Any, weights: Any) -> jax.Array:
            scores = token_scores(hidden, table, bias, targets, weights, penalties, vocabulary_size=V, chunk=chunk)
            return 0.3 * scores.total

        inputs = tuple(map(jnp.array, (hidden, table, bias, weights)))
        value, gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(*inputs)
        reference = jax.value_and_grad(lambda h, t, b, w: 0.3 * naive(h, t, b, targets, w, penalties), (0, 1, 2, 3))
        expected, expected_gradients = jax.jit(reference)(*inputs)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        np.testing.assert_allclose(jax.jit(total)(*inputs), expected, rtol=1e-12)  # not differentiated
        for gradient, reference in zip(gradients, expected_gradients, strict=True):
            assert gradient.dtype == jnp.float64
            np.testing.assert_allclose(gradient, reference, rtol=1e-10, atol=1e-13)
        np.testing.assert_array_equal(gradients[1][V:], 0)
        np.testing.assert_array_equal(gradients[2][V:], 0)


def test_penalties_by_hand():
    """Logits 0, log 3, 0, 0: Z is 6, the probabilities 1/6, 1/2, 1/6, 1/6; padding has logits of a hundred."""
    hidden = np.array([[[0.0, np.log(3), 0.0, 0.0]]])
    table = np.concatenate([np.eye(4), np.full((4, 4), 100.0)])
    target, weight = np.array([[1]]), np.array([[2.0]])
    wanted = np.array([0.1, 0.7, 0.1, 0.1])  # three tenths of the target's probability are the other three tokens'
    with jax.enable_x64(True):

        def total(hidden: Any, table: Any, weight: Any) -> jax.Array:
            return token_scores(hidden, table, None, target, weight, Penalties(0.3, 0.5), vocabulary_size=4).total

        value, gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(hidden, table, weight)
    cost = np.log(6) - 0.7 * np.log(3) + 0.5 * np.log(6) ** 2
    by_logits = 2 * (np.array([1, 3, 1, 1]) / 6 * (1 + np.log(6)) - wanted)
    np.testing.assert_allclose(value, 2 * cost, rtol=1e-12)
    np.testing.assert_allclose(gradients[0][0, 0], by_logits, rtol=1e-12)
    np.testing.assert_allclose(gradients[1], np.outer([*by_logits, 0, 0, 0, 0], hidden), rtol=1e-12)
    np.testing.assert_allclose(gradients[2], [[cost]], rtol=1e-12)


@jax.jit
def three(hidden: Any, table: Any, bias: Any, targets: Any, weights: Any) -> Any:
    """Scores without and with penalties, and the total of each word as everybody's target [V]."""

    def scores(targets: Any, penalties: Penalties = NO_PENALTIES) -> Any:
        return token_scores(hidden, table, bias, targets, weights, penalties, vocabulary_size=V, chunk=4)

    each = jax.lax.map(lambda word: scores(jnp.full_like(targets, word)).total, jnp.arange(V))
    return scores(targets), scores(targets, BOTH), each


@settings(deadline=None)  # the first compiles
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 30.0))
def test_smoothing_is_a_mean_over_other_targets_and_z_loss_of_the_normalizer(seed: int, scale: float):
    hidden, *others, weights = problem(seed=seed)
    with jax.enable_x64(True):
        plain, penalized, each = jax.device_get(three(scale * hidden, *others, weights))
    e, c = BOTH
    others = (each.sum() - plain.total) / (V - 1)
    expected = (1 - e) * plain.total + e * others + c * (weights * np.square(plain.log_normalizer)).sum()
    np.testing.assert_allclose(penalized.total, expected, rtol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, penalized[1:], plain[1:])


@pytest.mark.parametrize("penalties", [NO_PENALTIES, BOTH])
def test_scores_of_each_target(penalties: Penalties):
    hidden, table, bias, targets, weights = problem(np.float32)
    bias[V:] = 1e3  # padding would win everywhere
    scores = token_scores(hidden, table, bias, targets, weights, penalties, vocabulary_size=V, chunk=2)
    logits = hidden.astype(np.float64) @ table[:V].T.astype(np.float64) + bias[:V]
    log_normalizer = np.log(np.exp(logits).sum(-1))
    nll = log_normalizer - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(scores.log_normalizer, log_normalizer, rtol=1e-5)
    np.testing.assert_allclose(scores.nll, nll, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(scores.best, logits.argmax(-1))
    np.testing.assert_allclose(scores.total, naive(hidden, table, bias, targets, weights, penalties), rtol=1e-5)


def test_only_the_total_carries_a_gradient():
    hidden, table, bias, targets, weights = problem(np.float32)

    def others(hidden: Any) -> jax.Array:
        scores = token_scores(hidden, table, bias, targets, weights, vocabulary_size=V)
        return scores.nll.sum() + scores.log_normalizer.sum()

    np.testing.assert_array_equal(jax.grad(others)(jnp.array(hidden)), 0)


@pytest.mark.parametrize("penalties", [NO_PENALTIES, BOTH])
@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
def test_weight_0_adds_exactly_nothing(garbage: float, penalties: Penalties):
    hidden, table, bias, targets, weights = problem(np.float32)
    spoiled = np.where(weights[..., None] == 0, np.float32(garbage), hidden)

    def total(hidden: Any, table: Any, bias: Any) -> jax.Array:
        return token_scores(hidden, table, bias, targets, weights, penalties, vocabulary_size=V, chunk=2).total

    run = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    clean, dirty = run(hidden, table, bias), run(spoiled, table, bias)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    np.testing.assert_array_equal(dirty[1][0][weights == 0], 0)


def test_without_bias_and_padding():
    hidden, table, _, targets, weights = problem(np.float32)
    scores = token_scores(hidden, table[:V], None, targets, weights, vocabulary_size=V, chunk=4)
    np.testing.assert_allclose(scores.total, naive(hidden, table, np.zeros(PADDED), targets, weights), rtol=1e-5)
    gradient = jax.grad(lambda t: token_scores(hidden, t, None, targets, weights, vocabulary_size=V, chunk=4).total)
    reference = jax.grad(lambda t: naive(hidden, t, np.zeros(PADDED, np.float32), targets, weights))
    np.testing.assert_allclose(jax.jit(gradient)(table[:V]), jax.jit(reference)(table)[:V], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("penalties", [NO_PENALTIES, BOTH])
def test_bfloat16_hidden_is_summed_in_float32(penalties: Penalties):
    hidden, table, bias, targets, weights = problem(np.float32)
    narrow = jnp.array(hidden, jnp.bfloat16)

    def total(hidden: Any, table: Any) -> jax.Array:
        return token_scores(hidden, table, bias, targets, weights, penalties, vocabulary_size=V, chunk=2).total

    value, (by_hidden, by_table) = jax.jit(jax.value_and_grad(total, (0, 1)))(narrow, table)
    reference = jax.jit(jax.value_and_grad(lambda h, t: naive(h, t, bias, targets, weights, penalties), (0, 1)))
    expected, (expected_hidden, expected_table) = reference(jnp.array(hidden), jnp.array(table))
    assert (value.dtype, by_hidden.dtype, by_table.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(value, expected, rtol=0.01)
    np.testing.assert_allclose(by_hidden.astype(jnp.float32), expected_hidden, rtol=0.01, atol=0.05)
    np.testing.assert_allclose(by_table, expected_table, rtol=0.01, atol=0.05)
    assert vocabulary_logits(narrow, jnp.array(table), None).dtype == jnp.float32


@pytest.mark.parametrize("penalties", [NO_PENALTIES, BOTH])
def test_memory_does_not_hold_the_logits(penalties: Penalties):
    """The whole batch's logits would be 2 x 64 x 4096 x 4 bytes = 2 MiB; a chunk's are an eighth of that."""
    rows, positions, width, vocabulary = 2, 64, 8, 4096

    def temporary(chunk: int) -> int:
        def total(hidden: Any, table: Any) -> jax.Array:
            ones = jnp.ones((rows, positions))
            targets = jnp.zeros((rows, positions), jnp.int32)
            scores = token_scores(
                hidden, table, None, targets, ones, penalties, vocabulary_size=vocabulary, chunk=chunk
            )
            return scores.total

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, positions, width), (vocabulary, width))]
        return jax.jit(jax.grad(total, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8) < 2**21 < temporary(64)
