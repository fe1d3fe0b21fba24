"""How a run ends before its last step: by a signal, by an error of any host, or because nothing moves any more."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ctx_jax.parallel.hosts import publish, published
from ctx_jax.parallel.sharding import replicated

SIGINT = signal.SIGINT

REQUEUE, INTERRUPTED, FAILED = 75, 130, 1
"""Exit codes: begin me again (EX_TEMPFAIL), Ctrl-C, the run failed."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; the notice of Slurm, Kubernetes, and a Google VM that shuts down (its agent ends processes); what Slurm's
--signal=USR1@60 sends before the time limit."""

PULSE, LOST, SILENT = 1.0, 8.0, 60.0
"""Seconds between looks at the other hosts; without a sign of life after which a host is taken for gone, if a
collective has failed; and if none has."""

LINGER = 4.0
"""Seconds that process 0 stays when all is over: without it the others end before they know why."""


class Interrupted(Exception):
    """The run was asked to stop by Ctrl-C, and has saved its state."""


class Preempted(Exception):
    """The run was asked to stop by the system, and has saved its state: it is to be queued again."""


def exit_code(number: int) -> int:
    """Of a run that this signal has ended."""
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


def end(message: str, code: int) -> NoReturn:
    """Ends the process at once, whatever its other threads wait for, with one last line."""
    os.write(2, f"error: {message}\n".encode())
    os._exit(code)


class Stop:
    """Signals that end a run in order: the first is noted, the second ends the process at once.

    A thread receives them, since Python's handlers must wait for a collective that does not come back.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self.signal = 0
        """What this process has received."""
        self.asked = 0
        """What `agreed` has said."""
        self.started = False
        """Whether there is something to save."""
        self._vote: Callable[[int], Any] | None = voter(mesh) if jax.process_count() > 1 else None
        self._votes: Any = None

    def agreed(self) -> int:
        """The signal that ends the run after this step, the same on every host; 0: none. To be asked at every step:
        what one host had received at one step, all know at the next."""
        if self._vote is None:
            self.asked = self.signal
        else:
            before, self._votes = self._votes, self._vote(self.signal)
            self.asked = 0 if before is None else int(jax.device_get(before.addressable_data(0)))
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Receives signals in this block, in the main thread only (elsewhere there are none to receive)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._receive, args=(reader,), name="signals", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            writer.close()
            thread.join()
            reader.close()

    def _note(self, number: int, _: Any) -> None:
        self.signal = self.signal or number

    def _receive(self, reader: socket.socket) -> None:
        received = 0
        while number := (reader.recv(1) or b"\0")[0]:
            if number not in SIGNALS:
                continue
            received += 1
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            if not self.started:
                end(f"stopped by {name} before a step was done: the same command goes on", exit_code(number))
            if received > 1:
                end(f"stopped at once by {name}: the same command goes on from the last checkpoint", exit_code(number))
            self.signal = self.signal or number
            line = (
                f"\n{name}: stopping after this step, which is saved; a second signal stops at once and saves nothing\n"
            )
            os.write(2, line.encode())


def voter(mesh: jax.sharding.Mesh) -> Callable[[int], jax.Array]:
    """A function of a number that each host gives, to the largest of them; nobody waits for it."""
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    largest = jax.jit(jnp.max, out_shardings=replicated(mesh))

    def vote(number: int) -> jax.Array:
        with jax.transfer_guard("allow"):
            return largest(jax.make_array_from_callback((mesh.size,), split, lambda _: np.full(1, number, np.int32)))

    return vote


@contextmanager
def preempted_in_preparation() -> Iterator[None]:
    """In this block, what asks the system's way to stop raises Preempted; what is prepared goes on where it was."""

    def stop(number: int, _: Any) -> None:
        name = signal.Signals(number).name
        raise Preempted(f"stopped by {name} before a step was done: the same command goes on")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in SIGNALS[1:]}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Watch:
    """Ends the process, with one line that names the host, when nothing has moved for too long or a host is lost.

    Each host publishes what it is at; so those that wait can name the one they wait for.
    """

    def __init__(self, timeout: float) -> None:
        """
        Args:
            timeout: seconds without progress; 0 = for ever.
        """
        self.timeout = timeout
        self.step, self.what, self.since = 0, "start", time.monotonic()
        self.failing = threading.Event()
        self._ended = threading.Event()
        self._seen: dict[int, tuple[Any, float]] = {}
        self._pulse = 0
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def at(self, step: int, what: str) -> None:
        """Something has been done, and `what`, of this step, is next."""
        self.step, self.what, self.since = step, what, time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        if jax.process_count() > 1:
            self._publish("ended", "")

    @contextmanager
    def telling(self, stack: ExitStack) -> Iterator[None]:
        """In this block, an error of this host is told to the others, and one of a collective waits for the reason,
        which is another host's. Of several hosts, one that fails leaves the stack open: what is in it would wait."""
        try:
            yield
        except BaseException as error:
            if jax.process_count() > 1 and not isinstance(error, (Interrupted, Preempted)):
                if isinstance(error, (jax.errors.JaxRuntimeError, TimeoutError)):
                    self.failing.set()
                    time.sleep(LOST + 3 * PULSE)
                self._ended.set()
                self._publish("failed", " ".join(f"{error or type(error).__name__}".split())[:500])
                time.sleep(LINGER)
                stack.pop_all()
            raise

    def _look(self) -> None:
        while not self._ended.wait(PULSE):
            waited = time.monotonic() - self.since
            if jax.process_count() > 1:
                with suppress(jax.errors.JaxRuntimeError):
                    self._publish("runs", self.what)
                    self._look_at_others()
            if self.timeout and waited > self.timeout:
                if faulthandler.is_enabled():
                    faulthandler.dump_traceback()
                end(
                    f"{me()} has waited {waited:,.0f} s for {self.what}{self._late()}: nothing moves any more; the "
                    "same command goes on from the last checkpoint (training.timeout is how long to wait)",
                    FAILED,
                )

    def _publish(self, status: str, what: str) -> None:
        self._pulse += 1
        with suppress(jax.errors.JaxRuntimeError):
            publish("progress", json.dumps([status, socket.gethostname(), self.step, what, self._pulse]))

    def _look_at_others(self) -> None:
        now = time.monotonic()
        for process, text in published("progress").items():
            status, host, step, what, _ = state = json.loads(text)
            if process == jax.process_index():
                continue
            if self._seen.get(process, (None, now))[0] != state:
                self._seen[process] = state, now
            silent = now - self._seen[process][1]
            name = f"host {host} (process {process} of {jax.process_count()})"
            if status == "failed":
                time.sleep(LINGER if jax.process_index() == 0 else 0)
                end(f"{name} failed: {what}", FAILED)
            if status == "runs" and silent > (LOST if self.failing.is_set() else SILENT):
                end(
                    f"{name} is gone: nothing was heard of it for {silent:.0f} s, at {what} (step {step}); the same "
                    "command goes on from the last checkpoint",
                    FAILED,
                )

    def _late(self) -> str:
        """The hosts that are behind, if it is known which."""
        states = {process: state for process, (state, _) in self._seen.items()}
        behind = [
            f"host {state[1]} (process {process}) is still at {state[3]}"
            for process, state in states.items()
            if (state[2], state[3]) != (self.step, self.what) and state[2] <= self.step
        ]
        return f", while {', '.join(behind)}" if behind else ""


def me() -> str:
    """This host, in words."""
    of = f" (process {jax.process_index()} of {jax.process_count()})" if jax.process_count() > 1 else ""
    return f"host {socket.gethostname()}{of}"
