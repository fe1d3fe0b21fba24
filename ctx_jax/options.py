"""The command line as words: what stands before the options, and options as fields of frozen dataclasses.

Whatever is wrong becomes one line that names the word and the remedy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import typing
from typing import Any, TypeVar

import tyro

from ctx_jax.experiment import options
from ctx_jax.serialization import nearest

T = TypeVar("T")


class UsageError(ValueError):
    """The command line itself is wrong."""


def positional(command: str, arguments: list[str], what: str, most: int | None = None) -> tuple[list[str], list[str]]:
    """The leading arguments that are no options, and the rest. Raises UsageError if there is none or are too many."""
    if arguments and arguments[0] in ("-h", "--help"):
        return [what], arguments
    count = next((index for index, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    if count == 0:
        raise UsageError(f"{command} needs {what} before any option: python -m ctx_jax {command} {what} ...")
    if most is not None and count > most:
        raise UsageError(f"{command} takes one {what}, not also {arguments[most]!r}")
    return arguments[:count], arguments[count:]


def is_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def take(option: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """The last `option VALUE` or `option=VALUE`, and the other arguments."""
    chosen, rest, queue = None, [], iter(arguments)
    for argument in queue:
        name, equals, value = argument.partition("=")
        if name != option:
            rest.append(argument)
            continue
        chosen = value if equals else next(queue, "")
        if not chosen or chosen.startswith("--"):
            raise UsageError(f"{option} is given nothing: give it a value, or leave the option out")
    return chosen, rest


def parse(default: T, arguments: list[str], program: str, also: tuple[str, ...] = ()) -> T:
    """`default` with the options in `arguments`; `also` are options that were taken out of them before."""
    return parse_type(type(default), arguments, program, also, default=default)


def parse_type(kind: type[T], arguments: list[str], program: str, also: tuple[str, ...] = (), **default: Any) -> T:
    """tyro's parser, whose complaints become one line each. Raises UsageError."""
    for option, value in itertools.pairwise(arguments):
        if option.startswith("--") and not value and option != "--prompt":
            raise UsageError(f"{option} is given an empty value: give it one, or leave the option out")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            chosen, unknown = tyro.cli(
                kind,
                args=arguments,
                prog=program,
                config=(tyro.conf.AvoidSubcommands,),
                return_unknown_args=True,
                **default,
            )
    except SystemExit as exit:
        if exit.code in (0, None):
            raise
        raise UsageError(one_line(complaint.getvalue())) from None
    if unknown:
        if not unknown[0].startswith("-"):
            raise UsageError(f"{unknown[0]!r} belongs to no option: see --help for those that take a value")
        known = [*also, *flags(kind, default.get("default"))]
        raise UsageError(f"unknown option {unknown[0]}{nearest(unknown[0].partition('=')[0], known)}")
    return chosen


def flags(kind: type, default: Any) -> list[str]:
    """The options that `kind` takes, those of the dataclasses in `default` included."""
    names: list[str] = []
    for field, hint in typing.get_type_hints(kind, include_extras=True).items():
        shown = [about.name for about in getattr(hint, "__metadata__", ()) if getattr(about, "name", None) is not None]
        name = (shown or [field])[0].replace("_", "-")
        value = getattr(default, field, None)
        if dataclasses.is_dataclass(value):
            names += [f"--{name}.{option[2:]}" if name else option for option in options(value)]
        else:
            names.append(f"--{name}")
    return names


def one_line(box: str) -> str:
    """The message inside tyro's box, with or without frame: what stands under its title, up to the next rule."""
    lines = [line.strip(" │|") for line in box.splitlines() if line.strip()]
    below_title = itertools.dropwhile(is_rule, lines[1:])
    message = " ".join(itertools.takewhile(lambda line: not is_rule(line), below_title))
    message = re.sub(r"^Error parsing (experiment(: |\.))?", "", message)
    return message or "the command line cannot be read; see --help"


def is_rule(line: str) -> bool:
    return not line.strip("─-╰╯")
