"""The device mesh as configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
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
    slices: int = 1
    """Groups of devices with a fast network inside, as TPU slices: data is split over them, fsdp and tensor are not."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.data, self.fsdp, self.tensor

    def __post_init__(self) -> None:
        sizes = self.sizes
        if self.slices < 1:
            raise ValueError(f"mesh.slices {self.slices}: choose 1 or more")
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(
                f"mesh {self.describe()}: choose sizes of at least 1, and -1 (the rest) for one axis at most"
            )

        if self.data != -1 and self.data % self.slices:
            raise ValueError(
                f"mesh {self.describe()}: data {self.data} does not divide over {self.slices} slices, and fsdp and "
                "tensor stay inside one: choose a multiple"
            )

    def describe(self) -> str:
        return f"data={self.data} fsdp={self.fsdp} tensor={self.tensor}"

    def build(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """The mesh over `devices` (all of the run's without any). Raises ValueError if it does not fit them."""
        devices = jax.devices() if devices is None else devices
        sizes = self.sizes
        known = math.prod(size for size in sizes if size != -1)
        sizes = tuple(len(devices) // known if size == -1 else size for size in sizes)
        if math.prod(sizes) != len(devices):
            raise ValueError(
                f"mesh {self.describe()} does not fit {len(devices)} devices: choose sizes whose product is "
                f"{len(devices)}, or one of them -1 and the product of the others a divisor of it"
            )
        names, kinds = ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3
        if self.slices == 1:
            return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices)
        return jax.sharding.Mesh(self._over_slices(sizes, devices), names, axis_types=kinds)

    def fitted(self, count: int) -> Mesh:
        """The nearest mesh that fits so many devices: as much of tensor, then of fsdp, as divides what there is, and
        data the rest."""
        tensor = math.gcd(count if self.tensor == -1 else self.tensor, count)
        fsdp = math.gcd(count if self.fsdp == -1 else self.fsdp, count // tensor)
        return Mesh(-1, fsdp, tensor)

    def _over_slices(self, sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
        """The devices as a grid whose first axis goes from slice to slice. Without slices, hosts take their place."""
        numbers = {getattr(device, "slice_index", None) for device in devices}
        by_host = len(numbers) == 1
        found = len({device.process_index for device in devices}) if by_host else len(numbers)
        data, fsdp, tensor = sizes
        if found != self.slices:
            raise ValueError(f"mesh.slices {self.slices}: the devices form {found}, choose that")
        if data % self.slices:
            raise ValueError(
                f"mesh {self.describe()}: data {data} does not divide over {self.slices} slices, and fsdp and tensor "
                "stay inside one: choose smaller ones"
            )
        inside, across = (data // self.slices, fsdp, tensor), (self.slices, 1, 1)
        return mesh_utils.create_hybrid_device_mesh(inside, across, devices, process_is_granule=by_host)

    def abstract(self) -> AbstractMesh:
        """The mesh without its devices, of any number; one with a free axis has those of this run, as `build`."""
        if -1 in self.sizes:
            return self.build().abstract_mesh
        return AbstractMesh(self.sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def check_batch(mesh: AnyMesh, batch_size: int, accumulation: int = 1, name: str = "batch_size") -> None:
    """Raises ValueError unless every device gets the same number of rows of every micro-batch."""
    data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
    divisor = data * fsdp * accumulation
    if batch_size % divisor:
        raise ValueError(
            f"{name} {batch_size} is not divisible by {divisor} (data {data} x fsdp {fsdp} x accumulation "
            f"{accumulation}): choose a multiple of {divisor}"
        )
