"""What a step computes, on one device; tests/multidevice/test_step.py has several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ctx_jax.contract import LossOutput
from ctx_jax.objectives.masked import Masked
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.parallel.sharding import batch_sharding, replicated
from ctx_jax.text import open_text
from ctx_jax.training.optimizers import AdamW, Sgd
from ctx_jax.training.schedules import WarmUp
from ctx_jax.training.state import TrainState, abstract_state, init_state, shardings_of, variables
from ctx_jax.training.step import loader_transform, make_eval_step, make_train_step, prepare, prepared_shapes
from tests.tiny import smaller
from tests.training.fakes import (
    VOCABULARY,
    Forgetful,
    Model,
    Objective,
    Rows,
    Store,
    assert_equal,
    assert_near,
    assert_near_together,
    make_batch,
    prepared,
)

RATE = 0.02
SGD = Sgd(WarmUp(rate=RATE, decay="constant")).build(10)
MESH = Mesh().build(jax.devices()[:1])


def put(batch):
    return jax.device_put(batch, batch_sharding(MESH))


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Collects an entry for every program that XLA compiles."""
    found: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# The whole step, with a model


@pytest.fixture(scope="module")
def initial():
    """The fake model's state after init, on the host."""
    return jax.device_get(init_state(Model(), SGD, prepared(make_batch()), MESH, seed=0))


def steps(initial, batches, optimizer=SGD, model=None, **options):
    """The state after the batches, and the metrics of each."""
    model = model or Model()
    shardings = shardings_of(abstract_state(model, optimizer, prepared(make_batch()), MESH))
    step = make_train_step(model, Objective(), optimizer, VOCABULARY, shardings, seed=3, **options)
    state, metrics = jax.device_put(initial, shardings), []
    for batch in batches:
        state, measured = step(state, put(batch))
        metrics.append(measured)
    return jax.device_get((state, metrics))


@pytest.fixture(scope="module")
def batches():
    """The second one has rows that are padding."""
    return [make_batch(n=0), make_batch(n=1, rows=13), make_batch(n=2)]


@pytest.fixture(scope="module")
def full(initial, batches):
    return [steps(initial, batches[:1]), steps(initial, batches)]


def test_a_step_is_the_gradient_of_the_weighted_means(initial, batches, full):
    """By other means: no scan, no sums and counts, the loss as one function of the whole batch."""
    batch = prepared(batches[0], seed=3)

    @jax.jit
    def loss(params):
        output = Model().apply({"params": params}, batch, initial.memory)
        logits = Model().apply({"params": params}, output.hidden, method="logits")
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        weights, rows = batch["target_weights"], batch["documents"][:, 0] > 0
        row = 0.5 * jnp.mean((output.hidden[:, 0, 0] - 1) ** 2, where=rows)
        return jnp.average(nll, weights=weights) + row, (row, output.memory)

    (expected, (row, memory)), gradient = jax.value_and_grad(loss, has_aux=True)(initial.params)
    after, (metrics,) = full[0]
    assert_near_together(after.params, jax.tree.map(lambda p, g: p - RATE * g, initial.params, gradient), 2e-7)
    assert_near(after.memory, memory, 2e-6)
    assert after.step == 1
    assert metrics["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert metrics["terms"]["row"] == pytest.approx(float(row), rel=1e-6)
    assert metrics["terms"]["lm"] == pytest.approx(float(expected - row), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    assert metrics["metrics"]["accuracy"][1] == batch["target_weights"].sum()
    assert metrics["tokens"] == (batches[0]["documents"] > 0).sum()
    assert metrics["learning_rate"] == np.float32(RATE)


def test_micro_batches_equal_the_full_batch(initial, batches, full):
    """With uneven numbers of targets, rows that are padding, and a memory that fills."""
    counts = prepared(batches[1], seed=3)["target_weights"].reshape(-1, 4, 6).sum((0, 2))
    assert len(set(np.asarray(counts).tolist())) > 1 and min(counts) < 2
    (state, metrics), (expected, expected_metrics) = steps(initial, batches, accumulation=4), full[1]
    assert_near_together(state.params, expected.params, 2e-7)
    assert_equal(state.memory.documents, expected.memory.documents)
    assert_near_together(state.memory.hidden, expected.memory.hidden, 2e-6)
    assert_near(metrics, expected_metrics, 4e-6)


def test_one_compilation():
    """Memory fills, moments appear, dropout changes, the state comes back from the host: still the same program."""
    model, optimizer = Model(rate=0.1), AdamW(WarmUp(rate=1e-2, warmup=2)).build(10)
    shapes = prepared(make_batch())
    shardings = shardings_of(abstract_state(model, optimizer, shapes, MESH))
    step = make_train_step(model, Objective(), optimizer, VOCABULARY, shardings, seed=3, accumulation=2)
    state = init_state(model, optimizer, shapes, MESH, seed=0)
    batches = [put(make_batch(n=n)) for n in range(4)]
    with count_compilations() as compilations, jax.transfer_guard("disallow"):
        for batch in batches[:3]:
            state, _ = step(state, batch)
        state = jax.device_put(jax.tree.map(np.array, jax.device_get(state)), shardings)
        state, metrics = step(state, batches[3])
        jax.block_until_ready(metrics)
    assert len(compilations) == 1


def test_evaluation_sums_do_not_depend_on_the_split(initial):
    """One batch of 24 rows = three of 8: the same sums, by corruption that depends on the example alone."""
    model = Forgetful(rate=0.5)
    step = make_eval_step(model, Objective(), VOCABULARY, MESH)

    def sums(batch_size, epoch):
        total = None
        for n in range(24 // batch_size):
            batch = Rows().batch(Store(20), n, range(batch_size), batch_size=batch_size, seed=None)
            batch["epoch"] = batch["epoch"] + epoch
            output, memory = step(variables(initial.params, {}), None, put(batch))
            assert memory is None
            total = output if total is None else jax.tree.map(jnp.add, total, output)
        return jax.device_get(total)

    whole = sums(24, 0)
    assert whole["terms"]["row"][1] == 20
    assert_near(sums(8, 5), whole, 1e-6)


# The parts of a step, with a straight line for a model


@dataclass(frozen=True)
class Line:
    """The total is w x, with x the row's features and noise of its keys and of dropout; a count of finished rows."""

    in_loader: bool = False
    copies: int | None = None

    def prepare(self, batch, keys, vocabulary):
        noise = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
        return {**batch, "x": batch["tokens"][:, :3] + noise}

    def weights(self, batch):
        return {"line": batch["x"].shape[0]}

    def loss(self, model, variables, batch, memory, key):
        x = batch["x"] + jax.random.uniform(key, (3,))
        total = (x @ variables["params"]["w"]).sum()
        fixed = {"rows": variables["params"]["rows"] + x.shape[0]}
        return LossOutput({"line": total}, {}, fixed=fixed)


@cache
def compiled(objective, seed, accumulation):
    shardings = jax.tree.map(lambda leaf: replicated(MESH), line_state())
    return make_train_step(None, objective, SGD, VOCABULARY, shardings, seed=seed, accumulation=accumulation)


def line_state():
    params = {"w": np.zeros(3, np.float32)}
    return TrainState(np.int32(0), params, {"rows": np.float32(0)}, SGD.tx.init(params), None)


def line_step(objective=None, seed=3, accumulation=1):
    step = compiled(objective or Line(), seed, accumulation)
    return jax.device_put(line_state(), replicated(MESH)), step


def gradient(batch, state_and_step, count=1):
    """The gradient of the last of `count` steps on the batch, by the movement of w."""
    state, step = state_and_step
    moved = np.zeros(3)
    for _ in range(count):
        before = np.array(state.params["w"])
        state, _ = step(state, put(batch))
        moved = (before - np.array(state.params["w"])) / RATE
    return moved


def test_the_seed_the_step_and_the_epoch_decide_the_noise():
    batch = make_batch()
    later = {**batch, "epoch": batch["epoch"] + 1}
    one = gradient(batch, line_step())
    assert_equal(one, gradient(batch, line_step()))
    assert not np.allclose(one, gradient(batch, line_step(seed=4)))
    assert not np.allclose(one, gradient(batch, line_step(), count=2))
    assert not np.allclose(one, gradient(later, line_step()))


def test_micro_batches_have_noise_of_their_own():
    """The dropout of 8 micro-batches of one row averages out; were it shared, it would be one draw."""
    batch = make_batch()
    x = prepare(Line(), batch, VOCABULARY, 3)["x"].mean(0)
    noise = np.stack([gradient(batch, line_step(accumulation=parts)) - x for parts in (1, 8)])
    assert not np.allclose(noise[0], noise[1])
    keys = jax.random.split(jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0x64726F70), 0), 8)
    expected = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys).mean(0)
    np.testing.assert_allclose(noise[1], expected, atol=2e-5)


def test_the_state_is_donated():
    state, step = line_step()
    old = state.params["w"]
    step(state, put(make_batch()))
    assert old.is_deleted()


def test_update_scale_scales_the_update():
    batch = make_batch()
    scaled = {**batch, "update_scale": np.full(8, 0.25, np.float32)}
    np.testing.assert_allclose(gradient(scaled, line_step()) * 4, gradient(batch, line_step()), rtol=1e-6)


def test_new_fixed_values_go_from_micro_batch_to_micro_batch():
    state, step = line_step(accumulation=8)
    for n in range(2):
        state, _ = step(state, put(make_batch(n=n)))
    assert float(state.fixed["rows"]) == 16


def test_preparing_in_the_loader_gives_the_same_step():
    batch = make_batch()
    transform = loader_transform(Line(in_loader=True), Store(), 3)
    assert transform is not None and loader_transform(Line(), Store(), 3) is None
    ready = transform(batch)
    assert all(isinstance(value, np.ndarray) for value in ready.values())
    assert_near(gradient(ready, line_step(Line(in_loader=True))), gradient(batch, line_step()), 1e-6)


def test_rare_tokens_are_known_by_the_stores_counts(speeches, folder):
    experiment = smaller("bert", speeches, folder)
    _, stores = open_text(experiment.data, ("train",))
    store, reader, rare = stores["train"], experiment.data.reader, Masked(rarity=0.7)
    batch = reader.batch(store, 0, range(4), batch_size=4, seed=0)
    with pytest.raises(ValueError, match=r"objective.rarity 0.7 needs the tokens of a plain text"):
        loader_transform(rare, Store(), 0)
    transform = loader_transform(rare, store, 0)
    assert transform is not None
    ready = transform(batch)
    counts = np.bincount(store.tokens, minlength=store.vocabulary.size)[batch["tokens"]]
    assert "counts" not in ready
    assert_equal(ready, prepare(rare, {**batch, "counts": np.float32(counts)}, store.vocabulary, 0))
    shapes = prepared_shapes(rare, reader, store, 4)
    assert {name: x.shape for name, x in shapes.items()} == {name: x.shape for name, x in ready.items()}


def test_static_corruption_repeats_after_its_copies():
    batch = make_batch()
    later = {**batch, "epoch": batch["epoch"] + 2}

    def features(objective, batch):
        return np.asarray(prepare(objective, batch, VOCABULARY, 0)["x"])

    assert_equal(features(Line(copies=2), batch), features(Line(copies=2), later))
    assert not np.allclose(features(Line(), batch), features(Line(), later))


def test_evaluation_repeats_its_corruption():
    batch = make_batch()
    later = {**batch, "epoch": batch["epoch"] + 2}
    assert_equal(prepare(Line(), batch, VOCABULARY, None)["x"], prepare(Line(), later, VOCABULARY, None)["x"])


def test_shapes_of_a_prepared_batch_without_reading_one():
    shapes = prepared_shapes(Objective(in_loader=True), Rows(), Store(), 8)
    batch = prepared(make_batch())
    assert {name: (x.shape, x.dtype) for name, x in shapes.items()} == {
        name: (x.shape, x.dtype) for name, x in batch.items()
    }


def test_terms_without_a_count_are_named():
    class Wrong(Line):
        def weights(self, batch):
            return {"lm": 1.0}

    state, step = line_step(Wrong())
    with pytest.raises(ValueError, match=r"Wrong: loss has the terms \['line'\], weights \['lm'\]"):
        step(state, put(make_batch()))
