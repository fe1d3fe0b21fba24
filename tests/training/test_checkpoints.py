from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ctx_jax.parallel.mesh import Mesh
from ctx_jax.parallel.sharding import replicated
from ctx_jax.training.checkpoints import Checkpoints, find_checkpoint
from ctx_jax.training.optimizers import Adafactor, Lamb
from ctx_jax.training.state import TrainState
from tests.training.fakes import assert_equal

MESH = Mesh().build(jax.devices()[:1])
PARAMS = {
    "embedding": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32),
    "layers": {"kernel": np.array([[np.nextafter(np.float32(1), np.float32(2)), -0.0]], np.float32)},
}


def make_state(step=3, params=PARAMS, optimizer=None, memory=True):
    tx = (optimizer or Lamb()).build(10).tx
    kept = {"hidden": jnp.full((2, 3), 1 / 3, jnp.bfloat16), "documents": jnp.arange(2)} if memory else None
    state = TrainState(jnp.int32(step), params, {"average": jnp.float32(0.1)} if memory else {}, tx.init(params), kept)
    return jax.device_put(state, replicated(MESH))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.mark.parametrize("memory", [True, False])
def test_a_state_comes_back_bit_for_bit(tmp_path, capfd, memory):
    state = make_state(memory=memory)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(3, state, {"experiment": {"name": "a"}})
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        found = checkpoints.restore(3, abstract(state))
        assert checkpoints.record(3) == {"step": 3, "experiment": {"name": "a"}}
        assert_equal(checkpoints.restore_params(3, abstract(state).params), state.params)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, state)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)),
        *(jax.tree.map(jnp.atleast_1d, tree) for tree in (found, state)),
    )
    assert capfd.readouterr() == ("", "")


def test_saving_does_not_see_what_happens_to_donated_buffers(tmp_path):
    state = make_state(params={"kernel": jnp.zeros((512, 1024))})
    double = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        described = abstract(state)
        for _ in range(5):
            state = double(state)
        jax.block_until_ready(state)
    with Checkpoints(tmp_path) as checkpoints:
        assert not np.any(checkpoints.restore(1, described).params["kernel"])


def test_the_newest_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 5):
            checkpoints.save(step, make_state(step), {})
        assert checkpoints.steps() == [2, 5] and checkpoints.latest() == 5
        with pytest.raises(RuntimeError, match=r"step 4 was not saved: .* already holds step 5"):
            checkpoints.save(4, make_state(4), {})
    assert find_checkpoint(tmp_path) == (tmp_path, 5)
    assert find_checkpoint(tmp_path / "checkpoints" / "2") == (tmp_path, 2)


def test_a_save_that_was_killed_is_cleared_away(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, make_state(1), {})
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "1", folder / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
    assert (folder / "2.orbax-checkpoint-tmp").exists()  # readers change nothing
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 1
        checkpoints.save(2, make_state(2), {})
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_what_is_no_checkpoint_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "checkpoints" / "7"):
        with pytest.raises(FileNotFoundError, match=f"{path} has no checkpoint"):
            find_checkpoint(path)
    assert list(tmp_path.iterdir()) == []


def test_another_experiment_is_named_with_the_array_that_differs(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, make_state(), {})
        wider = {**PARAMS, "embedding": np.zeros((4, 5), np.float32)}
        with pytest.raises(ValueError, match=r"params embedding has shape \(4, 3\), this experiment's has \(4, 5\)"):
            checkpoints.restore(1, abstract(make_state(params=wider)))
        with pytest.raises(ValueError, match=r"params extra has shape None, this experiment's has \(1,\)"):
            checkpoints.restore(1, abstract(make_state(params={**PARAMS, "extra": np.zeros(1, np.float32)})))
        with pytest.raises(ValueError, match=r"opt_state .* has shape .*: choose the experiment"):
            checkpoints.restore(1, abstract(make_state(optimizer=Adafactor())))


def test_matching_parameters_are_taken_and_the_rest_is_listed(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, make_state(), {})
        head = {"embedding": np.zeros((4, 3)), "layers": {"kernel": np.ones((2, 2))}, "head": {"bias": np.ones(2)}}
        params = jax.device_put(jax.tree.map(np.float32, head), replicated(MESH))
        found, rest = checkpoints.restore_matching(1, params)
        assert rest == ["head/bias", "layers/kernel"]
        assert_equal(found, {**params, "embedding": PARAMS["embedding"]})
        assert checkpoints.restore_matching(1, {"head": params["head"]}) == ({"head": params["head"]}, ["head/bias"])


def test_optax_states_of_every_kind_are_restored(tmp_path):
    tx = optax.chain(optax.trace(0.9), optax.masked(optax.scale_by_adam(), {"kernel": True, "bias": False}))
    params = jax.device_put({"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}, replicated(MESH))
    state = TrainState(jnp.int32(1), params, {}, tx.init(params), None)
    state = jax.device_put(state, replicated(MESH))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        found = checkpoints.restore(1, abstract(state))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert_equal(found, state)
