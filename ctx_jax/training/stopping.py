"""How a run ends before its last step: by a signal, by an error of any host, or because nothing moves any more."""

from __future__ import annotations

import faulthandler
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ctx_jax.parallel.hosts import count, index, me, named, publish, published
from ctx_jax.parallel.sharding import replicated
from ctx_jax.signals import FAILED, NOTICES, SIGNALS, Interrupted, Preempted, called, end, exit_code, received, say

PULSE, LOST, SILENT = 1.0, 8.0, 60.0
"""Seconds between looks at the other hosts; without a sign of life after which a host is taken for gone, if a
collective has failed; and if none has."""

ECHO = 1.0
"""Seconds in which the same notice is the same: `timeout` gives it to its command and then to the command's group."""

LINGER = 4.0
"""Seconds that process 0 stays when all is over: without it the others end before they know why."""

STOPPED, NOTHING = "stopped", json.dumps(["runs", "unknown", 0, "start", 0])
"""The topic of a host that leaves at once because of a signal; what is known of one that has told nothing yet."""


def leave(number: int, message: str) -> NoReturn:
    """Ends the process at once because of a signal, and the other hosts with it, with the same exit code."""
    if count() > 1:
        state = json.dumps([socket.gethostname(), int(number)])
        telling = threading.Thread(target=publish, args=(STOPPED, state), daemon=True)
        telling.start()
        telling.join(PULSE)  # no longer, should the first host be gone
        time.sleep(LINGER if index() == 0 else 0)
    end(message, exit_code(number))


def ended_by_notice() -> AbstractContextManager[None]:
    """In this block SIGTERM and SIGUSR1 end the process at once: what is prepared goes on where it was."""
    return received(NOTICES, lambda number: leave(number, f"stopped by {called(number)}: give the same command again"))


class Stop:
    """Signals that end a run in order: the first is noted, the second, if it is no echo, ends the process at once.

    So does the first, before there is anything to save.
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
        """Receives signals in this block."""
        came, last, since = 0, 0, 0.0

        def answer(number: int) -> None:
            nonlocal came, last, since
            now = time.monotonic()
            echo = number in NOTICES and number == last and now - since < ECHO
            last, since = number, now
            if echo:
                return
            came += 1
            if not self.started:
                leave(number, f"stopped by {called(number)} before a step was done: the same command goes on")
            if came > 1:
                leave(number, f"stopped at once by {called(number)}: the same command goes on from the last checkpoint")
            self._note(number)
            line = (
                f"\n{called(number)}: stopping after this step, which is saved; a second signal stops at once and "
                "saves nothing\n"
            )
            say(line)

        with received(SIGNALS, answer, self._note):
            yield self

    def _note(self, number: int) -> None:
        self.signal = self.signal or number


def voter(mesh: jax.sharding.Mesh) -> Callable[[int], jax.Array]:
    """A function of a number that each host gives, to the largest of them; nobody waits for it."""
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    largest = jax.jit(jnp.max, out_shardings=replicated(mesh))

    def vote(number: int) -> jax.Array:
        with jax.transfer_guard("allow"):
            return largest(jax.make_array_from_callback((mesh.size,), split, lambda _: np.full(1, number, np.int32)))

    return vote


class Watch:
    """Ends the process, with one line that names the host, when nothing has moved for too long or a host is lost.

    Each host publishes what it is at; so those that wait can name the one they wait for.
    """

    def __init__(self, timeout: float = 0.0) -> None:
        """
        Args:
            timeout: seconds without progress; 0 = for ever.
        """
        self.timeout = timeout
        self.step, self.what, self.since = 0, "the preparation", time.monotonic()
        self.failing = threading.Event()
        self._ended = threading.Event()
        self._seen: dict[int, tuple[Any, float]] = {}
        self._pulse = 0
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def at(self, step: int, what: str) -> None:
        """Something has been done, and `what`, of this step, is next."""
        self.step, self.what, self.since = step, what, time.monotonic()

    def __enter__(self) -> Self:
        if count() > 1:
            self._publish("runs", self.what)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        told = self._ended.is_set()
        self._ended.set()
        self._thread.join()
        if count() > 1 and not told:
            self._publish("ended", "")

    @contextmanager
    def telling(self, stack: ExitStack) -> Iterator[None]:
        """In this block, an error of this host is told to the others, and one of a collective waits for the reason,
        which is another host's. Of several hosts, one that fails leaves the stack open: what is in it would wait."""
        try:
            yield
        except BaseException as error:
            if count() > 1 and not self._ended.is_set() and not isinstance(error, (Interrupted, Preempted)):
                if isinstance(error, KeyboardInterrupt):
                    leave(signal.SIGINT, "interrupted: the same command goes on")
                if isinstance(error, (jax.errors.JaxRuntimeError, TimeoutError)):
                    self.failing.set()
                    time.sleep(LOST + 3 * PULSE)
                self._ended.set()
                self._thread.join(PULSE)
                self._publish("failed", " ".join(f"{error or type(error).__name__}".split())[:500])
                time.sleep(LINGER if index() == 0 else 0)
            if count() > 1 and self._ended.is_set():
                stack.pop_all()
            raise

    def _look(self) -> None:
        while not self._ended.wait(PULSE):
            waited = time.monotonic() - self.since
            if count() > 1:
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
        publish("progress", json.dumps([status, socket.gethostname(), self.step, what, self._pulse]))

    def _look_at_others(self) -> None:
        now = time.monotonic()
        stopped, told = published(STOPPED), published("progress")
        for process in set(range(count())) - {index()}:
            if process in stopped:
                host, number = json.loads(stopped[process])
                line = f"{named(host, process)} was stopped by {called(number)}: the same command goes on"
                self._last(line, exit_code(number))
            status, host, step, what, _ = state = json.loads(told.get(process, NOTHING))
            if self._seen.get(process, (None, now))[0] != state:
                self._seen[process] = state, now
            silent = now - self._seen[process][1]
            name = named(host, process)
            if status == "failed":
                self._last(f"{name} failed: {what}", FAILED)
            if status == "runs" and silent > (LOST if self.failing.is_set() else SILENT):
                end(
                    f"{name} is gone: nothing was heard of it for {silent:.0f} s, at {what} (step {step}); the same "
                    "command goes on from the last checkpoint",
                    FAILED,
                )

    def _last(self, message: str, code: int) -> NoReturn:
        """Ends the process because of what another one has told, when all can know it."""
        time.sleep(LINGER if index() == 0 else 0)
        end(message, code)

    def _late(self) -> str:
        """The hosts that are behind or say nothing, if it is known which."""
        now, behind = time.monotonic(), []
        for process, ((_, host, step, what, _), since) in self._seen.items():
            if now - since > LOST:
                behind.append(f"host {host} (process {process}) is silent for {now - since:.0f} s, at {what}")
            elif (step, what) != (self.step, self.what) and step <= self.step:
                behind.append(f"host {host} (process {process}) is still at {what}")
        return f", while {', '.join(behind)}" if behind else ""
