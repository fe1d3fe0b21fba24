from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import TokenScores
from ctx_jax.objectives import (
    place_targets,
    predict,
    row_keys,
    row_noise,
    sample,
    sample_lengths,
    token_metrics,
    uniform,
)


def data(keys: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(keys))


def test_a_rows_key_depends_on_the_row_alone():
    epoch, example = np.array([0, 0, 1, 2], np.int32), np.array([7, 8, 7, 7], np.int32)
    keys = data(row_keys(3, epoch, example))
    np.testing.assert_array_equal(data(row_keys(3, epoch[::-1], example[::-1])), keys[::-1])
    np.testing.assert_array_equal(data(row_keys(3, epoch[1:2], example[1:2])), keys[1:2])
    np.testing.assert_array_equal(data(jax.jit(row_keys)(jnp.int32(3), epoch, example)), keys)
    assert len(np.unique(keys, axis=0)) == 4
    assert not (data(row_keys(4, epoch, example)) == keys).all(axis=1).any()


def test_copies_repeat_the_first_epochs():
    example = np.full(5, 7, np.int32)
    epochs = np.arange(5, dtype=np.int32)
    assert len(np.unique(data(row_keys(0, epochs, example)), axis=0)) == 5
    np.testing.assert_array_equal(data(row_keys(0, epochs, example, copies=2)), data(row_keys(0, epochs % 2, example)))
    assert len(np.unique(data(row_keys(0, epochs, example, copies=1)), axis=0)) == 1


def test_corruption_and_dropout_do_not_share_keys():
    """Dropout's keys are folded from the same seed by step, then split by layer and so on."""
    step_keys = jax.vmap(lambda step: jax.random.fold_in(jax.random.key(0), step))(jnp.arange(20))
    children = jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(20)))(step_keys)
    epoch, example = np.meshgrid(np.arange(20), np.arange(20))
    corruption = data(row_keys(0, epoch.ravel(), example.ravel()))
    others = {tuple(key) for key in (*data(step_keys), *data(children).reshape(-1, 2))}
    assert not others & {tuple(key) for key in corruption}


def test_sample_takes_each_candidate_equally_often():
    rows, length, count = 2000, 20, 6
    candidates = jnp.arange(length) % 4 != 0  # 15 of them
    noise = row_noise(row_keys(0, 0, jnp.arange(rows)), (length,))
    chosen = np.asarray(jax.vmap(lambda n: sample(n, candidates, count))(noise))
    assert (chosen.sum(1) == count).all()
    assert not chosen[:, ::4].any()
    expected = rows * count / 15
    deviation = (rows * (count / 15) * (1 - count / 15)) ** 0.5
    assert (abs(chosen.sum(0)[np.asarray(candidates)] - expected) < 4.5 * deviation).all()


def test_sample_takes_all_where_there_are_too_few():
    candidates = jnp.array([False, True, False, True])
    np.testing.assert_array_equal(sample(jnp.full(4, 0xFFFFFFFF, jnp.uint32), candidates, 3), candidates)
    assert not sample(jnp.arange(4, dtype=jnp.uint32), candidates, 0).any()


@pytest.mark.parametrize("values", [2, 5, 2**32])
def test_sample_takes_the_least_noise_of_equal_the_first(values: int):
    rng = np.random.default_rng(values)
    noise = rng.integers(0, values, (300, 33), np.uint32) << (1 if values < 9 else 0)
    candidates = rng.random((300, 33)) < rng.random((300, 1))
    count = rng.integers(0, 34, 300, np.int32)
    expected = np.zeros_like(candidates)
    for row in range(300):
        places = np.flatnonzero(candidates[row])
        expected[row, places[np.argsort(noise[row, places] >> 1, kind="stable")][: count[row]]] = True
    np.testing.assert_array_equal(jax.vmap(sample)(noise, candidates, count), expected)


def test_uniform_and_lengths_at_their_borders():
    noise = jnp.array([0, 2**31 - 1, 2**31, 2**32 - 1], jnp.uint32)
    np.testing.assert_array_equal(uniform(noise), [0, 0.5 - 2.0**-24, 0.5, 1 - 2.0**-24])
    np.testing.assert_array_equal(sample_lengths(noise, (2.0, 2.0)), [1, 1, 2, 2])
    np.testing.assert_array_equal(sample_lengths(noise, (0.0, 1.0, 0.0, 1.0)), [2, 2, 4, 4])
    np.testing.assert_array_equal(sample_lengths(noise, (1.0,)), [1, 1, 1, 1])


def test_place_targets():
    chosen = jnp.array([[False, True, False, True], [False] * 4, [True, True, True, False]])
    placed = place_targets(chosen, jnp.arange(12).reshape(3, 4), 3)
    np.testing.assert_array_equal(placed["target_positions"], [[1, 3, 0], [0, 0, 0], [0, 1, 2]])
    np.testing.assert_array_equal(placed["targets"], [[1, 3, 0], [4, 4, 4], [8, 9, 10]])
    np.testing.assert_array_equal(placed["target_weights"], [[1, 1, 0], [0, 0, 0], [1, 1, 1]])


@pytest.mark.parametrize(("query", "positions"), [(False, False), (False, True), (True, True)])
def test_predict_scores_the_places_that_predict(table_model: Any, query: bool, positions: bool):
    table = jax.random.normal(jax.random.key(0), (5, 5))
    tokens = np.array([[1, 2, 3], [4, 0, 2]])
    batch: dict[str, Any] = {"tokens": tokens, "targets": np.array([[2, 3, 0], [0, 2, 1]])}
    places = np.array([[2, 0], [1, 1]])
    if positions:
        batch |= {"target_positions": places, "targets": np.array([[2, 3], [0, 2]])}
    batch["target_weights"] = np.ones_like(batch["targets"], np.float32)
    output, scores = predict(table_model(query), {"table": table}, batch, None, None)
    wide = np.asarray(table, np.float64)
    if query:
        hidden = -wide[tokens[:, :2]]
    else:
        hidden = wide[np.take_along_axis(tokens, places, 1)] if positions else wide[tokens]
    nll = np.log(np.exp(hidden).sum(-1)) - np.take_along_axis(hidden, batch["targets"][..., None], 2)[..., 0]
    np.testing.assert_allclose(scores.nll, nll, rtol=1e-5)
    np.testing.assert_allclose(scores.total, nll.sum(), rtol=1e-5)
    np.testing.assert_array_equal(output.hidden, table[tokens])


def test_metrics_are_weighted_sums():
    nll = jnp.array([[1.0, 2.0], [3.0, 9.0]])
    scores = TokenScores(jnp.float32(6), nll, nll, jnp.array([[4, 4], [4, 4]]))
    batch = {"targets": jnp.array([[4, 0], [4, 4]]), "target_weights": jnp.array([[1.0, 1.0], [1.0, 0.0]])}
    metrics = {name: (float(total), float(count)) for name, (total, count) in token_metrics(scores, batch).items()}
    assert metrics == {"nll": (6, 3), "nll_squared": (1 + 4 + 9, 3), "accuracy": (2, 3)}
