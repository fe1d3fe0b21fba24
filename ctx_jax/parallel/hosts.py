"""Runs of several processes: how they find each other, and what they tell each other."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from ctx_jax.signals import FAILED, SIGNALS, called, end, exit_code, received, say

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""The environment of a process that is told where the others are: "host:port" of process 0, their number, its own."""

JOIN, TELL = 300, 30
"""Seconds in which all processes must have come; between lines that say who waits."""

SHUTDOWN = 60
"""Seconds that processes which end in order wait for each other."""

POLL = 0.05
"""Seconds between looks at what the others have given."""


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
    """Starts `jax.distributed`, whose own notice of preemption would take SIGTERM away from ours. Ends the process with
    one line, if the others have not come in time, or a signal comes before."""
    jax.config.update("jax_enable_preemption_service", False)
    explain_aborts()
    line = "stopped by {} while it waited for the other processes: give the same command again"
    with waiting(), received(SIGNALS, lambda number: end(line.format(called(number)), exit_code(number))):
        try:
            # Later than ours: JAX's own ends the process with the stack of its threads.
            jax.distributed.initialize(
                **arguments,  # pyright: ignore[reportArgumentType]
                initialization_timeout=JOIN + TELL,
                shutdown_timeout_seconds=SHUTDOWN,
            )
        except jax.errors.JaxRuntimeError as error:
            if "RPC server" not in str(error):
                raise
            raise ValueError(f"the port of {_state().coordinator_address} is in use: choose another") from None


@contextmanager
def waiting() -> Iterator[None]:
    """Ends the process if the block takes longer than JOIN, and says meanwhile whom it waits for."""
    done = threading.Event()

    def tell() -> None:
        for waited in range(TELL, JOIN + TELL, TELL):
            if done.wait(TELL):
                return
            if waited < JOIN:
                others = f"the other {count() - 1} processes at {_state().coordinator_address}"
                say(f"process {index()} waits for {others}: {waited} s so far\n")
        end(
            f"not all of the {count()} processes have come to {_state().coordinator_address} within {JOIN} s (this is "
            f"process {index()}): see that each was started, with this address and number and an index of its own, and "
            "that it can reach that port",
            FAILED,
        )

    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _explain_abort(number: int) -> None:
    if faulthandler.is_enabled():
        faulthandler.dump_traceback()
    host, _, port = str(_state().coordinator_address).rpartition(":")
    why = "was ended by JAX, which says above why"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        why = f"has lost process 0 at {host}:{port}, by which the processes find each other"
    end(f"{me()} {why}: the same command goes on from the last checkpoint", FAILED)


def explain_aborts() -> None:
    """Ends with one line what JAX aborts because process 0 is gone, or did not answer.

    JAX does that in a thread of C++, which no handler of Python's would see: this one is given to the system itself.
    """
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _explain_abort)


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


def index() -> int:
    """The number of this process; unlike `jax.process_index`, to ask it takes hold of no device."""
    return _state().process_id


def count() -> int:
    """How many processes there are; to ask it takes hold of no device."""
    return _state().num_processes


def named(host: str, process: int) -> str:
    """A host and its process, in words."""
    return f"host {host} (process {process} of {count()})" if count() > 1 else f"host {host}"


def me() -> str:
    """This one, in words."""
    return named(socket.gethostname(), index())


_rounds = itertools.count()


def gather(value: int) -> list[int]:
    """The value that each process gives, in their order; all must ask. Waits for the slowest, however long it prepares
    its text: a collective of CPU devices would fail after 30 s."""
    if count() == 1:
        return [value]
    topic = f"gather/{next(_rounds)}"
    _set(topic, str(value))
    while len(told := published(topic)) < count():
        time.sleep(POLL)  # in Python, so that other threads go on
    return [int(text) for _, text in sorted(told.items())]


def publish(topic: str, text: str) -> None:
    """Tells the other processes something, in place of what this one has told them of the topic before, if it can."""
    with suppress(jax.errors.JaxRuntimeError):
        _set(topic, text)


def published(topic: str) -> dict[int, str]:
    """What each process has told last of the topic."""
    return {int(key.rpartition("/")[2]): text for key, text in _state().client.key_value_dir_get(f"ctx_jax/{topic}/")}


def _set(topic: str, text: str) -> None:
    _state().client.key_value_set(f"ctx_jax/{topic}/{index()}", text, allow_overwrite=True)


def _state() -> Any:
    from jax._src import distributed  # the store of the coordination service has no public name

    return distributed.global_state
