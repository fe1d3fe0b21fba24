"""TensorFlow Datasets, without TensorFlow: reading those in the array_record format, and making one of any corpus.

The library is imported only where it is used: it takes a third of a second.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np

from ctx_jax.data import building, fingerprint
from ctx_jax.data.corpora import Corpus, TextFiles, check_language
from ctx_jax.data.files import content, location
from ctx_jax.data.jsonl import unified
from ctx_jax.data.passages import SHARE, Passage, Split, cut, documents, held_out
from ctx_jax.serialization import nearest

VERSION = "1.0.0"
"""Of the data sets that are made here."""

SHARD = 1 << 26
"""Characters after which a file of a data set ends; TFDS holds that much in memory."""


TOGETHER, TOGETHER_AT_MOST = 1 << 22, 256
"""About how many bytes of records are read at once, and how many records."""


def corpus_from(text: str) -> TextFiles | Tfds:
    """The corpus that one word names: "tfds:NAME" is a TFDS data set, anything else a file, a folder or a glob."""
    return Tfds(text.removeprefix("tfds:")) if text.startswith("tfds:") else TextFiles(text)


@dataclass(frozen=True)
class Tfds:
    """A TFDS data set that has been prepared in the array_record format; each record is a document.

    Records of `train` that are those of `validation` or `test` too are an error, which names a way out.
    """

    name: str
    """Its name, with the configuration and the version if there are several: wiki40b/en, wiki40b/en:1.3.0."""
    data_dir: str | Path | None = None
    """The folder of data sets, local or remote; None: TFDS's own (TFDS_DATA_DIR, else ~/tensorflow_datasets)."""
    train: str = "train"
    """The split to train on, or a part of it such as train[:90%]."""
    validation: str | None = None
    """The same for validation; None: the split of that name, or where there is none, held out as TextFiles does."""
    test: str | None = None
    """The same for the test."""
    whole: bool = False
    """Whether every split is all of `train`, nothing held out: to score a text, or to train on all of it."""
    feature: str = "text"
    """The feature of a record that holds its text."""
    language: str = "en"
    """ISO 639-1 code: which rules end a sentence."""

    def __post_init__(self) -> None:
        check_language(self.language)
        if not re.fullmatch(r"\w+(/[\w.\-]+)*(:[\w.*]+)?", self.name):
            raise ValueError(
                f"name {self.name!r} is no name of a TFDS data set: give one like wiki40b/en or wiki40b/en:1.3.0"
            )
        if self.data_dir is not None:
            object.__setattr__(self, "data_dir", location(self.data_dir))
        if self.whole and (self.validation or self.test):
            raise ValueError(
                f"{self.validation or self.test} is other text than train, of which whole has all: leave out one"
            )

    @property
    def languages(self) -> tuple[str, ...]:
        return (self.language,)

    def passages(self, split: Split) -> Iterator[Passage]:
        """The records of a split, in the data set's order. Raises ValueError, naming the remedy, for what is not there
        or is no text."""
        own, held = self._own(split), self._held_out(split)
        if own is None:
            self._check_apart()
        return held_out(lambda: self._read(own or self.train), split, held, self.language)

    def size(self, split: Split) -> int | None:
        return None  # the files are compressed, and what TFDS notes of them depends on how they were made

    def fingerprint(self, split: Split) -> str:
        builder, own, held = self._builder(), self._own(split), self._held_out(split)
        if own is None:
            self._check_apart()
        instructions = self._files(builder, own or self.train)
        files = content(_file(instruction.filename) for instruction in instructions)
        ranges = [(instruction.skip, instruction.take) for instruction in instructions]
        share = (SHARE, split, held) if held else None
        return fingerprint(type(self).__name__, builder.info.full_name, files, ranges, share, self.feature)

    def _own(self, split: Split) -> str | None:
        """The data set's split for validation or test, if they are not cut from train."""
        if split == "train" or self.whole:
            return None
        return getattr(self, split, None) or (split if split in list(self._builder().info.splits) else None)

    def _held_out(self, split: Split) -> tuple[str, ...]:
        """Which splits share the records of this one with train."""
        if self.whole or self._own(split) is not None:
            return ()
        return tuple(name for name in ("validation", "test") if self._own(name) is None)

    def _check_apart(self) -> None:
        """Raises ValueError if train holds records that validation or test name."""
        builder = self._builder()
        train = {file.filename: file for file in self._files(builder, self.train)}
        for name in ("validation", "test"):
            if (own := self._own(name)) is None:
                continue
            for part in self._files(builder, own):
                file = train.get(part.filename)
                if file and max(part.skip, file.skip) < min(part.skip + part.take, file.skip + file.take):
                    raise ValueError(
                        f"{name} {own!r} of TFDS data set {self.name} has records of train {self.train!r}: choose "
                        "parts that are apart, such as train[:90%] and train[90%:], or set whole to use all as each"
                    )

    def _read(self, split: str) -> Iterator[Passage]:
        passages = cut(self._texts(split), self.language)
        first = next(passages, None)
        if first is None:
            raise ValueError(f"there is no text in {split} of {self.name}: all its documents are empty or white space")
        yield first
        yield from passages

    def _texts(self, split: str) -> Iterator[str]:
        builder = self._builder()
        self._files(builder, split)
        self._check_feature(builder)
        with self._readable(split):
            source = builder.as_data_source(split, file_format="array_record")
        for number, data in enumerate(self._records(source, split)):
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"record {number} of {split} of {self.name} is not UTF-8 at its byte {error.start}: make the data "
                    "set anew without it"
                ) from None
            yield unified(text)

    def _records(self, source: Any, split: str) -> Iterator[bytes]:
        """The feature of each record; several are read at once, which is 20 times as fast."""
        number, count = 0, 1
        while number < len(source):
            keys = list(range(number, min(number + count, len(source))))
            with self._readable(f"one of the records {keys[0]} to {keys[-1]} of {split}"):
                records = [record[self.feature] for record in source.__getitems__(keys)]
            yield from records
            number += len(records)
            count = min(2 * count, TOGETHER_AT_MOST, max(1, TOGETHER * len(records) // (sum(map(len, records)) + 1)))

    def fields(self, split: str, names: Sequence[str]) -> Iterator[dict[str, str]]:
        """These features of each record of a split, in the data set's order, as text: a class by its name ("" for
        none), a number as it is written. Raises ValueError, naming the remedy, for what is not there."""
        builder = self._builder()
        self._files(builder, split)
        features = builder.info.features
        for name in names:
            if name not in features:
                raise ValueError(
                    f"TFDS data set {self.name} has no feature {name!r}{nearest(name, list(features))} (there are: "
                    f"{', '.join(features)})"
                )
        with self._readable(split):
            source = builder.as_data_source(split, file_format="array_record")
        for first in range(0, len(source), TOGETHER_AT_MOST):
            last = min(first + TOGETHER_AT_MOST, len(source))
            with self._readable(f"one of the records {first} to {last - 1} of {split}"):
                records = source.__getitems__(list(range(first, last)))
            for record in records:
                yield {name: _written(features[name], record[name]) for name in names}

    def _builder(self) -> Any:
        tfds = load_library()
        folder = None if self.data_dir is None else str(self.data_dir)
        try:
            name, options = tfds.core.naming.parse_builder_name_kwargs(self.name)
            with quiet():
                builder = tfds.core.read_only_builder.builder_from_files(str(name), data_dir=folder, **options)
        except (tfds.core.registered.DatasetNotFoundError, FileNotFoundError):
            folders = [str(place) for place in tfds.core.utils.file_utils.list_data_dirs(folder)]
            library = Path(str(tfds.__file__)).parent  # its own list leaves out what needs TensorFlow to be made
            listed = [place for place in (*folders, library / "datasets", library / "text") if os.path.isdir(place)]
            known = {name.removesuffix(".py") for place in listed for name in os.listdir(place)}
            base = re.split("[/:]", self.name)[0]
            hint = "" if base in known else nearest(base, sorted(known))
            raise FileNotFoundError(
                f"no TFDS data set {self.name} is prepared in {', '.join(folders)}{hint}: prepare it there (tfds build "
                f"{base} --file_format=array_record), make one of text (ctx_jax data tfds), or set "
                "--data.corpus.data-dir"
            ) from None
        if tfds.core.file_adapters.FileFormat.ARRAY_RECORD not in builder.info.available_file_formats():
            raise ValueError(
                f"TFDS data set {self.name} in {builder.data_dir} is in the format {builder.info.file_format.value}, "
                "which only TensorFlow reads: prepare it with --file_format=array_record"
            )
        return builder

    def _files(self, builder: Any, split: str) -> list[Any]:
        """Which records of which files make the split."""
        tfds = load_library()
        if builder.info.file_format is not tfds.core.file_adapters.FileFormat.ARRAY_RECORD:
            builder.info.set_file_format("array_record", override=True, override_if_initialized=True)
        there = list(builder.info.splits)
        try:
            return builder.info.splits[split].file_instructions
        except (KeyError, ValueError, AssertionError):
            base = re.split(r"[\[+]", split)[0]
            what = f"no split {split!r}{nearest(base, there)}" if base not in there else f"no part {split!r}"
            raise ValueError(
                f"TFDS data set {self.name} has {what} (there are: {', '.join(there)}; parts are like train[:90%])"
            ) from None

    def _check_feature(self, builder: Any) -> None:
        features = builder.info.features
        if self.feature not in features:
            raise ValueError(
                f"TFDS data set {self.name} has no feature {self.feature!r}{nearest(self.feature, list(features))} "
                f"(there are: {', '.join(features)})"
            )
        texts = [name for name, kind in features.items() if kind.shape == () and np.dtype(kind.np_dtype) == object]
        if self.feature not in texts:
            kind = type(features[self.feature]).__name__
            raise ValueError(
                f"feature {self.feature!r} of TFDS data set {self.name} is no text but {kind}: name "
                f"one that is ({', '.join(texts) or 'there is none'})"
            )

    @contextlib.contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Says in one line what array_record says in many."""
        try:
            yield
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{what} of TFDS data set {self.name} cannot be read: {reason}; prepare it anew") from None


def write_tfds(corpus: Corpus, name: str, data_dir: Path) -> Path:
    """Makes a TFDS data set of a corpus: splits train, validation and test (those that have documents), feature "text",
    array_record format, a record for each document, in order. It is read by `Tfds(name, data_dir)`.

    Returns its folder, which appears when everything is written; memory holds one file of it. Raises FileExistsError
    if a data set of that name is there that is not of this corpus.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name {name!r} cannot name a TFDS data set: use lower-case letters, digits and _")
    key = fingerprint([corpus.fingerprint(split) for split in get_args(Split)])
    folder = data_dir / name / VERSION
    with building(folder) as partial:
        if partial is not None:
            shards = {split: list(_shards(corpus, split)) for split in get_args(Split)}
            if not any(shards.values()):
                raise ValueError(f"{corpus} has no documents: there is nothing to make a data set of")
            builder = _make_builder(corpus, name, shards, key)(data_dir=str(partial), file_format="array_record")
            try:
                with quiet():
                    builder.download_and_prepare()
            except RuntimeError as error:  # as array_record says it
                if "No space left" not in str(error):
                    raise
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
            for file in (partial / name / VERSION).iterdir():
                file.rename(partial / file.name)
            for extra in ("downloads", name):
                shutil.rmtree(partial / extra, ignore_errors=True)
    if load_library().builder_from_directory(str(folder)).info.metadata != {"corpus": key}:
        raise FileExistsError(f"{folder} holds a data set of another text: choose another name, or delete it")
    return folder


def _shards(corpus: Corpus, split: Split) -> Iterator[int]:
    """How many documents stand in each file of a split."""
    count = size = 0
    for passage in corpus.passages(split):
        size += len(passage.text)
        count += passage.last
        if passage.last and size >= SHARD:
            yield count
            count = size = 0
    if count:
        yield count


def _make_builder(corpus: Corpus, name_: str, shards: dict[Split, list[int]], key: str) -> Any:
    tfds = load_library()

    # Not a GeneratorBasedBuilder, which holds up to 1 GB of text in memory and for more needs TensorFlow.
    class Builder(  # pyright: ignore[reportGeneralTypeIssues]
        tfds.core.ShardBasedBuilder,
        skip_registration=True,  # pyright: ignore[reportCallIssue]
    ):
        name = name_
        VERSION = tfds.core.Version(VERSION)

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(
                builder=self,
                description=f"The documents of a {type(corpus).__name__}.",
                features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
                disable_shuffling=True,
                metadata=tfds.core.MetadataDict(corpus=key),
            )

        def _shard_iterators_per_split(self, dl_manager: Any) -> dict[str, list[Any]]:
            return {split: self._examples(split, counts) for split, counts in shards.items() if counts}

        def _examples(self, split: Split, counts: list[int]) -> list[Any]:
            texts = enumerate(documents(corpus.passages(split)))  # one stream: the files are written one by one
            return [
                lambda count=count: ((key, {"text": text}) for key, text in itertools.islice(texts, count))
                for count in counts
            ]

    return Builder


def load_library() -> ModuleType:
    """tensorflow_datasets, imported in silence."""
    try:
        with quiet():
            import tensorflow_datasets
    except ImportError as error:
        raise ValueError(
            f"TFDS data sets need tensorflow-datasets and array_record: pip install them ({error})"
        ) from None
    return tensorflow_datasets


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what TFDS prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _written(feature: Any, value: Any) -> str:
    if isinstance(value, bytes):
        return unified(value.decode())
    if hasattr(feature, "int2str"):
        return feature.int2str(int(value)) if value >= 0 else ""
    return str(value)


def _file(name: str) -> Any:
    place = location(str(name))
    if isinstance(place, Path):
        return place
    from etils import epath

    return epath.Path(place)
