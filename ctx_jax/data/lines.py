"""Files by lines that know their numbers, so that an error names the line and not the byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ctx_jax.data.files import Errors, read
from ctx_jax.data.jsonl import SURROGATE
from ctx_jax.data.passages import LINE_END, Document, between

if TYPE_CHECKING:
    from ctx_jax.data.files import File


def lines(file: File, errors: Errors) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers. Raises ValueError, naming the line, for what is not UTF-8."""
    yield from enumerate(map(joined, streamed(file, errors)), 1)


def streamed(file: File, errors: Errors) -> Iterator[Document]:
    """The lines of a file, long ones in pieces. Raises ValueError as `lines`."""
    for number, line in enumerate(between(LINE_END, escaped(file, errors)), 1):
        where = f"{file} line {number}"
        yield whole(line, where) if isinstance(line, str) else (whole(piece, where) for piece in line)


def escaped(file: File, errors: Errors) -> Iterator[str]:
    """The text of a file; with "strict", bytes that are not UTF-8 are escaped, for `whole` to find where they are."""
    return read(file, "surrogateescape" if errors == "strict" else errors)  # pyright: ignore[reportArgumentType]


def whole(text: str, where: str) -> str:
    """The text as it is. Raises ValueError for escaped bytes."""
    if SURROGATE.search(text):
        raise ValueError(f"{where} is not UTF-8: convert the file to UTF-8, or set --data.corpus.errors replace")
    return text


def joined(document: Document) -> str:
    return document if isinstance(document, str) else "".join(document)
