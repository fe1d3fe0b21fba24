"""Runs of several processes: how they find each other, and what they tell each other."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""The environment of a process that is told where the others are: "host:port" of process 0, their number, its own."""

SHUTDOWN = 60
"""Seconds that processes which end in order wait for each other."""


def start_hosts(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins this process to a run of several; to be called before anything touches a device.

    The arguments come from the caller, or else from the environment (COORDINATOR, COUNT, INDEX). Without either, the
    tasks of a Slurm step and the workers of a TPU pod (of one slice, or of several: MEGASCALE_*) find each other, and
    a process that runs alone stays alone. On Kubernetes, the index of an Indexed Job (JOB_COMPLETION_INDEX) stands in
    for INDEX.

    Raises ValueError if it is told of the others by halves.
    """
    coordinator = coordinator or os.environ.get(COORDINATOR)
    if coordinator is not None:
        index = os.environ.get(INDEX, os.environ.get("JOB_COMPLETION_INDEX"))
        processes = number(COUNT, os.environ.get(COUNT)) if processes is None else processes
        process = number(INDEX, index) if process is None else process
        if processes is None or process is None:
            raise ValueError(
                f"coordinator {coordinator}: give the number of processes and of this process too ({COUNT}, {INDEX})"
            )
        if not 0 <= process < processes:
            raise ValueError(f"{INDEX} {process} is not one of {processes} processes: choose 0 to {processes - 1}")
        if ":" not in coordinator:
            raise ValueError(f"{COORDINATOR} {coordinator} names no port: write it as host:port")
        begin(coordinator_address=coordinator, num_processes=processes, process_id=process)
    elif processes is not None or process is not None:
        raise ValueError(f"--processes {processes} --process {process}: give the coordinator too ({COORDINATOR})")
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 or on_several_tpu_hosts():
        begin()


def begin(**arguments: object) -> None:
    """Starts `jax.distributed`, whose own notice of preemption would take SIGTERM away from ours."""
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**arguments, shutdown_timeout_seconds=SHUTDOWN)  # pyright: ignore[reportArgumentType]


def on_several_tpu_hosts() -> bool:
    """Whether a TPU's environment names more than one host or slice; where it names none, the machine's metadata may,
    which JAX then asks."""
    slices = number("MEGASCALE_NUM_SLICES", os.environ.get("MEGASCALE_NUM_SLICES")) or 1
    workers = os.environ.get("TPU_WORKER_HOSTNAMES")
    return slices > 1 or (tpu_is_used() if workers is None else "," in workers)


def tpu_is_used() -> bool:
    """Whether JAX has found TPU chips, and is not told to leave them alone."""
    from jax._src import cloud_tpu_init  # before a device is touched this has no public name

    platforms: str | None = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    return cloud_tpu_init.running_in_cloud_tpu_vm and "tpu" in (platforms or "tpu")


def number(name: str, text: str | None) -> int | None:
    """Raises ValueError, naming the variable, for what is no number."""
    if text is not None and not text.isdecimal():
        raise ValueError(f"{name} {text!r} is not a number of processes: write digits")
    return None if text is None else int(text)


def gather(value: int) -> list[int]:
    """The value that each process gives, in their order; all must ask. Waits for the slowest."""
    if jax.process_count() == 1:
        return [value]
    with jax.transfer_guard("allow"):
        return multihost_utils.process_allgather(np.int32(value)).tolist()


def publish(topic: str, text: str) -> None:
    """Tells the other processes something, in place of what this one has told them of the topic before."""
    client = _client()
    client.key_value_set(f"ctx_jax/{topic}/{jax.process_index()}", text, allow_overwrite=True)


def published(topic: str) -> dict[int, str]:
    """What each process has told last of the topic."""
    return {int(key.rpartition("/")[2]): text for key, text in _client().key_value_dir_get(f"ctx_jax/{topic}/")}


def _client() -> Any:
    from jax._src import distributed  # the store of the coordination service has no public name

    return distributed.global_state.client
