"""Distillation: its terms beside float64 by hand, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ctx_jax.contract import ModelOutput, TokenScores, Vocabulary
from ctx_jax.data.pairs import Pairs, Sentences
from ctx_jax.layers.parameters import unboxed
from ctx_jax.models.bert import BertConfig
from ctx_jax.objectives import distillation, row_keys
from ctx_jax.objectives.distillation import TEACHER, Distillation, chosen, chunked, cosine, divergence
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.training.optimizers import Adam
from ctx_jax.training.state import abstract_fixed, abstract_state

TEACHER_CONFIG = BertConfig(vocabulary_size=50, width=16, layers=3, heads=2, feed_forward=16, max_length=24)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_published_layers():
    assert chosen(12, 6).tolist() == [0, 2, 4, 7, 9, 11]
    assert chosen(2, 1).tolist() == [0] and chosen(4, 2).tolist() == [0, 3] and chosen(3, 3).tolist() == [0, 1, 2]


def test_divergence_by_hand():
    """Logits of two tokens, 4 ln 2 apart: at temperature 2 the odds are 4 : 1, at 1 they are 16 : 1."""
    teacher, student = jnp.array([4 * np.log(2), 0.0]), jnp.zeros(2)
    for temperature, p in ((2.0, 4 / 5), (1.0, 16 / 17)):
        expected = p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p))
        np.testing.assert_allclose(divergence(student, teacher, temperature), expected, rtol=1e-5)
    assert abs(float(divergence(teacher, teacher, 2.0))) < 1e-7


def test_cosine_by_hand():
    a, b = jnp.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]]), jnp.array([[4.0, 3.0], [-2.0, 0.0], [1.0, 0.0]])
    np.testing.assert_allclose(cosine(a, b), [24 / 25, -1, 0], atol=1e-6)
    assert bool(jnp.isfinite(jax.grad(lambda a: cosine(a, b).sum())(a)).all())


class Table:
    """Hidden states are rows of a table, logits are them times two. It is its own config."""

    vocabulary_size = 5

    def build(self) -> Table:
        return self

    def apply(self, variables: Any, *arguments: Any, key: Any = None, method: str = "hidden") -> Any:
        if method == "logits":
            return 2 * arguments[0]
        if method == "score":
            hidden, targets, weights, _ = arguments
            nll = -jnp.take_along_axis(jax.nn.log_softmax(2 * hidden), targets[..., None], axis=-1)[..., 0]
            return TokenScores((weights * nll).sum(), nll, nll, hidden.argmax(-1))
        return ModelOutput(variables["params"]["table"][arguments[0]["tokens"]])


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    chance = np.random.default_rng(0)
    ours, theirs = chance.normal(size=(2, 5, 5)).astype(np.float32)
    return {"table": jnp.asarray(ours), TEACHER: {"table": jnp.asarray(theirs)}}


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    """Three and two tokens, and a row of padding; one masked token each."""
    return {
        "tokens": jnp.array([[1, 2, 3], [4, 1, 0], [0, 0, 0]]),
        "documents": jnp.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        "target_positions": jnp.array([[1, 0], [0, 0], [0, 0]]),
        "targets": jnp.array([[3, 0], [2, 0], [0, 0]]),
        "target_weights": jnp.array([[1.0, 0], [1, 0], [0, 0]]),
    }


def objective(**options: Any) -> Distillation:
    return Distillation(teacher=Table(), **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("masked_only", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_terms_are_sums_by_hand(masked_only, temperature, tables, batch, monkeypatch):
    monkeypatch.setattr(distillation, "LOGITS", 15)  # one position of three rows at a time
    made = objective(masked_only=masked_only, temperature=temperature)
    found = made.loss(Table(), {"params": tables}, batch, None, None)
    ours, theirs = (np.asarray(x, np.float64) for x in (tables["table"], tables[TEACHER]["table"]))
    tokens, masked = [1, 2, 3, 4, 1], [2, 4]
    soft = masked if masked_only else tokens
    p, q = (log_softmax(2 * table[soft] / temperature) for table in (theirs, ours))
    nll = -log_softmax(2 * ours[masked])[[0, 1], [3, 2]]
    cosines = [ours[t] @ theirs[t] / np.linalg.norm(ours[t]) / np.linalg.norm(theirs[t]) for t in tokens]
    expected = {
        "lm": 2 * nll.sum(),
        "soft": 5 * temperature**2 * (np.exp(p) * (p - q)).sum(),
        "cosine": (1 - np.array(cosines)).sum(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found.totals[name], value, rtol=1e-5, err_msg=name)
    assert {name: float(count) for name, count in made.weights(batch).items()} == {
        "lm": 2, "soft": len(soft), "cosine": 5
    }  # fmt: skip
    np.testing.assert_allclose(found.metrics["nll"][0], nll.sum(), rtol=1e-5)


def test_no_gradient_reaches_the_teacher(tables, batch):
    def loss(params: Any) -> jax.Array:
        return sum(objective().loss(Table(), {"params": params}, batch, None, None).totals.values(), jnp.zeros(()))

    gradient = jax.grad(loss)(tables)
    assert not gradient[TEACHER]["table"].any() and gradient["table"][1:].all() and not gradient["table"][0].any()
    same = {"table": tables["table"], TEACHER: {"table": tables["table"]}}
    totals = objective().loss(Table(), {"params": same}, batch, None, None).totals
    np.testing.assert_allclose([totals["soft"], totals["cosine"]], 0, atol=1e-5)


def test_without_a_teacher_the_student_is_a_masked_lm(tables, batch):
    alone = objective().loss(Table(), {"params": {"table": tables["table"]}}, batch, None, None)
    assert set(alone.totals) == {"lm"} and "cosine" not in objective(cosine=0.0).weights(batch)


def test_chunks_change_neither_value_nor_gradient(monkeypatch):
    chance = np.random.default_rng(1)
    a, b = jnp.asarray(chance.normal(size=(2, 2, 7, 4)), jnp.float32)
    weights = jnp.asarray(chance.integers(0, 2, (2, 7)), jnp.float32)

    def total(a: jax.Array) -> jax.Array:
        return chunked(lambda a, b: ((a - b) ** 2).sum(-1), a, b, weights, 10)

    whole = jax.value_and_grad(total)(a)
    monkeypatch.setattr(distillation, "LOGITS", 60)  # three positions
    for mine, other in zip(jax.value_and_grad(total)(a), whole, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)
    np.testing.assert_allclose(whole[1], 2 * np.asarray((a - b) * weights[..., None]), rtol=1e-6)


def test_a_student_begins_as_its_teacher(make_rows, vocabulary: Vocabulary):
    """As deep as the teacher, it has nothing to learn but the masked tokens; of fewer layers, it has."""
    made = Distillation(teacher=replace(TEACHER_CONFIG, segments=0, pooler=False, classes=None))
    rows = make_rows(4, 24, (12, 24))
    batch = jax.jit(made.prepare, static_argnums=2)(rows, row_keys(0, rows["epoch"], rows["example"]), vocabulary)
    model, shallow = made.teacher.build(), replace(made.teacher, layers=2).build()
    init = jax.jit(lambda: unboxed(model.init(jax.random.key(0), batch, method="initialize")["params"]))
    theirs = jax.tree.map(lambda x: 5 * x, init())  # so that what it says is not even

    @partial(jax.jit, static_argnums=0)
    def totals(student: Any, params: Any) -> dict[str, jax.Array]:
        return made.loss(student, {"params": {**params, TEACHER: theirs}}, batch, None, None).totals

    params, rest = made.student(theirs, jax.tree.map(jnp.zeros_like, theirs))
    assert rest == [] and jax.tree.all(jax.tree.map(np.array_equal, params, theirs))
    found = totals(model, params)
    np.testing.assert_allclose([found["soft"], found["cosine"]], 0, atol=1e-3)
    stack = jax.tree.map(lambda x: jnp.zeros_like(x[:2]), theirs["stack"])
    params, rest = made.student(theirs, {**theirs, "stack": stack, "new": {"bias": jnp.ones(3)}})
    assert rest == ["new/bias"] and params["new"]["bias"].all()
    for short, long in zip(*(jax.tree.leaves(tree["stack"]) for tree in (params, theirs)), strict=True):
        np.testing.assert_array_equal(short, long[np.array([0, 2])])
    del params["new"]
    found = totals(shallow, params)
    assert found["soft"] > 1 and found["cosine"] > 0.1


def test_the_teacher_is_sharded():
    made = Distillation(teacher=replace(TEACHER_CONFIG, vocabulary_size=512))
    model = replace(made.teacher, layers=1, segments=0, pooler=False, classes=None)
    rows = {name: jax.ShapeDtypeStruct((4, 8), jnp.int32) for name in ("tokens", "documents", "positions")}
    mesh = Mesh(data=1, fsdp=2, tensor=2).abstract()
    fixed = abstract_fixed(made, rows, mesh)
    state = abstract_state(model.build(), Adam().build(10), rows, mesh, fixed)
    ours, theirs = (tree["stack"]["layers"]["feed_forward"] for tree in (state.params, state.fixed[TEACHER]))
    leaves = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    assert all(a.shape[1:] == b.shape[1:] and len(b.shape) and a.sharding == b.sharding for a, b in leaves)
    assert state.fixed[TEACHER]["tokens"]["embedding"].sharding.spec == PartitionSpec(("tensor", "fsdp"), None)
    assert TEACHER not in state.params and TEACHER not in state.opt_state[1].mu


def test_what_does_not_fit():
    student = replace(TEACHER_CONFIG, layers=1, segments=0, pooler=False, classes=None)
    made = Distillation(teacher=TEACHER_CONFIG)
    assert not list(made.requirements(student, Sentences(24)))
    assert "model.width 8 is not objective.teacher.width 16" in next(
        made.requirements(replace(student, width=8), Sentences(24))
    )
    assert "exceeds objective.teacher.max_length 24" in next(made.requirements(student, Pairs(32)))
    with pytest.raises(ValueError, match=r"temperature 0\.0 divides nothing"):
        Distillation(temperature=0.0)
