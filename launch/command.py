"""What the launchers share: their command line, and commands as text that a shell reads back the same.

    python -m launch.LAUNCHER [options] -- train gpt:tiny --run "runs/a name; with anything"

A command is a list of words from the first to the last; it becomes text only where a program wants text, by `shlex`.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NoReturn, TypeVar

from ctx_jax.__main__ import CODES, leave
from ctx_jax.signals import NOTICES, Preempted, called

T = TypeVar("T")

LONGEST = 500
"""Characters of what is repeated of another program's complaint."""


def parsed(kind: type[T], arguments: Sequence[str], program: str) -> tuple[T, list[str]]:
    """The launcher's options before `--`, and the command of ctx_jax after it. Raises UsageError."""
    from ctx_jax.cli import named_command
    from ctx_jax.options import UsageError, is_help, parse_type

    own = list(arguments)
    words: list[str] = []
    if "--" in own:
        cut = own.index("--")
        own, words = own[:cut], own[cut + 1 :]
    options = parse_type(kind, own, program)
    if not words:
        raise UsageError(f"nothing to run: put the command after the options, {program} ... -- train gpt:tiny ...")
    if not is_help(words):
        named_command(words)
    return options, words


def program(words: Sequence[str], python: str = sys.executable) -> list[str]:
    """The command as a program and its arguments."""
    return [python, "-m", "ctx_jax", *words]


def with_input(command: Sequence[str], text: str) -> str:
    """A shell's line that gives `text` to `command` as its input, to the letter."""
    end = "END"
    while end in text.splitlines():
        end += "_"
    return f"{shlex.join(command)} <<'{end}'\n{text.rstrip()}\n{end}"


def output_of(command: Sequence[str], text: str | None = None) -> str:
    """What the command prints on stdout, given `text`. Raises ChildProcessError with what it complains of."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise ChildProcessError(f"there is no program {command[0]!r} here: install it, or give --dry-run") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        tell("\n".join(said[:-1]))
        words = shlex.join(takewhile(lambda word: not word.startswith("-"), command))
        reason = said[-1].strip()[:LONGEST] if said else "it said nothing"
        raise ChildProcessError(f"{words} failed (exit code {done.returncode}): {reason}")
    return done.stdout.strip()


def tell(text: str) -> None:
    """Lines for people, if there are any."""
    if text:
        print(text, file=sys.stderr, flush=True)


def run(launcher: Callable[[list[str]], int]) -> NoReturn:
    """Runs a launcher on the command line and exits with its code; what is wrong is one line, as in the commands. What
    asks it to end lets it clean up."""
    for number in CODES:
        signal.signal(number, leave)
    from ctx_jax.cli import explained, fail  # takes a while

    def stop(number: int, _: object) -> None:
        raise Preempted(f"stopped by {called(number)}: give the same command again")

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (*NOTICES, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        sys.exit(launcher(sys.argv[1:]))
    except (Exception, KeyboardInterrupt) as error:
        fail(*explained(error))
