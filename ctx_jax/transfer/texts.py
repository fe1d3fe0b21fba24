"""The texts that a command is given in a file: one a line, or one a line of JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ctx_jax.data.files import Errors, is_compressed, is_jsonl, text_files
from ctx_jax.data.hashes import size_and_time
from ctx_jax.data.jsonl import json_texts
from ctx_jax.data.lines import joined, streamed

if TYPE_CHECKING:
    from ctx_jax.data.files import File

STANDARD_INPUT = Path("/dev/stdin")


def input_file(path: str, whole_json: bool = False) -> File:
    """The one file that --input names, "-" being standard input. Raises what `text_files` raises, and ValueError for
    several."""
    if path == "-":
        return STANDARD_INPUT
    files = text_files(path, whole_json)
    if len(files) > 1:
        raise ValueError(f"--input {path} names {len(files)} files: choose one of them, as {files[0]}")
    return files[0]


def input_size(file: File) -> int | None:
    """About how many bytes of text there are, if that can be told beforehand."""
    return None if file == STANDARD_INPUT or is_compressed(file) else size_and_time(file)[0]


def texts(file: File, field: str | None, errors: Errors) -> Iterator[str]:
    """The lines of a file, empty ones too; of a .jsonl file, or with `field`, the text in that field ("text" by
    default) of each line that is not blank.

    Raises ValueError naming file and line of what is not UTF-8 (with `errors` "strict") or has no such text.
    """
    lines = streamed(file, errors)
    with own_options("field", "errors"):
        if field is None and not is_jsonl(file):
            yield from without_last(map(joined, lines))
        else:
            yield from map(joined, json_texts(file, lines, field or "text", errors))


REMEDY = re.compile(r", or ((?!, or ).)*?--data\.corpus\.(?P<name>[a-z-]+).*")
"""The end of an error's line that names an option of the corpus, as another way out."""


@contextmanager
def own_options(*names: str) -> Iterator[None]:
    """In the errors of a command that has no experiment, options of the corpus are its own, if it has those `names`; a
    remedy that it does not have is left out."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        if "--data.corpus." not in str(error):
            raise
        message = REMEDY.sub(lambda found: found[0] if found["name"] in names else "", str(error))
        raise ValueError(message.replace("--data.corpus.", "--")) from None


def without_last(lines: Iterable[str]) -> Iterator[str]:
    """The lines without the empty one that follows the last line end."""
    held: str | None = None
    for line in lines:
        if held is not None:
            yield held
        held = line
    if held:
        yield held
