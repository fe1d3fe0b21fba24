from __future__ import annotations

import jax
import pytest

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
