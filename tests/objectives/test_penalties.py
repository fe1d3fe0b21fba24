"""Label smoothing and z-loss: of the objectives in training alone, by every model, refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Penalties
from ctx_jax.experiment import find
from ctx_jax.layers.parameters import unboxed
from ctx_jax.objectives.causal import Causal
from ctx_jax.objectives.masked import Masked
from ctx_jax.objectives.permutation import Permutation
from ctx_jax.objectives.segment import Segment
from tests.tiny import smaller

KEY = jax.random.key(0)
OBJECTIVES = (Causal, Segment, Masked, Permutation)


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing 1.0 is no share: choose one of 0 or more and below 1"),
        ({"label_smoothing": -0.1}, "label_smoothing -0.1 is no share"),
        ({"label_smoothing": float("nan")}, "label_smoothing nan is no share"),
        ({"z_loss": -1e-4}, "z_loss -0.0001 rewards a large denominator: choose 0 or more"),
        ({"z_loss": float("nan")}, "z_loss nan rewards"),
    ],
)
def test_what_cannot_be_is_refused(kind: Any, fields: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_training_has_them_by_hand(table_model: Any):
    """Four targets 3 after the token 2, which has given 9/16 to it; four after 5, which knows nothing."""
    table = np.zeros((8, 8), np.float32)
    table[2, 3] = np.log(9.0)
    tokens = np.array([[2, 5], [2, 5]], np.int32)
    batch = {"tokens": tokens, "targets": np.full((2, 2), 3), "target_weights": np.ones((2, 2), np.float32)}
    objective = Causal(label_smoothing=0.2, z_loss=0.5)
    variables = {"table": jnp.asarray(table)}
    trained = objective.loss(table_model(), variables, batch, None, KEY)
    evaluated = objective.loss(table_model(), variables, batch, None, None)
    known = np.log(16) - 0.8 * np.log(9) + 0.5 * np.log(16) ** 2
    unknown = np.log(8) + 0.5 * np.log(8) ** 2
    nll = 2 * (np.log(16 / 9) + np.log(8))
    np.testing.assert_allclose(trained.totals["lm"], 2 * (known + unknown), rtol=1e-6)
    np.testing.assert_allclose(evaluated.totals["lm"], nll, rtol=1e-6)
    np.testing.assert_allclose(trained.metrics["nll"], (nll, 4), rtol=1e-6)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_evaluation_has_none(kind: Any, table_model: Any):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 8, (2, 4, 6))
    weights = rng.integers(0, 2, (4, 6)).astype(np.float32)
    batch = {"tokens": tokens, "targets": targets, "target_weights": weights, "documents": np.ones_like(tokens)}
    batch["relation"] = np.array([0, 1, 1, 0])
    plain = kind(**({"relation": 1.0} if kind is Masked else {}))
    model, table = table_model(query=kind is Permutation), rng.normal(size=(8, 8)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def loss(objective: Any, key: Any) -> Any:
        return objective.loss(model, {"table": jnp.asarray(table)}, jax.tree.map(jnp.asarray, batch), jnp.int32(0), key)

    smoothed, penalized = replace(plain, label_smoothing=0.1), replace(plain, label_smoothing=0.1, z_loss=0.1)
    expected, trained = loss(plain, None), loss(penalized, KEY)
    jax.tree.map(np.testing.assert_array_equal, loss(penalized, None), expected)
    jax.tree.map(np.testing.assert_array_equal, trained.metrics, expected.metrics)
    assert trained.totals["lm"] > loss(smoothed, KEY).totals["lm"] != expected.totals["lm"]
    assert trained.totals.get("relation") == expected.totals.get("relation")


@pytest.mark.parametrize("name", ["bert", "gpt", "transformer_xl", "xlnet"])
def test_every_model_takes_them(name: str, speeches: Path, folder: Path):
    model = smaller(name, speeches, folder).model.build()
    rows = {each: jnp.zeros((2, 32), jnp.int32) for each in ("tokens", "documents", "positions")}
    template = unboxed(jax.eval_shape(lambda: model.init(KEY, rows, method="initialize")))
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), template)
    hidden, targets = rng.normal(size=(2, 5, 16)).astype(np.float32), rng.integers(0, 340, (2, 5))
    weights = rng.uniform(size=(2, 5)).astype(np.float32)

    @jax.jit
    def both(variables: Any) -> Any:
        scores = model.apply(variables, hidden, targets, weights, Penalties(0.2, 0.1), method="score")
        return scores.total, model.apply(variables, hidden, method="logits")

    total, logits = map(np.float64, both(variables))
    log_normalizer = np.log(np.exp(logits).sum(-1))
    wanted = np.where(np.eye(340)[targets] == 1, 0.8, 0.2 / 339)
    cost = log_normalizer - (wanted * logits).sum(-1) + 0.1 * log_normalizer**2
    np.testing.assert_allclose(total, (weights * cost).sum(), rtol=1e-5)


@pytest.mark.parametrize("fields", [{"label_smoothing": 0.1}, {"z_loss": 0.5}])
def test_an_adaptive_softmax_is_refused(fields: dict[str, float]):
    tiny = find("transformer_xl:tiny")
    model = replace(tiny.model, cutoffs=(100, 200))
    ((name, value),) = fields.items()
    message = rf"objective.{name} {value} needs one softmax, and model.cutoffs \(100, 200\) make an adaptive one: set "
    with pytest.raises(ValueError, match=message):
        replace(tiny, model=model, objective=Segment(**fields))
    assert replace(tiny, objective=Segment(**fields)).objective.penalties == Penalties(**fields)
