"""Where sentences start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]  # compiled, without stubs

WINDOW = 1000
"""Characters that the library sees at once, at most: on text with many apostrophes its time grows with the square of
the length (WikiText-2, MB/s: 60 at 1,000 characters, 46 at 4,000, 6 at 16,000, 0.02 at 10 million)."""

BEFORE, AFTER = 4 * WINDOW, 2 * WINDOW
"""Characters around a part of a text that are read to find its sentences. AFTER is as far as the choice of the next
window looks."""

BLANK_LINES = re.compile(r"\n\s*\n")

SOLID, SPACE = re.compile(r"\S"), re.compile(r"\s")

OTHER_SPACES = re.compile(f"[{''.join(filter(str.isspace, map(chr, range(0x80, 0x3001))))}]")
"""White space outside ASCII; written out, the class is found twice as fast as by its properties."""


def sentence_characters(text: str, language: str) -> np.ndarray:
    """The characters at which sentences start, ascending, as int64; none of them is white space.

    Blank lines end a sentence. A longer paragraph is read in windows cut at white space (line ends are no better than
    spaces), each from the start of the last sentence of the window before: so a cut neither starts a sentence nor hides
    one. Only a quotation longer than a window is read as if it had not been opened.

    Args:
        language: ISO 639-1 code; one that the library does not know has the rules of English.
    """
    text = text.rstrip()
    starts: list[int] = []
    place = 0
    for blank in (*BLANK_LINES.finditer(text), None):
        end = blank.start() if blank else len(text)
        within = False  # a sentence
        if 0 < end - place <= WINDOW:  # most paragraphs
            starts += _split(text, language, place, end)
            place = starts.pop()
        while place < end:
            bounds, cut = _bounds(text, language, place, end)
            starts += bounds[within:-1]
            within = cut
            place = bounds[-1]
        place = blank.end() if blank else end
    solid = [SOLID.search(text, start).start() if text[start].isspace() else start for start in starts]  # pyright: ignore[reportOptionalMemberAccess]
    return np.array([*dict.fromkeys(solid)], np.int64)


def tail(text: str) -> str:
    """As much of the end of a text as the sentences after it may depend on, from white space on."""
    if len(text) <= BEFORE:
        return text
    text = text[-BEFORE:]
    space = SPACE.search(text)
    return text[space.start() :] if space else text


def _bounds(text: str, language: str, place: int, end: int) -> tuple[list[int], bool]:
    """Where the sentences from `place` on start, and where to go on; whether that is within a sentence."""
    bounds: list[int] = []
    for size in (WINDOW, 2 * WINDOW):  # the second to see what comes after a long sentence
        stop = end
        if end - place > size:
            half, stop = place + size // 2, place + size
            stop = max(text.rfind(" ", half, stop), text.rfind("\n", half, stop)) + 1 or stop
        bounds = [*_split(text, language, place, stop)]
        if stop == end:
            return bounds, False
        if len(bounds) > 2:
            bounds.pop()
            return bounds, False
    return bounds, True


def _split(text: str, language: str, start: int, end: int) -> Iterator[int]:
    """`start`, and where each sentence of this part of the text ends."""
    part = text[start:end]
    if not part.isascii():
        # sentencex 1.0.32 panics on some of these; in their place, a space changes no offset.
        part = OTHER_SPACES.sub(" ", part)
    return accumulate(map(len, segment(language, part)), initial=start)
