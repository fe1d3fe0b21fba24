"""`python -m ctx_jax`, and the console script `ctx-jax`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main() -> None:
    """`cli.main`, which Ctrl-C ends at once and without noise, be it in the imports or while XLA compiles."""
    signal.signal(signal.SIGINT, leave)
    from ctx_jax.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except SystemExit as exit:
        if exit.code != 130:
            raise
        # XLA's threads can crash an interpreter that takes itself down while they compile.
        sys.stderr.flush()
        os._exit(130)


def leave(*_: Any) -> None:
    os.write(2, b"error: interrupted before anything was begun: the same command starts again\n")
    os._exit(130)


if __name__ == "__main__":
    main()
