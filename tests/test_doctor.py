from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rich.console import Console

from ctx_jax.data.readers import Blocks, Lanes
from ctx_jax.doctor import bytes_per_device, diagnose, findings, show, size, split
from ctx_jax.experiment import Data, Experiment, find
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.transformer_xl import TransformerXLConfig
from ctx_jax.objectives.causal import Causal
from ctx_jax.objectives.masked import Masked
from ctx_jax.objectives.segment import Segment
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.training.loop import Training
from ctx_jax.training.optimizers import AdamW

DEVICES = len(jax.devices())


def experiment_of(model: Any, objective: Any, reader: Any) -> Experiment:
    return Experiment(
        name="tiny",
        data=Data(reader=reader, batch_size=2 * DEVICES),
        model=model,
        objective=objective,
        optimizer=AdamW(),
        training=Training(steps=10),
        mesh=Mesh(),
    )


def test_without_an_experiment_it_says_what_is_here():
    found = findings()
    assert set(found) == {"devices", "versions", "attention"}
    assert sum(device["count"] for device in found["devices"]) == DEVICES
    assert found["versions"]["jax"] == jax.__version__
    assert found["attention"]["path"] == "xla"


def test_fine_tuning_needs_no_examples():
    needs = findings(find("finetune:classification"))["experiment"]
    assert {"classifier/kernel", "classifier/bias"} <= {tensor["name"] for tensor in needs["tensors"]}


def test_masks_drawn_by_counts_need_no_text():
    needs = findings(find("bert:distil"))["experiment"]
    assert needs["parameters"] == 66_985_530 + 70 * 769  # DistilBERT, of 30,592 tokens instead of 30,522


def test_gpt2_needs_what_its_paper_says():
    gpt2 = experiment_of(GptConfig(vocabulary_multiple=1), Causal(), Blocks(length=1024))
    needs = findings(gpt2)["experiment"]
    assert needs["parameters"] == 124_439_808
    tensors = {tensor["name"]: tensor for tensor in needs["tensors"]}
    assert sum(tensor["parameters"] for tensor in tensors.values()) == 124_439_808
    assert tensors["tokens/embedding"] == {
        "name": "tokens/embedding",
        "shape": [50257, 768],
        "axes": ["vocabulary", "table"],
        "split": [[], []],
        "parameters": 50257 * 768,
        "bytes_per_device": 4 * 50257 * 768,
    }
    needed = needs["bytes_per_device"]
    assert needed["parameters"] == needed["gradients"] == 4 * 124_439_808
    assert 0 <= needed["optimizer"] - 8 * 124_439_808 < 100  # two moments and counters
    assert needed["memory"] == 0
    assert needed["total"] == sum(needed[part] for part in ("parameters", "gradients", "optimizer", "memory"))
    matrices = 12 * 12 * 768**2 + 50257 * 768
    assert needs["train_flops_per_token"] == pytest.approx(6 * matrices + 12 * 6 * 768 * 1025)  # half of all pairs


@pytest.mark.parametrize(
    ("model", "objective", "reader"),
    [(BertConfig, Masked(), Blocks(length=32)), (TransformerXLConfig, Segment(), Lanes(length=32))],
)
def test_each_kind_of_model_is_shown(model: Any, objective: Any, reader: Any):
    config = model(vocabulary_size=2048, width=16, layers=2, heads=2, feed_forward=32)
    found = findings(experiment_of(config, objective, reader))
    needs = found["experiment"]
    memory = getattr(config, "memory_length", 0)
    assert needs["bytes_per_device"]["memory"] == 2 * memory * (2 * 16 * 4 + 4)  # rows, hidden states and document ids
    json.dumps(found, allow_nan=False)
    output = io.StringIO()
    show(found, Console(file=output, width=160))
    for tensor in needs["tensors"]:
        assert tensor["name"] in output.getvalue()
    assert f"{needs['parameters']:,}" in output.getvalue()
    assert found["versions"]["flax"] in output.getvalue()


def test_a_mesh_that_does_not_fit_is_named():
    gpt = experiment_of(GptConfig(), Causal(), Blocks(length=32))
    with pytest.raises(ValueError, match=f"does not fit {DEVICES} devices"):
        findings(dataclasses.replace(gpt, mesh=Mesh(data=-1, fsdp=DEVICES + 1)))


def test_devices_need_not_be_here():
    """Rows of two devices more than there are, and a table of 80 columns in which no name is broken."""
    config = TransformerXLConfig(vocabulary_size=2048, width=16, layers=2, heads=2, feed_forward=32)
    experiment = dataclasses.replace(experiment_of(config, Segment(), Lanes(length=32)), mesh=Mesh(2 * DEVICES, 2, 2))
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, batch_size=8 * DEVICES))
    found = findings(experiment)
    needs = found["experiment"]
    assert needs["mesh"] == {"data": 2 * DEVICES, "fsdp": 2, "tensor": 2}
    assert needs["bytes_per_device"]["memory"] == 2 * config.memory_length * (2 * 16 * 4 + 4)
    output = io.StringIO()
    show(found, Console(file=output, width=80))
    lines = output.getvalue().splitlines()
    for tensor in needs["tensors"]:
        (line,) = [line for line in lines if tensor["name"] in line.split()]
        assert f"{tensor['parameters']:,}" in line and size(tensor["bytes_per_device"]) in line
    assert any("layers=2 width=16/fsdp heads=2/tensor channels=8" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_bytes_and_splits_of_a_sharded_tensor():
    mesh = AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"))
    sharding: Any = NamedSharding(mesh, PartitionSpec(("tensor", "fsdp"), None, "data"))
    assert split(sharding, 4) == [["fsdp"], [], ["data"], []]
    leaf = jax.ShapeDtypeStruct((16, 3, 6), jnp.bfloat16, sharding=sharding)
    assert bytes_per_device({"a": leaf, "b": leaf}) == 2 * (4 * 3 * 3) * 2


def test_tables_are_for_people_and_values_for_programs(capsys: pytest.CaptureFixture[str]):
    assert diagnose() == findings()
    shown = capsys.readouterr()
    assert shown.out == "" and "attention" in shown.err


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**51, "2048.0 TiB")]
)
def test_sizes_are_readable(count: int, text: str):
    assert size(count) == text
