"""How a process ends before its time: exit codes, and the signals that ask for it. Imports nothing that takes long."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

REQUEUE, INTERRUPTED, FAILED = 75, 130, 1
"""Exit codes: begin me again (EX_TEMPFAIL), Ctrl-C, the run failed."""

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""The notice of Slurm, Kubernetes, and a Google VM that shuts down (its agent ends processes); what Slurm's
--signal=USR1@60 sends before the time limit."""

SIGNALS = (signal.SIGINT, *NOTICES)


class Interrupted(Exception):
    """The run was asked to stop by Ctrl-C, and has saved its state."""


class Preempted(Exception):
    """The run was asked to stop by the system, and has saved its state: it is to be queued again."""


def exit_code(number: int) -> int:
    """Of a run that this signal has ended."""
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


def called(number: int) -> str:
    """The signal, for people."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def end(message: str, code: int) -> NoReturn:
    """Ends the process at once, whatever its other threads wait for, with one last line."""
    say(f"error: {message}\n")
    os._exit(code)


def say(text: str) -> None:
    """For people, if anybody listens: who has started this process may be gone, and then nothing else is to fail
    because it has something to say."""
    try:
        os.write(2, text.encode())
    except OSError:
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextmanager
def received(
    numbers: Sequence[int], answer: Callable[[int], object], note: Callable[[int], object] = lambda number: None
) -> Iterator[None]:
    """In this block a thread is given each of these signals, in the main thread only (elsewhere there are none).

    A thread, since Python's handlers must wait for a library that does not come back: a collective, a connection.

    Args:
        note: told the signal by Python's handler, before what the main thread does next.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def receive() -> None:
        while number := (os.read(reader, 1) or b"\0")[0]:
            if number in numbers:
                answer(number)

    before = {number: signal.signal(number, lambda number, _: note(number)) for number in numbers}
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=receive, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(writer)
        thread.join()
        os.close(reader)
