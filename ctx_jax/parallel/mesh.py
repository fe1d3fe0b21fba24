"""The device mesh as configuration, and the start of runs that span several hosts."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

AnyMesh = jax.sharding.Mesh | AbstractMesh
"""A mesh of devices, or one that only says how many there would be: enough for shapes and shardings."""


@dataclass(frozen=True)
class Mesh:
    """Devices as a grid. One axis may be -1: all the devices that the others leave.

    Batches are split over data and fsdp; `sharding.RULES` says what is split over fsdp and tensor.
    """

    data: int = -1
    """Groups of devices that each hold a whole copy of the parameters."""
    fsdp: int = 1
    """Devices that share one copy of the parameters and gather it layer by layer."""
    tensor: int = 1
    """Devices that share the heads, the feed-forward width and the vocabulary of each layer."""

    def __post_init__(self) -> None:
        sizes = astuple(self)
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(
                f"mesh {self.describe()}: choose sizes of at least 1, and -1 (the rest) for one axis at most"
            )

    def describe(self) -> str:
        return f"data={self.data} fsdp={self.fsdp} tensor={self.tensor}"

    def build(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """The mesh over `devices` (all of the run's without any). Raises ValueError if it does not fit them."""
        devices = jax.devices() if devices is None else devices
        sizes = astuple(self)
        known = math.prod(size for size in sizes if size != -1)
        sizes = tuple(len(devices) // known if size == -1 else size for size in sizes)
        if math.prod(sizes) != len(devices):
            raise ValueError(
                f"mesh {self.describe()} does not fit {len(devices)} devices: choose sizes whose product is "
                f"{len(devices)}, or one of them -1 and the product of the others a divisor of it"
            )
        return jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=devices)

    def abstract(self) -> AbstractMesh:
        """The mesh without its devices, of any number; one with a free axis has those of this run, as `build`."""
        sizes = astuple(self)
        if -1 in sizes:
            return self.build().abstract_mesh
        return AbstractMesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def check_batch(mesh: AnyMesh, batch_size: int, accumulation: int = 1, name: str = "batch_size") -> None:
    """Raises ValueError unless every device gets the same number of rows of every micro-batch."""
    data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
    divisor = data * fsdp * accumulation
    if batch_size % divisor:
        raise ValueError(
            f"{name} {batch_size} is not divisible by {divisor} (data {data} x fsdp {fsdp} x accumulation "
            f"{accumulation}): choose a multiple of {divisor}"
        )


def start_hosts(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins this process to a run of several; to be called before anything touches a device.

    Args:
        coordinator: "host:port" of process 0, with the number of `processes` and the number of this `process`;
            without it the tasks of a Slurm step and the workers of a TPU pod find each other, and a process that runs
            alone stays alone.
    """
    if coordinator is not None:
        if processes is None or process is None:
            raise ValueError(f"coordinator {coordinator}: give the number of processes and of this process too")
        jax.distributed.initialize(coordinator, processes, process)
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 or "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        jax.distributed.initialize()
