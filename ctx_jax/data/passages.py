"""Documents as streams: told apart, cut into passages, held out. Memory holds a few passages, whatever the size."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, get_args

Split = Literal["train", "validation", "test"]

SHARE = 20
"""One part in so many is held out for each of validation and test."""

PASSAGE = 1 << 18
"""Characters of a passage, at most; so never more than 1 MiB of UTF-8."""

LINE_END = re.compile("\n")
BLANK_LINE = re.compile(r"\n[^\S\n]*(?=\n)")
PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n(?=\S)")


class Passage(NamedTuple):
    """A part of a document. Joined, the passages of a document are its text.

    A long document is cut before the last white-space character of a run (a paragraph's end, else a line end, else a
    space that does not begin a line), so that its tokens are those of the whole; where there is none such, anywhere.
    """

    text: str
    """At most `PASSAGE` characters."""
    first: bool
    """Whether the document begins with it."""
    last: bool
    """Whether the document ends with it."""
    language: str
    """ISO 639-1 code: which rules end a sentence."""


Document = str | Iterator[str]
"""A document before it is cut: its text, or where that is long, the pieces of it; these must be used up before the next
document is asked for."""


def documents(passages: Iterable[Passage]) -> Iterator[str]:
    """Whole documents."""
    parts: list[str] = []
    for passage in passages:
        parts.append(passage.text)
        if passage.last:
            yield "".join(parts)
            parts.clear()


def between(separator: re.Pattern[str], pieces: Iterable[str]) -> Iterator[Document]:
    """What stands between the separators: `LINE_END`, or `BLANK_LINE` in pieces that begin and end with a line end."""
    pieces = iter(pieces)
    rest = ""

    def long() -> Iterator[str]:
        nonlocal rest
        for piece in itertools.chain([""], pieces):
            rest += piece
            if found := separator.search(rest):
                yield rest[: found.start()]
                rest = rest[found.end() :]
                return
            line_end = rest.rfind("\n")  # perhaps a separator begins with it
            sure = len(rest) if line_end < 0 or rest[line_end:].strip() else line_end
            yield rest[:sure]
            rest = rest[sure:]
        yield rest
        rest = ""

    for piece in pieces:
        rest += piece
        while True:
            *whole, rest = rest.split("\n") if separator is LINE_END else separator.split(rest)
            yield from whole
            if len(rest) <= PASSAGE:
                break
            yield long()
    yield rest


def cut(texts: Iterable[Document], language: str) -> Iterator[Passage]:
    """The passages of documents, without the line ends around them; those of white space alone are left out.

    Where they are cut depends on the document's text alone, not on its pieces.
    """
    new = tuple.__new__  # faster than Passage(...), which counts where documents are short lines
    for text in texts:
        if not isinstance(text, str):
            yield from _cut_long(text, language)
        elif len(text) > PASSAGE:
            yield from _cut_long(iter([text]), language)
        elif (text := text.strip("\n")) and not text.isspace():
            yield new(Passage, (text, True, True, language))


def _cut_long(pieces: Iterator[str], language: str) -> Iterator[Passage]:
    text, at, first = "", 0, True
    for piece in itertools.chain(_solid(_stripped(pieces)), [None]):
        text, at = text[at:] + (piece or ""), 0
        # Whether a cut is good is seen from the character after it: at the document's end there is none.
        while len(text) - at > PASSAGE + (piece is not None):
            end = _place(text, at)
            yield Passage(text[at:end], first, False, language)
            at, first = end, False
    if text:
        yield Passage(text[at:], first, True, language)


def _stripped(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of a text, none empty, without the line ends around it."""
    begun, ends = False, 0
    for piece in pieces:
        if not begun:
            piece = piece.lstrip("\n")
        if solid := piece.rstrip("\n"):
            for start in range(0, ends, PASSAGE):
                yield "\n" * min(PASSAGE, ends - start)
            yield solid
            begun, ends = True, 0
        ends += len(piece) - len(solid)


def _solid(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces of a text, or none if they are white space alone."""
    space: list[str] = []
    for piece in pieces:
        if not piece.isspace():
            yield from space
            yield piece
            break
        space.append(space[-1] if piece in space[-1:] else piece)  # one string, however much of it there is
    yield from pieces


def _place(text: str, at: int) -> int:
    """Where the passage ends that begins at `at` and does not end with the text."""
    end = at + PASSAGE
    half = at + PASSAGE // 2
    found = -1
    for match in PARAGRAPH_END.finditer(text, half, end + 2):
        found = match.end() - 1
    if found < 0:
        found = _last("\n", text, half, end)
    if found < 0:
        found = max(_last(space, text, at + 1, end) for space in "\n ")
    if found < 0:
        tries = range(end, max(at, end - 64), -1)
        found = next((place for place in tries if _between_characters(text[max(at, place - 32) : place + 1])), end)
    return found


def _last(space: str, text: str, start: int, end: int) -> int:
    """The last place in [start, end] where this space stands before what is not white space, and does not begin a
    line, or -1."""
    found = text.rfind(space, start, end + 1)
    while found >= 0 and ((text[found + 1 : found + 2] or " ").isspace() or text[found - 1 : found + 1] == "\n "):
        found = text.rfind(space, start, found)
    return found


def _between_characters(text: str) -> bool:
    """Whether the last character of the text stands for itself: no mark on those before it, nor composed with them, nor
    the space that begins a line."""
    before, last = text[:-1], text[-1:]
    if text.endswith("\n ") or unicodedata.category(last or "M")[0] == "M" or "\u200d" in text[-2:]:
        return False
    apart = unicodedata.normalize("NFKC", before) + unicodedata.normalize("NFKC", last)
    return unicodedata.normalize("NFKC", text) == apart


def part(number: int, names: tuple[str, ...]) -> str:
    """The split of the number-th of a stream from which the splits `names` are held out: of every twenty the tenth is
    for validation, the twentieth for test."""
    name = {SHARE // 2 - 1: "validation", SHARE - 1: "test"}.get(number % SHARE, "train")
    return name if name in names else "train"


def lacks(split: str, names: tuple[str, ...], units: str) -> str:
    """What is wrong with a split that came out empty; of what is there, the first is always train's."""
    few = names and split != "train"
    reason = f"needs {SHARE} {units}, or a file of its own (--data.corpus.{split})" if few else "is empty"
    return f"the split {split} {reason}"


def held_out(
    passages: Callable[[], Iterator[Passage]], split: Split, names: tuple[str, ...], language: str
) -> Iterator[Passage]:
    """The share of `split` where the splits `names` are held out from the documents of one stream.

    Of 20 documents or more, the tenth and the twentieth of every twenty; of fewer, the last tenth of each document
    (validation before test), cut after a line end, else after a space, else anywhere.
    """
    if split not in get_args(Split):
        raise ValueError(f"split {split!r} is not one of {', '.join(get_args(Split))}")
    if not names:
        yield from passages()
        return
    lengths = _lengths(passages())
    if len(lengths) == SHARE:
        number = 0
        for passage in passages():
            if part(number, names) == split:
                yield passage
            if passage.last:
                number += 1
        return
    held = [name for name in ("test", "validation") if name in names]
    place = held.index(split) if split in held else len(held)
    edges = [[length, *ends, 0] for length, ends in zip(lengths, _ends(passages(), lengths, len(held)), strict=True)]
    stream = passages()
    yield from cut((_part(_document(stream), edge[place + 1], edge[place]) for edge in edges), language)


def _lengths(passages: Iterator[Passage]) -> list[int]:
    """The characters of each document; of the first SHARE documents at most."""
    return [sum(map(len, _document(itertools.chain([first], passages)))) for first in itertools.islice(passages, SHARE)]


def _ends(passages: Iterator[Passage], lengths: list[int], count: int) -> Iterator[list[int]]:
    """Where to cut off the last part in SHARE of each document, and the one before: `count` places, the last first."""
    for length in lengths:
        share = length // SHARE
        places = [length - share * (number + 1) for number in range(count)]
        found = [{"\n": 0, " ": 0} for _ in places]
        at = 0
        for text in _document(passages):
            for place, after in zip(places, found, strict=True):
                for space in after:
                    last = text.rfind(space, max(place - share - at, 0), max(place - at, 0))
                    after[space] = at + last + 1 if last >= 0 else after[space]
            at += len(text)
        yield [after["\n"] or after[" "] or place for place, after in zip(places, found, strict=True)]


def _document(passages: Iterator[Passage]) -> Iterator[str]:
    """The texts of the next document."""
    for passage in passages:
        yield passage.text
        if passage.last:
            return


def _part(texts: Iterator[str], begin: int, end: int) -> Iterator[str]:
    """The characters from `begin` to `end` of a text in pieces; all of them are used up."""
    at = 0
    for text in texts:
        if part := text[max(begin - at, 0) : max(end - at, 0)]:
            yield part
        at += len(text)
