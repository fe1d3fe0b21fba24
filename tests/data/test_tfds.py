"""TFDS data sets made and read without TensorFlow, offline."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ctx_jax.data import tfds as module
from ctx_jax.data.corpora import Passage, Sotu, TextFiles, documents
from ctx_jax.data.passages import PASSAGE
from ctx_jax.data.tfds import Tfds, corpus_from, load_library, write_tfds
from ctx_jax.serialization import from_json, to_json

SPLITS = ("train", "validation", "test")


class Given:
    """A corpus of these documents."""

    languages = ("en",)

    def __init__(self, train: list[str], validation: list[str] | None = None, key: str = "given") -> None:
        self.texts = {"train": train, "validation": validation or [], "test": []}
        self.key = key

    def passages(self, split):
        return (Passage(text, True, True, "en") for text in self.texts[split])

    def size(self, split):
        return None

    def fingerprint(self, split):
        return self.key


def texts(corpus: Any, split: str = "train") -> list[str]:
    return list(documents(corpus.passages(split)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets "sotu", and "small" of 25 documents."""
    path = tmp_path_factory.mktemp("tfds")
    write_tfds(Sotu(), "sotu", path)
    write_tfds(Given([f"document {i}" for i in range(25)], ["held out"]), "small", path)
    return path


def test_a_corpus_comes_back_as_it_was(folder):
    assert sorted(path.name for path in (folder / "sotu" / "1.0.0").iterdir()) == [
        "dataset_info.json",
        "features.json",
        "metadata.json",
        *(f"sotu-{split}.array_record-00000-of-00001" for split in ("test", "train", "validation")),
    ]
    again = Tfds("sotu", folder, validation="validation", test="test")
    for split in SPLITS:
        assert list(again.passages(split)) == list(Sotu().passages(split))


def test_hard_text_in_many_files_keeps_its_order(tmp_path):
    hard = ["[MASK] </s>\nb", "\0 \u2028 \x85 é \U0001f642", "word " * (PASSAGE // 4) + "end"]
    hard += [f"d{i}" for i in range(40)]
    with mock.patch.object(module, "SHARD", 20):
        path = write_tfds(Given(hard), "hard", tmp_path)
    assert len(list(path.glob("hard-train.array_record-*"))) > 3
    assert texts(Tfds("hard", tmp_path, whole=True)) == hard
    assert len(list(Tfds("hard", tmp_path, whole=True).passages("train"))) == len(hard) + 1


def test_its_own_splits_else_held_out_from_train(folder):
    train, validation, test = (texts(Tfds("small", folder), split) for split in SPLITS)
    assert (validation, test) == (["held out"], ["document 19"])
    assert train == [f"document {i}" for i in range(25) if i != 19]
    assert texts(Tfds("small", folder, validation="train[:2]"), "validation") == ["document 0", "document 1"]
    whole = Tfds("small", folder, whole=True)
    assert [texts(whole, split) for split in SPLITS] == [[f"document {i}" for i in range(25)]] * 3
    assert len({whole.fingerprint(split) for split in ("train", "validation", "test")}) == 1
    with pytest.raises(ValueError, match=r"train\[:2\] is other text than train, of which whole has all: leave out"):
        Tfds("small", folder, validation="train[:2]", whole=True)


def test_parts_of_splits(folder):
    corpus = Tfds(
        "small:1.0.0", folder, train="train[:80%]", validation="train[20:22]", test="train[-1:]", language="de"
    )
    assert texts(corpus) == [f"document {i}" for i in range(20)]
    assert texts(corpus, "validation") == ["document 20", "document 21"]
    assert texts(corpus, "test") == ["document 24"]
    assert next(corpus.passages("train")).language == "de"


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_other_splits_name_is_not_trained_on(folder, split):
    corpus = Tfds("small", folder, train="train[2:]", validation="train[:3]")
    with pytest.raises(ValueError, match=r"validation 'train\[:3\]' of .* small has records of train 'train\[2:\]'"):
        texts(corpus, split)
    with pytest.raises(ValueError, match=r"choose parts that are apart, such as train\[:90%\] and train\[90%:\], or"):
        corpus.fingerprint(split)


def test_line_ends_and_empty_records(tmp_path):
    write_tfds(Given(["\na\r\nb\rc\n", "\n", " ", "d"]), "ends", tmp_path)
    assert texts(Tfds("ends", tmp_path, whole=True)) == ["a\nb\nc", "d"]


def test_fingerprint_follows_content(folder, tmp_path):
    shutil.copytree(folder / "small", tmp_path / "small")
    small = Tfds("small", folder)
    assert all(Tfds("small", tmp_path).fingerprint(split) == small.fingerprint(split) for split in SPLITS)
    corpora = (
        small,
        Tfds("small", folder, validation="train[:1]", train="train[1:]"),
        Tfds("small", folder, train="train[:90%]"),
        Tfds("small", folder, whole=True),
        Tfds("sotu", folder),
    )
    shutil.rmtree(tmp_path / "small")
    other = Given([f"document {i + 1}" for i in range(25)], ["held out"], key="other")
    write_tfds(other, "small", tmp_path)
    assert len({corpus.fingerprint("train") for corpus in (*corpora, Tfds("small", tmp_path))}) == 6
    assert Tfds("small", folder, language="de").fingerprint("train") == small.fingerprint("train")
    parts = [Tfds("small", folder, validation=part, train="train[5:]") for part in ("train[:1]", "train[:2]")]
    keys = [[part.fingerprint(split) for split in SPLITS] for part in parts]
    assert [a == b for a, b in zip(*keys, strict=True)] == [True, False, True]


def test_written_once_and_never_over_another(tmp_path):
    path = write_tfds(Given(["a"]), "one", tmp_path)
    assert write_tfds(Given(["not read"]), "one", tmp_path) == path
    with pytest.raises(FileExistsError, match=r"one/1\.0\.0 holds a data set of another text: choose another name"):
        write_tfds(Given(["b"], key="other"), "one", tmp_path)
    assert texts(Tfds("one", tmp_path, whole=True)) == ["a"]


@pytest.mark.parametrize(
    ("passes", "error", "kind", "message"),
    [
        (0, ValueError("it broke here"), ValueError, r"^it broke here$"),
        (3, ValueError("it broke here"), ValueError, r"^it broke here$"),
        (
            3,
            RuntimeError("write() failed: No space left on device; ..."),
            OSError,
            r"No space left on device: '.*1\.0\.0'",
        ),
    ],
)
def test_a_failure_leaves_nothing(tmp_path, passes, error, kind, message):
    class Breaks(Given):
        """Reads of it fail after three, which count its splits; the fourth writes."""

        begun = 0

        def passages(self, split):
            self.begun += 1
            yield Passage("a", True, True, "en")
            if self.begun > passes:
                raise error
            yield Passage("b", True, True, "en")

    with pytest.raises(kind, match=message):
        write_tfds(Breaks([]), "broken", tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(".lock")] == []
    write_tfds(Given(["a"]), "broken", tmp_path)


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="name 'My-Set' cannot name a TFDS data set: use lower-case letters"):
        write_tfds(Given(["a"]), "My-Set", tmp_path)
    with pytest.raises(ValueError, match="has no documents: there is nothing to make a data set of"):
        write_tfds(Given([]), "empty", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "smal"},
            r"no TFDS data set smal is prepared in .*; did you mean 'small'\?: prepare it there \(tfds build",
        ),
        (
            {"name": "wiki40b/en"},
            r"no TFDS data set wiki40b/en is prepared in [^;]*: prepare it there \(tfds build wiki40b",
        ),
        ({"name": "small:2.0.0"}, r"no TFDS data set small:2\.0\.0 is prepared in"),
        (
            {"train": "trian"},
            r"TFDS data set small has no split 'trian'; did you mean 'train'\? \(there are: train, valid",
        ),
        (
            {"train": "train[:x]"},
            r"TFDS data set small has no part 'train\[:x\]' \(there are: .* parts are like train\[:90%",
        ),
        ({"feature": "txt"}, r"TFDS data set small has no feature 'txt'; did you mean 'text'\? \(there are: text\)"),
    ],
)
def test_what_is_not_there(folder, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        texts(Tfds(**{"name": "small", "data_dir": folder, **options}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "mnist/x=1,y=2", "../mnist"])
def test_names_that_are_none(name):
    with pytest.raises(ValueError, match=r"is no name of a TFDS data set: give one like wiki40b/en"):
        Tfds(name)


def test_a_feature_that_is_no_text(tmp_path):
    tfds = load_library()

    class Builder(tfds.core.ShardBasedBuilder, skip_registration=True):  # pyright: ignore
        name = "numbers"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"label": tfds.features.ClassLabel(num_classes=2), "words": tfds.features.Text()}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _shard_iterators_per_split(self, dl_manager):
            return {"train": [lambda: iter([(0, {"label": 1, "words": b"a"}), (1, {"label": 0, "words": b"b\xff"})])]}

    with module.quiet():
        Builder(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    with pytest.raises(
        ValueError, match=r"feature 'label' of TFDS data set numbers is no text but ClassLabel: .*\(words\)"
    ):
        texts(Tfds("numbers", tmp_path, feature="label"))
    with pytest.raises(
        ValueError, match=r"record 1 of train of numbers is not UTF-8 at its byte 1: make the data set anew"
    ):
        texts(Tfds("numbers", tmp_path, feature="words"))
    assert next(Tfds("numbers", tmp_path, feature="words", whole=True).passages("train")).text == "a"


def test_a_set_in_another_format(folder, tmp_path):
    shutil.copytree(folder / "small", tmp_path / "small")
    about = tmp_path / "small" / "1.0.0" / "dataset_info.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "fileFormat": "tfrecord"}))
    with pytest.raises(
        ValueError, match=r"is in the format tfrecord, which only TensorFlow reads: prepare it with --file_"
    ):
        texts(Tfds("small", tmp_path))


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_damaged_set(folder, tmp_path, harm):
    shutil.copytree(folder / "small", tmp_path / "small")
    (file,) = (tmp_path / "small" / "1.0.0").glob("small-train*")
    file.write_bytes(file.read_bytes()[:1000]) if harm == "cut" else file.unlink()
    with pytest.raises(
        ValueError,
        match=r"one of the records 0 to 0 of train of TFDS data set small cannot be read: .+; prepare it anew",
    ) as caught:
        texts(Tfds("small", tmp_path))
    assert "\n" not in str(caught.value)


def test_one_word_names_a_corpus(tmp_path):
    assert corpus_from("tfds:wiki40b/en") == Tfds("wiki40b/en")
    assert corpus_from(str(tmp_path)) == TextFiles(tmp_path)
    assert corpus_from("gs://bucket/a") == TextFiles("gs://bucket/a")


def test_a_corpus_is_a_value(tmp_path):
    corpus = Tfds("sotu", tmp_path, test="test")
    assert from_json(to_json(corpus)) == corpus == Tfds("sotu", str(tmp_path), test="test")


def test_nothing_is_printed_and_neither_jax_nor_tensorflow_imported(folder):
    code = (
        "import sys; from ctx_jax.data.tfds import Tfds, write_tfds; from pathlib import Path\n"
        "assert 'tensorflow_datasets' not in sys.modules\n"
        f"corpus = Tfds('small', {str(folder)!r})\n"
        "list(corpus.passages('test')); corpus.fingerprint('test')\n"
        f"write_tfds(corpus, 'copy', Path({str(folder)!r}))\n"
        "assert not {'jax', 'tensorflow'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
