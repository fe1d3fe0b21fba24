"""Lines of JSON, each of which holds a text. A long text is read in pieces: it may be most of memory otherwise."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ctx_jax.data.passages import PASSAGE, Document
from ctx_jax.serialization import nearest

if TYPE_CHECKING:
    from ctx_jax.data.files import Errors, File

LINE = 1 << 29
"""Bytes of a line, at most: they are held in memory."""

BESIDE = 1 << 26
"""Characters of a line beside its long strings, at most: what they stand for takes many times as much memory."""

SURROGATE = re.compile("[\ud800-\udfff]")

INSIDE = re.compile(
    r"""(?: [^"\\]++ | \\[^u]
          | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
          | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?=[^\\]) | (?=\\[^u])
                                           | (?=\\u(?![dD][c-fC-F])[0-9a-fA-F]{4}) ) )*+""",
    re.VERBOSE | re.DOTALL,
)
"""What stands in a string, up to its end or to what cannot be read without what comes next."""

ESCAPE = len(r"\ud83d\ude42")
"""Characters of the longest escape."""


def json_texts(file: File, lines: Iterable[Document], field: str, errors: Errors) -> Iterator[Document]:
    """The text of each line of JSON, with line ends as in any file.

    Raises ValueError naming file and line of what is no object with a text in `field`, or longer than `LINE`.
    """
    for number, line in enumerate(lines, 1):
        try:
            strings: list[list[bytes]] = []
            if not isinstance(line, str):
                line, strings = without_long_strings(line)
            if not line or line.isspace():
                continue
        except OverflowError as error:
            raise ValueError(f"{file} line {number} {error}") from None
        except ValueError as error:
            raise ValueError(f"{file} line {number} is not JSON: {_one_line(error)}") from None
        entry = json_object(line, f"{file} line {number}", f'{{"{field}": "..."}}')
        text = entry.get(field)
        if not isinstance(text, str):
            raise ValueError(f"{file} line {number} {_lacks(field, entry)}")
        pieces = [text] if len(text) <= PASSAGE else map(_decoded, strings[int(text[-9:])])
        if strings or "\\u" in line:
            where = f"{file} line {number}: the field {field!r}"
            pieces = (without_halves(piece, where, errors) for piece in pieces)
        del line, entry, strings  # they may be large, and the text is used for a while
        yield unified("".join(pieces)) if len(text) <= PASSAGE else _unified(pieces)


def json_object(line: str, where: str, example: str) -> dict[str, Any]:
    """What a line of JSON holds. Raises ValueError, naming the place, for what is no object like `example`."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {_one_line(error)}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is no object: each line must be like {example}")
    return entry


def without_long_strings(pieces: Iterator[str]) -> tuple[str, list[list[bytes]]]:
    """A line of JSON with its long strings taken out, and these, decoded, as pieces of UTF-8.

    In place of each stands its number among them, in so many digits that no other string is as long. Raises ValueError
    for an escape that is none, OverflowError for a line that is too long.
    """
    plain: list[str] = []
    strings: list[list[bytes]] = []
    rest, inside, size, beside = "", False, 0, 0
    taken: list[bytes] = []
    for piece in pieces:
        size += len(piece.encode(errors="surrogatepass"))
        if size > LINE:
            raise OverflowError(f"is longer than {LINE >> 20} MiB: break its text into several lines")
        rest += piece
        at = 0
        while at < len(rest):
            if not inside:
                end = (rest.find('"', at) + 1) or len(rest)
                plain.append(rest[at:end])
                beside += end - at
                inside = rest[end - 1] == '"'
            else:
                found = INSIDE.match(rest, at)
                assert found is not None
                end = found.end()
                ended = rest[end : end + 1] == '"'
                if ended and not taken and end - at <= PASSAGE:
                    plain.append(rest[at:end])
                    beside += end - at
                elif ended or len(rest) - at > PASSAGE:
                    if not ended and len(rest) - end > ESCAPE:
                        raise ValueError(f"Invalid escape {rest[end : end + 6]!r}")
                    taken.append(json.loads(f'"{rest[at:end]}"').encode(errors="surrogatepass"))
                    if ended:
                        plain.append(str(len(strings)).zfill(PASSAGE + 1))
                        strings.append(taken)
                        taken = []
                else:
                    break  # it may be short
                if ended:
                    plain.append('"')
                    end, inside = end + 1, False
                elif end == at:
                    break
            at = end
            if beside > BESIDE:
                raise OverflowError(
                    f"has more than {BESIDE >> 20} MiB beside its longest texts: give each document a line of its own"
                )
        rest = rest[at:]
    return "".join([*plain, rest]), strings


def _decoded(piece: bytes) -> str:
    return piece.decode(errors="surrogatepass")


def without_halves(text: str, where: str, errors: Errors) -> str:
    """A text of JSON as one that can be encoded. Raises ValueError, naming the place, for half a surrogate pair, or
    puts U+FFFD in its place."""
    if SURROGATE.search(text) and errors == "strict":
        raise ValueError(
            f"{where} has half a surrogate pair (\\ud800 to \\udfff), which is no character: remove it, or set "
            "--data.corpus.errors replace"
        )
    return SURROGATE.sub("\ufffd", text)


def unified(text: str) -> str:
    """The text with "\\n" for every line end."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _unified(pieces: Iterable[str]) -> Iterator[str]:
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    for piece in pieces:
        yield lines.decode(piece)
    yield lines.decode("", final=True)


def _lacks(field: str, entry: dict[str, Any]) -> str:
    if field in entry:
        kind = type(entry[field]).__name__
        return (
            f"has a field {field!r} that is no text but {kind}: give a text, or name another with --data.corpus.field"
        )
    names = [name for name in entry if len(name) < 100]
    listed = ", ".join(map(repr, itertools.islice(names, 10))) or "none"
    remedy = "rename one, or name another with --data.corpus.field"
    return f"has no field {field!r}{nearest(field, names)} (there are: {listed}): {remedy}"


def _one_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
