"""What people are told on stderr while something takes long; process 0 alone speaks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 30.0
"""Seconds between lines where stderr is no terminal."""


def tell(text: str) -> None:
    """One line for people, from one process."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def reading(task: str, size: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yields what is to be told (documents, bytes) done so far, of about `size` bytes if that is known.

    A terminal shows a bar; a log gets a line every half minute; both get one at the end, or none if nothing was told.
    """
    start = time.monotonic()
    done, shown = (0, 0), start
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(task, total=size, done="")

        def report(documents: int, read: int) -> None:
            nonlocal done, shown
            done = documents, read
            text = amount(documents, read, time.monotonic() - start)
            bar.update(line, completed=read, done=text)
            if not console.is_terminal and time.monotonic() - shown > EVERY:
                shown = time.monotonic()
                tell(f"{task}: {text}")

        yield report
    if any(done):
        tell(f"{task}: {amount(*done, time.monotonic() - start)}")


def amount(documents: int, read: int, seconds: float) -> str:
    """What was read, and how long it took."""
    return f"{documents:,} documents, {read / 1e6:,.1f} MB in {seconds:,.0f} s"
