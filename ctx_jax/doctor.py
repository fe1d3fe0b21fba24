"""`doctor [EXPERIMENT]`: what will run here, and what an experiment needs, before anything is allocated."""

from __future__ import annotations

import math
import platform
from collections import Counter
from functools import partial
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ctx_jax import kernels
from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.experiment import Experiment
from ctx_jax.layers.parameters import axes_of
from ctx_jax.parallel.mesh import check_batch
from ctx_jax.parallel.sharding import parameter_name
from ctx_jax.training.flops import step_flops_per_token
from ctx_jax.training.state import abstract_fixed, abstract_state, initial_parameters
from ctx_jax.training.step import prepare

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "sentencepiece",
    "tokenizers",
    "sentencex",
    "tensorflow-datasets",
    "tyro",
    "rich",
    "tensorboardX",
    "matplotlib",
)


def diagnose(experiment: Experiment | None = None) -> dict[str, Any]:
    """Shows the `findings` on stderr and returns them."""
    result = findings(experiment)
    show(result, Console(stderr=True))
    return result


def findings(experiment: Experiment | None = None) -> dict[str, Any]:
    """{"devices", "versions", "attention"} and, for an experiment, "experiment": `needs` of it; plain values."""
    result = {"devices": devices(), "versions": versions(), "attention": attention_path()}
    return result if experiment is None else {**result, "experiment": needs(experiment)}


def devices() -> list[dict[str, Any]]:
    """{"platform", "kind", "count", "memory_bytes"} of each kind of device, over all processes; memory of one device,
    None where it is not known."""
    found = Counter((device.platform, device.device_kind) for device in jax.devices())
    local = {device.device_kind: device.memory_stats() for device in jax.local_devices()}
    return [
        {
            "platform": name,
            "kind": kind,
            "count": count,
            "memory_bytes": (local.get(kind) or {}).get("bytes_limit"),
        }
        for (name, kind), count in found.items()
    ]


def versions() -> dict[str, str | None]:
    """The version of Python and of each dependency; None for what is not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def attention_path() -> dict[str, str]:
    """{"path", "why"}: how a model in bfloat16 computes attention on these devices."""
    if jax.default_backend() == "tpu":
        return {"path": "kernels", "why": "splash attention without dropout; relative attention by XLA"}
    obstacle = kernels.obstacle(jnp.zeros((1, 1, 1, 1), jnp.bfloat16), kernels.HEADS)
    if obstacle is None:
        return {"path": "kernels", "why": "in bfloat16: the fused kernels"}
    return {"path": "xla", "why": obstacle}


def needs(experiment: Experiment) -> dict[str, Any]:
    """What an experiment takes, by shape evaluation alone:

    name, mesh              the experiment's name; the size of each mesh axis
    parameters              how many there are
    tensors                 {"name", "shape", "axes", "split", "parameters", "bytes_per_device"} of each tensor; `split`
                            gives for each of its axes the mesh axes that divide it
    bytes_per_device        {"parameters", "gradients", "optimizer", "memory", "total"}, without activations;
                            "fixed" is a teacher
    train_flops_per_token   floating-point operations of a training step per position of the batch

    The devices need not be there, unless an axis of the mesh is -1. Raises ValueError if the mesh does not fit them,
    the parameters or the batch.
    """
    mesh = experiment.mesh.abstract()
    batch_size = experiment.data.batch_size
    check_batch(mesh, batch_size, experiment.training.accumulation)
    model = experiment.model.build()
    batch = prepared_shapes(experiment)
    optimizer = experiment.optimizer.build(experiment.training.steps)
    state = abstract_state(model, optimizer, batch, mesh, abstract_fixed(experiment.objective, batch, mesh))
    axes = axes_of(jax.eval_shape(lambda: initial_parameters(model, batch, mesh, 0)))
    tensors = [
        {
            "name": parameter_name(path),
            "shape": list(leaf.shape),
            "axes": list(names),
            "split": split(leaf.sharding, leaf.ndim),
            "parameters": leaf.size,
            "bytes_per_device": bytes_per_device(leaf),
        }
        for (path, leaf), names in zip(
            jax.tree_util.tree_leaves_with_path(state.params),
            jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple)),
            strict=True,
        )
    ]
    parts = {
        "parameters": bytes_per_device(state.params),
        "gradients": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.opt_state),
        "memory": bytes_per_device(state.memory),
    }
    if state.fixed:
        parts["fixed"] = bytes_per_device(state.fixed)
    return {
        "name": experiment.name,
        "mesh": dict(mesh.shape),
        "parameters": sum(tensor["parameters"] for tensor in tensors),
        "tensors": tensors,
        "bytes_per_device": {**parts, "total": sum(parts.values())},
        "train_flops_per_token": step_flops_per_token(
            experiment.model,
            experiment.objective,
            batch["tokens"].shape[1],
            batch["targets"].shape[1] if batch["targets"].ndim > 1 else 0,  # a row's label needs no vocabulary
        ),
    }


def prepared_shapes(experiment: Experiment) -> Batch:
    """Shapes of a prepared batch with all that any reader gives, so that no text is needed."""
    rows, length = experiment.data.batch_size, experiment.data.reader.length
    per_position = ("tokens", "documents", "positions", "words", "next_tokens", "next_documents", "segments")
    batch = {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in per_position}
    batch |= {name: jax.ShapeDtypeStruct((rows,), jnp.int32) for name in ("example", "epoch", "relation", "labels")}
    batch |= {
        "reversed": jax.ShapeDtypeStruct((rows,), jnp.bool_),
        "counts": jax.ShapeDtypeStruct((rows, length), jnp.float32),
    }
    vocabulary = Vocabulary(experiment.model.vocabulary_size, *range(7))
    return jax.eval_shape(partial(prepare, experiment.objective, vocabulary=vocabulary, seed=0), batch)


def split(sharding: NamedSharding, ndim: int) -> list[list[str]]:
    """For each axis of a tensor, the mesh axes of more than one device that divide it."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    entries += [()] * (ndim - len(entries))
    return [[axis for axis in entry if axis is not None and sharding.mesh.shape[axis] > 1] for entry in entries]


def bytes_per_device(tree: Any) -> int:
    """Of a tree of shapes with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def show(found: dict[str, Any], console: Console) -> None:
    """Prints findings for people."""
    here = Table(title="What will run here", title_justify="left", show_header=False)
    for device in found["devices"]:
        memory = f", {size(device['memory_bytes'])} each" if device["memory_bytes"] else ""
        here.add_row("devices", f"{device['count']} x {device['kind']} ({device['platform']}){memory}")
    here.add_row("attention", "{path}: {why}".format(**found["attention"]))
    for package, version in found["versions"].items():
        here.add_row(package, version or "[red]not installed")
    console.print(here)
    if "experiment" in found:
        show_needs(found["experiment"], console)


def show_needs(needs: dict[str, Any], console: Console) -> None:
    """A tensor takes two lines, its name and its axes: a table that fits any terminal."""
    mesh = " x ".join(f"{axis} {count}" for axis, count in needs["mesh"].items())
    devices = math.prod(needs["mesh"].values())
    table = Table(
        title=f"Parameters of {needs['name']} on a mesh of {mesh}: {devices} device{'s' * (devices > 1)}",
        title_justify="left",
        show_footer=True,
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("tensor\n  axis=length/mesh axes that split it", "total", overflow="fold")
    table.add_column("parameters", f"{needs['parameters']:,}", justify="right", no_wrap=True)
    table.add_column("per device", size(needs["bytes_per_device"]["parameters"]), justify="right", no_wrap=True)
    for tensor in needs["tensors"]:
        axes = [
            f"{axis}={length}" + "".join(f"/{name}" for name in dividing)
            for length, axis, dividing in zip(tensor["shape"], tensor["axes"], tensor["split"], strict=True)
        ]
        described = Group(tensor["name"], Padding(Text(" ".join(axes), style="dim"), (0, 0, 0, 2)))
        table.add_row(described, f"{tensor['parameters']:,}", size(tensor["bytes_per_device"]))
    console.print(table)
    totals = Table(title="What a training step needs", title_justify="left", show_header=False)
    for part, count in needs["bytes_per_device"].items():
        totals.add_row(f"{part} per device" + (" (activations come on top)" if part == "total" else ""), size(count))
    totals.add_row("operations per token", f"{needs['train_flops_per_token'] / 1e6:,.1f} MFLOP")
    console.print(totals)


def size(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{count} B"
