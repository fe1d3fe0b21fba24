"""The same training on one device and on eight, on meshes of every kind."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.layers.dropout import dropout
from ctx_jax.objectives import place_targets, sample
from ctx_jax.parallel.mesh import Mesh, check_batch
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.training.checkpoints import Checkpoints
from ctx_jax.training.optimizers import Adafactor, AdamW
from ctx_jax.training.schedules import WarmUp
from ctx_jax.training.state import abstract_state, init_state, shardings_of, variables
from ctx_jax.training.step import make_eval_step, make_train_step, on_mesh
from tests.training.fakes import (
    VOCABULARY,
    Model,
    Objective,
    assert_equal,
    assert_near,
    assert_near_together,
    make_batch,
    prepared,
)

MODEL = Model()
OPTIMIZER = AdamW(WarmUp(rate=0.02, decay="constant"), epsilon=0.1).build(10)  # a small epsilon amplifies rounding
MESHES = [Mesh(data=8), Mesh(data=2, fsdp=2, tensor=2), Mesh(data=1, fsdp=8)]


def build(config):
    mesh = config.build()
    assert mesh.size == 8
    return mesh


def run(mesh, accumulation=1, steps=3, model=MODEL, optimizer=OPTIMIZER):
    """The state after some steps, the metrics of each, and how many programs the step was."""
    shapes = prepared(make_batch(16))
    state = init_state(model, optimizer, shapes, mesh, seed=0)
    step = make_train_step(
        model,
        Objective(),
        optimizer,
        VOCABULARY,
        shardings_of(abstract_state(model, optimizer, shapes, mesh)),
        seed=3,
        accumulation=accumulation,
    )
    metrics = []
    for n in range(steps):
        batch = jax.device_put(make_batch(16, n, rows=40), batch_sharding(mesh))
        state, measured = step(state, batch)
        metrics.append(jax.device_get(measured))
    return state, metrics


@pytest.fixture(scope="module")
def single():
    return run(Mesh().build(jax.devices()[:1]))


@pytest.mark.parametrize("config", MESHES, ids=Mesh.describe)
def test_eight_devices_equal_one(single, config):
    """With rows that are padding and a memory; accumulation where it is cheap to add."""
    state, metrics = run(build(config), accumulation=2)
    assert_near(metrics, single[1], 5e-6)
    assert_equal(state.memory.documents, single[0].memory.documents)
    assert_near_together(state.memory.hidden, single[0].memory.hidden, 5e-7)
    assert_near_together(state.params, single[0].params, 5e-8)
    assert_near_together(state.opt_state[1].mu, single[0].opt_state[1].mu, 1e-6)
    assert_near_together(state.opt_state[1].nu, single[0].opt_state[1].nu, 2e-6)


def test_the_state_is_born_and_stays_split():
    mesh = build(Mesh(data=2, fsdp=2, tensor=2))
    shapes = prepared(make_batch(16))
    born = init_state(MODEL, OPTIMIZER, shapes, mesh, seed=0)
    state, _ = run(mesh, steps=2)

    def parts(x):
        """Of how many parts each array is, by its pieces in memory."""
        return x.size // x.addressable_shards[0].data.size

    for tree in (born, state):
        moments = tree.opt_state[1]
        for params in (tree.params, moments.mu, moments.nu):
            layers = params["stack"]["layers"]
            assert parts(params["embedding"]) == 4
            assert parts(layers["up"]["kernel"]) == parts(layers["down"]["kernel"]) == 4
            assert parts(layers["up"]["bias"]) == 2
            assert parts(layers["norm"]["scale"]) == 1
        assert parts(tree.memory.hidden) == parts(tree.memory.documents) == 4
    assert jax.tree.map(lambda x: x.sharding, born) == jax.tree.map(lambda x: x.sharding, state)


def test_initial_parameters_do_not_depend_on_the_mesh():
    shapes = prepared(make_batch(16))
    one = init_state(MODEL, OPTIMIZER, shapes, Mesh().build(jax.devices()[:1]), seed=0)
    other = init_state(MODEL, OPTIMIZER, shapes, build(MESHES[1]), seed=0)
    assert_equal(one, other)


def test_dropout_does_not_depend_on_the_mesh():
    """To the bit where nothing is summed, and in a step as near as without it: another mask differs by percents."""
    x = jax.random.normal(jax.random.key(1), (16, 6, 8))

    def drop(x):
        y, pull = jax.vjp(lambda x: dropout(x, 0.3, jax.random.key(2)), x)
        return y, pull(jnp.ones_like(y))

    mesh = build(MESHES[1])
    assert_equal(jax.jit(on_mesh(mesh, drop), in_shardings=batch_sharding(mesh))(x), jax.jit(drop)(x))

    model = Model(rate=0.3)
    _, one = run(Mesh().build(jax.devices()[:1]), steps=1, model=model)
    _, other = run(mesh, steps=1, model=model)
    assert_near(other, one, 5e-6)


def test_adafactor_on_a_mesh():
    optimizer = Adafactor(WarmUp(rate=1e-2, decay="constant"), factored_size=16).build(10)
    one, _ = run(Mesh().build(jax.devices()[:1]), steps=2, optimizer=optimizer)
    other, _ = run(build(MESHES[1]), steps=2, optimizer=optimizer)
    assert_near_together(other.params, one.params, 2e-7)


def test_a_checkpoint_is_restored_onto_another_mesh(single, tmp_path):
    state, _ = single
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state, {})
        for config in MESHES[1:]:
            abstract = abstract_state(MODEL, OPTIMIZER, prepared(make_batch(16)), build(config))
            restored = checkpoints.restore(3, abstract)
            assert_equal(restored, state)
            assert jax.tree.map(lambda x: x.sharding, restored) == shardings_of(abstract)


def test_evaluation_on_a_mesh(single):
    batch = make_batch(16)
    results = []
    for mesh in (Mesh().build(jax.devices()[:1]), build(MESHES[1])):
        shapes = prepared(batch)
        state = init_state(MODEL, OPTIMIZER, shapes, mesh, seed=0)
        step = make_eval_step(MODEL, Objective(), VOCABULARY, mesh)
        sums, memory = step(variables(state.params, {}), state.memory, jax.device_put(batch, batch_sharding(mesh)))
        assert memory.hidden.sharding.is_equivalent_to(batch_sharding(mesh), 4)
        results.append(jax.device_get((sums, memory)))
    assert_near(results[1], results[0], 2e-6)


def test_an_axis_that_does_not_divide_the_mesh_is_named():
    model = Model(width=12)
    with pytest.raises(ValueError, match=r"stack/layers/down/kernel \(2, 24, 12\): its axis 'width' of 12 .* fsdp 8"):
        abstract_state(model, OPTIMIZER, prepared(make_batch(16)), build(MESHES[2]))
    with pytest.raises(ValueError, match="mesh data=3 fsdp=1 tensor=1 does not fit 8 devices"):
        Mesh(data=3).build()
    with pytest.raises(ValueError, match=r"batch_size 24 is not divisible by 16 \(data 8 x fsdp 1 x accumulation 2\)"):
        check_batch(build(MESHES[0]), 24, 2)
    assert np.prod(list(Mesh(fsdp=2).build().shape.values())) == 8


def test_targets_are_chosen_and_placed_without_communication():
    rows = batch_sharding(build(Mesh(data=8)))

    def choose(noise, candidates):
        return place_targets(jax.vmap(partial(sample, count=5))(noise, candidates), noise, 5)

    shapes = [jax.ShapeDtypeStruct((16, 32), dtype) for dtype in (jnp.uint32, bool)]
    program = jax.jit(choose, in_shardings=(rows, rows), out_shardings=rows).lower(*shapes).compile().as_text()
    assert program
    assert not any(name in program for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
