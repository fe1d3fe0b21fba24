"""What is kept of a text: made once, found again, here or in a bucket, and never taken for another's."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from ctx_jax.data import fingerprint
from ctx_jax.data.corpora import Passage, TextFiles
from ctx_jax.data.readers import Blocks
from ctx_jax.data.symbols import Bytes, Words
from ctx_jax.data.tokenizers import Pretrained
from ctx_jax.experiment import Data
from ctx_jax.text import check_text, inspect_store, keep, kept, open_text, train_tokenizer

ASKED: list[str] = []


@dataclass(frozen=True)
class Texts:
    """Some sentences; notes each time it is read."""

    said: str = "The state of the Union is strong. We must keep it so. "

    def passages(self, split):
        ASKED.append(split)
        return (Passage(self.said * number, True, True, "en") for number in range(1, 20))

    def size(self, split):
        return None

    languages = ("en",)

    def fingerprint(self, split):
        return fingerprint(self)


@pytest.fixture
def data(tmp_path: Path) -> Data:
    ASKED.clear()
    return Data(Blocks(8), corpus=Texts(), tokenizer=Words(), folder=tmp_path / "data", workers=1)


def test_tokenizer_and_stores_are_made_once(data: Data, capsys):
    tokenizer, stores = open_text(data, ("train", "test"))
    assert ASKED == ["train", "train", "test"]
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in told] == ["learning Words", "tokenizing train", "tokenizing test"]
    assert "19 documents" in told[1]

    again, found = open_text(data, ("train", "test"))
    assert ASKED == ["train", "train", "test"]
    assert capsys.readouterr().err == ""
    assert again.fingerprint == tokenizer.fingerprint
    assert {split: store.folder for split, store in found.items()} == {s: store.folder for s, store in stores.items()}


def test_each_tokenizer_and_text_has_its_own(data: Data):
    others = (
        replace(data, tokenizer=Words(vocabulary_size=12)),
        replace(data, tokenizer=Bytes()),
        replace(data, corpus=Texts("Other words. ")),
    )
    folders = {open_text(each, ("train",))[1]["train"].folder for each in (data, *others)}
    assert len(folders) == 4


def test_a_bucket_is_copied_from_and_published_to(bucket, data: Data, tmp_path: Path):
    there = replace(data, folder="gs://bucket/kept/", local_folder=tmp_path / "here")
    tokenizer, stores = open_text(there, ("train",))
    assert ASKED == ["train", "train"]
    names = {tokenizer.folder.name, stores["train"].folder.name}
    assert {path.name for path in (tmp_path / "here").iterdir() if path.is_dir()} == names
    assert {Path(path).name for path in bucket.ls("gs://bucket/kept", detail=False)} == names

    elsewhere = replace(there, local_folder=tmp_path / "elsewhere")
    again, found = open_text(elsewhere, ("train",))
    assert ASKED == ["train", "train"]  # nothing is read again
    assert again.folder.parent == found["train"].folder.parent == tmp_path / "elsewhere"
    assert np.array_equal(found["train"].tokens, stores["train"].tokens)


def test_a_run_keeps_its_tokenizer_and_its_text(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(FileNotFoundError, match=r"run has lost its tokenizer, which its embeddings need: restore .*"):
        kept(run)
    tokenizer, stores = open_text(data, ("train",))
    keep(run, tokenizer, data.corpus, stores["train"])
    keep(run, tokenizer, data.corpus, stores["train"])
    shutil.rmtree(data.folder)
    assert kept(run).encode("The Union").ids.tolist() == tokenizer.encode("The Union").ids.tolist()

    corpus = Texts("Other words. ")
    other, other_stores = open_text(replace(data, corpus=corpus), ("train",))
    (run / "tokenizer").rename(tmp_path / "own")
    shutil.copytree(other.folder, run / "tokenizer")
    with pytest.raises(
        ValueError, match=rf"is not the tokenizer that {run} was begun with \({tokenizer.fingerprint} ->"
    ):
        kept(run)
    shutil.rmtree(run / "tokenizer")
    (tmp_path / "own").rename(run / "tokenizer")
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            ValueError, match=rf"run was begun with another text \(train .*, tokenizer .*\): restore .*{run}"
        ),
    ):
        patch.setattr("ctx_jax.text.begun", lambda run: True)
        keep(run, other, corpus, other_stores["train"])
    assert json.loads((run / "text.json").read_text())["tokenizer"] == tokenizer.fingerprint
    for damaged in ("{", "[]", "{}"):
        (run / "text.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"run/text.json is damaged, and does not say what text"):
            check_text(run, stores["train"])

    keep(run, other, corpus, other_stores["train"])  # nothing was trained yet
    mine = kept(run)
    assert mine is not None
    assert mine.fingerprint == other.fingerprint == json.loads((run / "text.json").read_text())["tokenizer"]


def test_a_given_tokenizer_reads_other_text(data: Data, tmp_path: Path):
    """As a run's own does in an evaluation of other text."""
    tokenizer, _ = open_text(data, ())
    same, stores = open_text(replace(data, corpus=Texts("The Union of others. ")), ("test",), tokenizer)
    assert same is tokenizer
    assert stores["test"].tokenizer == tokenizer.fingerprint


def test_a_trained_tokenizer_is_used_where_it_is(data: Data, tmp_path: Path):
    result = train_tokenizer(Words(), Texts(), tmp_path / "mine")
    tokenizer, stores = open_text(replace(data, tokenizer=Pretrained(tmp_path / "mine")), ("train",))
    assert tokenizer.fingerprint == result["fingerprint"]
    assert tokenizer.folder == tmp_path / "mine"
    about = inspect_store(stores["train"].folder, samples=1, length=4, seed=0)
    assert about["tokens"] == len(stores["train"].tokens)
    with pytest.raises(ValueError, match="mine is there already: choose another --output"):
        train_tokenizer(Words(), Texts(), tmp_path / "mine")


def test_a_store_is_not_read_with_another_tokenizer(data: Data, tmp_path: Path):
    """As when somebody put another into its folder."""
    tokenizer, stores = open_text(data, ("train",))
    train_tokenizer(Words(), Texts("Other words. "), tmp_path / "other")
    shutil.rmtree(tokenizer.folder)
    shutil.copytree(tmp_path / "other", tokenizer.folder)
    with pytest.raises(ValueError, match=r"holds tokens of tokenizer .*: use that tokenizer, or prepare"):
        inspect_store(stores["train"].folder, samples=1, length=4, seed=0)


def test_a_tokenizer_is_not_learned_from_a_text_that_changes_meanwhile(data: Data, tmp_path: Path):
    (tmp_path / "text.txt").write_text("The first words. " * 9)
    corpus = TextFiles(tmp_path / "text.txt")

    class Edited(Words):
        def train(self, texts, folder):
            def edited():
                for text in texts:
                    (tmp_path / "text.txt").write_text("Other words, and more of them. " * 9)
                    yield text

            return super().train(edited(), folder)

    with pytest.raises(
        ValueError, match=r"the text changed while it was read: TextFiles.*; give the same command when"
    ):
        open_text(replace(data, corpus=corpus, tokenizer=Edited()), ())
    assert not list(data.folder.glob("tokenizer-*"))  # pyright: ignore[reportAttributeAccessIssue]
