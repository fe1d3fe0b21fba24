"""`python -m ctx_jax`, and the console script `ctx-jax`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from typing import Any

CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}
"""Exit codes of what is stopped before anything was begun; as in training/stopping.py."""


def main() -> None:
    """`cli.main`, which signals end at once and without noise, be it in the imports or while XLA compiles."""
    for number in CODES:
        signal.signal(number, leave)
    if "--debug" in sys.argv:
        faulthandler.enable()  # shows where each thread is when nothing moves any more
    from ctx_jax.cli import main as run

    for number in CODES:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        run()
    except SystemExit as exit:
        if not isinstance(exit.code, int) or exit.code == 0:
            raise
        if exit.code in CODES.values():
            leave_together()
        # What libraries do at exit may fail once more, or wait for other hosts, and XLA's threads can crash an
        # interpreter that takes itself down while they compile.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit.code)


def leave(number: int, _: Any) -> None:
    os.write(2, b"error: interrupted before anything was begun: the same command starts again\n")
    os._exit(CODES[signal.Signals(number)])


def leave_together() -> None:
    """Waits for the other hosts, if there are any: they stop after the same step, and need the first one till then."""
    import jax

    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
