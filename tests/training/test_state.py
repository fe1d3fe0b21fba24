from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ctx_jax.parallel.mesh import Mesh
from ctx_jax.parallel.sharding import parameter_shardings
from ctx_jax.training.optimizers import Adafactor, Adam
from ctx_jax.training.state import abstract_state, init_state, shardings_of, variables
from tests.training.fakes import Forgetful, Model, assert_equal, make_batch, prepared


@pytest.fixture(scope="module")
def mesh():
    return Mesh().build(jax.devices()[:1])


@pytest.fixture(scope="module")
def shapes():
    return jax.eval_shape(lambda: prepared(make_batch()))


@pytest.fixture(scope="module")
def state(mesh, shapes):
    return init_state(Model(), Adam().build(10), shapes, mesh, seed=0)


def test_the_abstract_state_describes_the_real_one(mesh, shapes, state):
    abstract = abstract_state(Model(), Adam().build(10), shapes, mesh)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), abstract)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)
    assert state.memory.hidden.shape == (8, 2, 4, 16) and state.memory.documents.dtype == jnp.int32
    assert int(state.step) == 0 and state.fixed == {}
    assert abstract_state(Forgetful(), Adam().build(10), shapes, mesh).memory is None


def test_the_seed_decides_the_parameters(mesh, shapes, state):
    other = init_state(Model(), Adam().build(10), shapes, mesh, seed=1).params
    assert not np.array_equal(state.params["embedding"], other["embedding"])
    layers = state.params["stack"]["layers"]["up"]["kernel"]
    assert not np.array_equal(layers[0], layers[1])


def test_moments_are_sharded_like_their_parameters(mesh, shapes):
    shardings = shardings_of(abstract_state(Model(), Adam().build(10), shapes, mesh))
    moments = shardings.opt_state[1]
    assert moments.mu == shardings.params and moments.nu == shardings.params
    assert shardings.params["embedding"].spec == PartitionSpec(("tensor", "fsdp"), None)
    assert moments.mu["stack"]["layers"]["up"]["kernel"].spec == PartitionSpec(None, ("fsdp",), ("tensor",))
    assert shardings.memory.hidden.spec == PartitionSpec(("data", "fsdp"))


def test_adafactors_unfactored_moments_are_sharded_and_its_rows_are_whole(mesh, shapes):
    abstract = abstract_state(Model(), Adafactor(factored_size=16).build(10), shapes, mesh)
    factored = abstract.opt_state[0]["stack"]["layers"]["up"]["kernel"][0]
    assert factored.v_row.shape == (2, 16) and factored.v_col.shape == (2, 32)
    assert factored.v_row.sharding.spec == PartitionSpec() and factored.v_col.sharding.spec == PartitionSpec()
    bias = abstract.opt_state[0]["stack"]["layers"]["up"]["bias"][0]
    assert bias.v.shape == (2, 32) and bias.v.sharding.spec == PartitionSpec(None, ("tensor",))


def test_fixed_parameters_are_not_trained(mesh, shapes, state):
    frozen = {"embedding": np.full((32, 16), 2.0, np.float32)}
    partly = init_state(Model(), Adam().build(10), shapes, mesh, seed=0, fixed=frozen)
    assert "embedding" not in partly.params and "embedding" not in partly.opt_state[1].mu
    whole = variables(partly.params, partly.fixed)["params"]
    assert jax.tree.structure(whole) == jax.tree.structure(state.params)
    assert_equal(whole["embedding"], frozen["embedding"])


def test_an_axis_that_does_not_divide_names_its_tensor():
    mesh = jax.sharding.AbstractMesh((1, 1, 4), ("data", "fsdp", "tensor"))
    with pytest.raises(ValueError, match=r"parameter attention/kernel \(8, 6, 2\): its axis 'heads' of 6 .* tensor 4"):
        parameter_shardings(
            mesh,
            {"attention": {"kernel": np.zeros((8, 6, 2))}},
            {"attention": {"kernel": ("width", "heads", "channels")}},
        )


def test_axes_that_claim_one_mesh_axis_are_named():
    mesh = jax.sharding.AbstractMesh((1, 2, 1), ("data", "fsdp", "tensor"))
    with pytest.raises(ValueError, match=r"parameter kernel \(8, 8\): its axes 'vocabulary' and 'width' both claim"):
        parameter_shardings(mesh, {"kernel": np.zeros((8, 8))}, {"kernel": ("vocabulary", "width")})
