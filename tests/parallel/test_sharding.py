"""No parameter is left whole by mistake, and what is wrong names the tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from ctx_jax.doctor import needs, prepared_shapes
from ctx_jax.experiment import find
from ctx_jax.layers.parameters import AXES, axes_of, unboxed
from ctx_jax.parallel import sharding
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.parallel.sharding import check_rules, parameter_shardings
from ctx_jax.training.state import initial_parameters

MODELS = ("bert:tiny", "gpt:tiny", "transformer_xl:tiny", "xlnet:tiny")


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Any:
    return AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"))


def shardings(mesh: Any, **tensors: tuple[tuple[int, ...], tuple[str, ...]]) -> Any:
    shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, (shape, _) in tensors.items()}
    return parameter_shardings(mesh, shapes, {name: axes for name, (_, axes) in tensors.items()})


KERNEL = ((1024, 1024), ("width", "feed_forward"))
"""2**20 parameters: fsdp and tensor split them."""


def test_every_rule_is_of_an_axis_that_something_has():
    check_rules()
    used = set()
    for name in MODELS:
        experiment = find(name)
        model, batch, mesh = experiment.model.build(), prepared_shapes(experiment), Mesh(1).abstract()
        axes = axes_of(jax.eval_shape(lambda m=model, b=batch, on=mesh: initial_parameters(m, b, on, 0)))
        used |= {
            axis for names in jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple)) for axis in names
        }
    assert used | {"batch", "length", "logits"} == AXES == sharding.RULES.keys()


@pytest.mark.parametrize(
    ("rule", "axes", "message"),
    [
        ("colour", ("fsdp",), "the rule for 'colour' in .* matches nothing: .* has no such axis"),
        ("head", ("tensor",), "the rule for 'head' .* no such axis; did you mean 'heads'?"),
        ("width", ("fdsp",), "the rule for 'width' .* names 'fdsp', which is no axis of a mesh; did you mean 'fsdp'?"),
    ],
)
def test_a_rule_that_matches_nothing(monkeypatch, rule, axes, message):
    monkeypatch.setitem(sharding.RULES, rule, axes)
    with pytest.raises(ValueError, match=message):
        shardings(mesh_of(), kernel=KERNEL)


def test_an_axis_without_a_rule(monkeypatch):
    with pytest.raises(ValueError, match=r"parameter kernel \(8, 4\): no rule says how its axis 'widht' is split; did"):
        shardings(mesh_of(), kernel=((8, 4), ("widht", "heads")))
    monkeypatch.delitem(sharding.RULES, "norm")
    with pytest.raises(ValueError, match=r"axis 'norm' of layers\.parameters.AXES has no rule"):
        shardings(mesh_of(), kernel=KERNEL)


def test_a_mesh_axis_that_splits_nothing():
    head = {"head": ((1024, 1024), ("width", "activation"))}
    with pytest.raises(ValueError, match=r"mesh axis tensor 4 splits no parameter, not even head \(1024, 1024\)"):
        shardings(mesh_of(fsdp=2, tensor=4), **head)
    assert shardings(mesh_of(fsdp=2), **head)["head"].shard_shape((1024, 1024)) == (512, 1024)


def test_more_than_two_percent_whole_by_accident():
    """49 kernels that are split and one that is not are 2 % exactly."""
    kernels = {f"kernel{number}": KERNEL for number in range(49)}
    table = ((1024, 1024), ("length", "table"))
    shardings(mesh_of(tensor=4), **kernels, table=table)
    del kernels["kernel0"]
    message = (
        r"parameter table \(1024, 1024\) is whole on every device of a mesh of fsdp 2 x tensor 4, .* 2\.0% of all "
        r"parameters: no rule .* splits its axes length, table there"
    )
    with pytest.raises(ValueError, match=message):
        shardings(mesh_of(fsdp=2, tensor=4), **kernels, table=table)
    shardings(mesh_of(data=8), **kernels, table=table)  # nothing is split there, and nothing is to be


@pytest.mark.parametrize(
    ("shape", "axes", "accident"),
    [
        ((256, 256), ("length", "table"), False),  # small, whatever it is
        ((257, 256), ("length", "table"), True),
        ((4096, 1024), ("positions", "table"), False),  # a short table is meant to be whole
        ((4097, 1024), ("positions", "table"), True),  # a large one is not
        ((64, 65536), ("layers", "norm"), False),
        ((24, 64, 64), ("layers", "heads", "channels"), True),  # the rule for heads wants tensor, which is 1
    ],
)
def test_what_is_an_accident(shape, axes, accident):
    tensors = {"split": ((1024, 64), KERNEL[1]), "whole": (shape, axes)}
    if not accident:
        assert shardings(mesh_of(fsdp=2), **tensors)["whole"].shard_shape(shape) == shape
        return
    with pytest.raises(ValueError, match="parameter whole"):
        shardings(mesh_of(fsdp=2), **tensors)


@pytest.mark.parametrize("name", [*MODELS, "bert:large", "gpt:gpt3_13b", "transformer_xl:wikitext103_large"])
@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2), Mesh(1, 8, 1), Mesh(4, 1, 2)], ids=Mesh.describe)
def test_every_experiment_fits_every_kind_of_mesh(name, mesh):
    experiment = find(name)
    model, batch = experiment.model.build(), prepared_shapes(experiment)
    boxed = jax.eval_shape(lambda: initial_parameters(model, batch, mesh.abstract(), 0))
    parameter_shardings(mesh.abstract(), unboxed(boxed), axes_of(boxed))


def test_a_13b_gpt_on_256_chips_that_are_not_here():
    """A layer has 12 d^2 + 13 d parameters; 50,304 tokens, 2,048 positions and a last norm come on top."""
    d = 5120
    count = 40 * (12 * d**2 + 13 * d) + (50_304 + 2048 + 2) * d
    found = needs(replace(find("gpt:gpt3_13b"), mesh=Mesh(32, 8, 1)))
    assert found["mesh"] == {"data": 32, "fsdp": 8, "tensor": 1} and found["parameters"] == count
    split = 40 * 12 * d**2 + 50_304 * d
    assert found["bytes_per_device"]["parameters"] == 4 * (split / 8 + count - split)
    assert found["bytes_per_device"]["gradients"] == 4 * (split / 8 + count - split)
    assert 0 <= found["bytes_per_device"]["optimizer"] - 8 * (split / 8 + count - split) < 100
    query = next(tensor for tensor in found["tensors"] if tensor["name"].endswith("blocks_0/attention/query/kernel"))
    assert query["split"] == [[], ["fsdp"], [], []] and query["bytes_per_device"] == 4 * 20 * d**2 // 8
