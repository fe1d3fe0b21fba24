from __future__ import annotations

from dataclasses import dataclass

import jax
import pytest
from jax._src import cloud_tpu_init

from ctx_jax.parallel.hosts import start_hosts
from ctx_jax.parallel.mesh import Mesh, check_batch


def test_the_rest_of_the_devices_goes_to_the_free_axis():
    devices = jax.devices()[:1]
    assert dict(Mesh().build(devices).shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert dict(Mesh(data=1, fsdp=-1).build(devices).shape) == {"data": 1, "fsdp": 1, "tensor": 1}


def test_a_mesh_that_does_not_fit_names_itself_and_the_devices():
    with pytest.raises(ValueError, match=r"mesh data=2 fsdp=3 tensor=1 does not fit 1 devices: choose"):
        Mesh(data=2, fsdp=3).build(jax.devices()[:1])
    with pytest.raises(ValueError, match=r"mesh data=-1 fsdp=1 tensor=4 does not fit 1 devices: choose"):
        Mesh(tensor=4).build(jax.devices()[:1])


@pytest.mark.parametrize(
    ("mesh", "count", "sizes"),
    [
        (Mesh(data=2, fsdp=2, tensor=2), 1, (1, 1, 1)),
        (Mesh(data=2, fsdp=2, tensor=2), 4, (1, 2, 2)),
        (Mesh(data=2, fsdp=2, tensor=2), 6, (3, 1, 2)),
        (Mesh(data=1, fsdp=8), 4, (1, 4, 1)),
        (Mesh(data=1, fsdp=-1, tensor=3), 4, (1, 4, 1)),
        (Mesh(data=2, slices=2), 3, (3, 1, 1)),
    ],
)
def test_the_nearest_mesh_that_fits_fills_the_devices(mesh, count, sizes):
    found = mesh.fitted(count)
    assert (count // (found.fsdp * found.tensor), found.fsdp, found.tensor) == sizes
    assert found.data == -1 and found.slices == 1


@pytest.mark.parametrize("sizes", [{"data": 0}, {"tensor": -2}, {"data": -1, "fsdp": -1}])
def test_sizes_that_are_none(sizes):
    with pytest.raises(ValueError, match="choose sizes of at least 1"):
        Mesh(**sizes)


def test_a_batch_must_divide_over_rows_and_micro_batches():
    mesh = Mesh().build(jax.devices()[:1])
    check_batch(mesh, 6, 3)
    with pytest.raises(ValueError, match=r"batch_size 6 is not divisible by 4 .*accumulation 4.*multiple of 4"):
        check_batch(mesh, 6, 4)


def test_a_process_that_runs_alone_stays_alone(monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    start_hosts()
    assert jax.process_count() == 1
    with pytest.raises(ValueError, match="coordinator localhost:1: give the number of processes"):
        start_hosts("localhost:1", processes=2)
    with pytest.raises(ValueError, match="--processes 2 --process 0: give the coordinator too"):
        start_hosts(processes=2, process=0)


@pytest.mark.parametrize(
    ("environment", "started"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}, ("a:1", 4, 3)),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JOB_COMPLETION_INDEX": "2"}, ("a:1", 4, 2)),
        ({"SLURM_STEP_NUM_TASKS": "2"}, (None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, (None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, (None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "a", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}, "a:1: give the number of processes"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES 'two' is not a number"),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "JAX_PROCESS_ID 2 is not one of 2 processes: choose 0 to 1",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "JAX_COORDINATOR_ADDRESS a names no port",
        ),
    ],
)
def test_how_processes_find_each_other(monkeypatch, environment, started):
    """Slurm's and the TPU's names are left to `jax.distributed`."""
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    if isinstance(started, str):
        with pytest.raises(ValueError, match=started):
            start_hosts()
        assert not calls
        return
    start_hosts()
    names = ("coordinator_address", "num_processes", "process_id")
    assert [tuple(call.get(name) for name in names) for call in calls] == ([] if started is None else [started])


@dataclass(frozen=True)
class Chip:
    """As much of a device as a mesh asks for."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


@pytest.mark.parametrize("by_host", [False, True])
def test_data_goes_over_slices_and_the_rest_stays_inside(by_host):
    """Where devices have no slices, hosts take their place."""
    chips = [Chip(n, 0 if by_host else n % 2, n % 2) for n in range(16)]
    grid = Mesh(data=4, fsdp=2, tensor=2, slices=2)._over_slices((4, 2, 2), chips)
    assert grid.shape == (4, 2, 2)
    places = [[chip.process_index for chip in row.flat] for row in grid]
    assert places == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    with pytest.raises(ValueError, match=r"mesh.slices 4: the devices form 2, choose that"):
        Mesh(data=4, fsdp=4, slices=4)._over_slices((4, 4, 1), chips)
    for sizes in ((1, 16), (3, 1)):
        with pytest.raises(
            ValueError, match=rf"data {sizes[0]} does not divide over 2 slices, and fsdp and tensor stay"
        ):
            Mesh(data=sizes[0], fsdp=sizes[1], slices=2)
    with pytest.raises(ValueError, match="data 1 does not divide over 2 slices, and fsdp and tensor stay inside one"):
        Mesh(fsdp=16, slices=2)._over_slices((1, 16, 1), chips)
    with pytest.raises(ValueError, match=r"mesh.slices 0: choose 1 or more"):
        Mesh(slices=0)


@pytest.mark.parametrize(("platforms", "started"), [("cpu", False), ("tpu,cpu", True)])
def test_a_tpu_that_names_no_hosts_is_left_to_its_metadata(monkeypatch, platforms, started):
    for name in ("JAX_COORDINATOR_ADDRESS", "TPU_WORKER_HOSTNAMES", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", True)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        start_hosts()
    finally:
        jax.config.update("jax_platforms", before)
    assert bool(calls) == started
