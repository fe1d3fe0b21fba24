"""What people are told on stderr while something takes long; process 0 alone speaks."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

FIRST, EVERY = 5.0, 30.0
"""Seconds to the first line, and between lines, where stderr is no terminal."""

T = TypeVar("T")


def speaks() -> bool:
    """Whether this is the process that writes what all share; to ask it takes hold of no device."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def tell(text: str) -> None:
    """One line for people, from one process."""
    if speaks():
        print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """A piece of text for people, from one process; U+FFFD stands for what would steer their terminal."""
    if speaks():
        safe = "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
        print(safe, end="", file=sys.stderr, flush=True)


@contextmanager
def reading(task: str, size: int | None = None, unit: str = "documents") -> Iterator[Callable[[int, int], None]]:
    """Yields what is to be told (documents, bytes) done so far, of about `size` bytes if that is known.

    A terminal shows a bar; a log gets a line every half minute; both get one at the end, or none if nothing was told.
    """
    start = time.monotonic()
    done, due = (0, 0), start + FIRST
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn())
    console = Console(stderr=True)
    seen = console.is_terminal and speaks()
    with Progress(*columns, console=console, transient=True, disable=not seen) as bar:
        line = bar.add_task(task, total=size, done="")

        def report(documents: int, read: int) -> None:
            nonlocal done, due
            done = documents, read
            text = amount(documents, unit, read, time.monotonic() - start)
            bar.update(line, completed=read, done=text)
            if not console.is_terminal and time.monotonic() > due:
                due = time.monotonic() + EVERY
                tell(f"{task}: {text} so far")

        yield report
    if any(done):
        tell(f"{task}: {amount(done[0], unit, done[1], time.monotonic() - start)}")


def amount(count: int, unit: str, read: int, seconds: float) -> str:
    """What was read, and how long it took."""
    return f"{count:,} {unit}, {read / 1e6:,.1f} MB in {seconds:,.0f} s"


def counted(task: str, items: Iterable[T], total: int) -> Iterator[T]:
    """The items, of which there are `total`; a terminal shows a bar meanwhile, a log gets lines as from `reading`."""
    console = Console(stderr=True)
    due = time.monotonic() + FIRST
    with Progress(console=console, transient=True, disable=not (console.is_terminal and speaks())) as bar:
        line = bar.add_task(task, total=total)
        for number, item in enumerate(items):
            yield item
            bar.update(line, completed=number + 1)
            if not console.is_terminal and time.monotonic() > due:
                due = time.monotonic() + EVERY
                tell(f"{task}: {number + 1:,} of {total:,} batches so far")
