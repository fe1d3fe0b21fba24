"""`python -m ctx_jax`, and the console script `ctx-jax`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}
"""Exit codes of what a signal ends; as in signals.py, whose import would let some milliseconds pass."""

LAUNCHER = "CTX_JAX_LAUNCHER"
"""The environment's variable in which a launcher says that it is this process's parent: its number."""


def main() -> None:
    """`cli.main`, which signals end at once and without noise, be it in the imports or while XLA compiles; when it is
    done, they change its exit code no more."""
    for number in CODES:
        signal.signal(number, leave)
    follow()
    import faulthandler

    if "--debug" in sys.argv:
        faulthandler.enable()  # shows where each thread is when nothing moves any more
    from ctx_jax.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
        ignore()
    except SystemExit as exit:
        ignore()
        if not isinstance(exit.code, int) or exit.code == 0:
            raise
        if exit.code in CODES.values():
            leave_together()
        # What libraries do at exit may fail once more, or wait for other hosts, and XLA's threads can crash an
        # interpreter that takes itself down while they compile.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody may listen
                stream.flush()
        os._exit(exit.code)


def leave(number: int, _: object) -> None:
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    with contextlib.suppress(OSError):
        os.write(2, f"error: stopped by {name}: give the same command again\n".encode())
    os._exit(CODES[signal.Signals(number)])


def follow() -> None:
    """Has SIGTERM sent to this process when the launcher that has begun it is gone, however that ended."""
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
        if os.getppid() != int(launcher):  # it has gone meanwhile
            signal.raise_signal(signal.SIGTERM)


def ignore() -> None:
    """The signals, to the very end: Python itself gives back to the system only those that have a handler."""
    for number in CODES:
        signal.signal(number, signal.SIG_IGN)


def leave_together() -> None:
    """Waits for the other hosts, if there are any: they stop after the same step, and need the first one till then."""
    import jax

    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
