"""Files of tagged words, what is wrong with them, and entities by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctx_jax.data.examples import Windows
from ctx_jax.data.symbols import Bytes
from ctx_jax.data.tokenizers import Tokenizer
from ctx_jax.evaluation.files import Encoder
from ctx_jax.evaluation.tagging import Sentence, Tagging, from_iob1
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.transfer.inputs import template

LABELS = ("O", "B-x", "I-x", "B-y", "I-y")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Bytes().train([], tmp_path_factory.mktemp("bytes") / "t")


def test_sentences_are_read_with_tabs_or_spaces(tmp_path):
    text = "-DOCSTART- -X- O O\n\nU.N. NNP B-x B-x\nsays VB O O\n\n\nof P O I-x\n-DOCSTART- -X- O O\nso A O O\n"
    read = Tagging(write(tmp_path / "a.conll", text), whole=True, scheme="IOB1").examples("train")
    assert [(one.words, one.tags, one.line) for one in read] == [
        (("U.N.", "says"), ("B-x", "O"), 3),
        (("of",), ("B-x",), 7),
        (("so",), ("O",), 9),
    ]
    task = Tagging(write(tmp_path / "b.tsv", "B-y\tNew York\n \t\nI-y\t,\n"), whole=True, token_column=1, tag_column=0)
    with pytest.raises(ValueError, match=r"b.tsv line 3: 'I-y' follows 'O', and in BIO an entity begins with 'B-y'"):
        list(task.examples("train"))
    write(tmp_path / "b.tsv", "B-y\tNew York\n \t\nO\t,\n")
    assert [one.words for one in task.examples("train")] == [("New York",), (",",)]
    assert task.with_labels().labels == ("O", "B-y", "I-y")


def test_only_spaces_and_tabs_part_columns(tmp_path):
    text = "10\u00a0000  B-x\nof\u2009it\tO\n"
    (read,) = Tagging(write(tmp_path / "a.conll", text), whole=True).examples("train")
    assert (read.words, read.tags) == (("10\u00a0000", "of\u2009it"), ("B-x", "O"))


def test_inputs_are_sentences_or_words_in_columns(tmp_path, capsys):
    task = Tagging(tmp_path / "a.conll")

    def read(name: str, text: str) -> list[tuple[str, ...]]:
        return [one.words for one in task.inputs(write(tmp_path / name, text))]

    words = [("Mr", "Smith"), ("O",)]
    assert read("a.conll", "Mr\nSmith\n\nO\n") == words
    assert capsys.readouterr().err == ""
    for name in ("eng.testb", "a.txt"):
        assert read(name, "Mr NNP O\nSmith NNP B-PER\n\nO NNP O\n") == words
        assert f"{name} is read as a word a line, since each ends in a tag" in capsys.readouterr().err
    assert read("a.txt", "Mr Smith\nO\n") == words
    assert read("a.txt", "Vitamin O\n") == [("Vitamin", "O")]
    assert read("a.txt", "Mr O\nSmith B-PER now\n") == [("Mr", "O"), ("Smith", "B-PER", "now")]
    for name in ("a.csv", "a.jsonl.gz"):
        with pytest.raises(ValueError, match=rf"{name} holds no sentences to tag: give one a line"):
            read(name, "x")


def test_iob1_by_hand():
    tags = ("I-x", "I-x", "B-x", "I-x", "O", "I-y", "I-x", "B-y")
    assert from_iob1(tags) == ("B-x", "I-x", "B-x", "I-x", "O", "B-y", "B-x", "B-y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tO\nb\tP-x\n", r"a.conll line 2: unknown tag 'P-x': tags are O, B-x and I-x"),
        ("a\tO\n\nb\tI-x\n", r"a.conll line 3: 'I-x' follows 'O', and in BIO an entity begins with 'B-x': mend it"),
        ("a\tB-x\nb\tI-y\n", r"a.conll line 2: 'I-y' follows 'B-x'"),
        ("a\tO\nb\n", r"a.conll line 2 has 1 columns, and none for column"),
        ("a\tO\n\tO\n", r"a.conll line 2: column 0 is empty: fill it"),
        ("a\tO\nb\t\n", r"a.conll line 2: column -1 is empty"),
        ("a\tO\n", r"a.conll has no entity"),
        ("\n\n", r"a.conll: the split train is empty"),
    ],
)
def test_bad_lines_are_named(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Tagging(write(tmp_path / "a.conll", text), whole=True).with_labels()


def test_a_tag_that_training_does_not_have_is_named(tmp_path, tokenizer):
    write(tmp_path / "a.conll", "a\tB-x\n")
    other = write(tmp_path / "b.conll", "a\tO\nb\tB-z\n")
    task = Tagging(tmp_path / "a.conll", validation=other, test=other).with_labels()
    encoder = Encoder(tokenizer, template(BertConfig(), tokenizer.vocabulary, head=True), Windows(9))
    with pytest.raises(ValueError, match=r"b.conll line 2: unknown label 'B-z'; did you mean 'B-x'\?; there are O"):
        task.encode(list(task.examples("validation")), encoder)


def sentences() -> list[Sentence]:
    """One long; a word of which nothing is kept is among them; a word that is longer than a window; a single word."""
    tags = ("B-x", "I-x", "O", "B-y", "O", "B-x", "I-x", "I-x")
    words = ("New", "York", "is", "far", "a" * 40, "x", "\u00e9tat", "!")
    return [Sentence(words, tags, "f", 1), Sentence(("yes",), ("O",), "f", 10)]


@pytest.mark.parametrize("config", [BertConfig(), XLNetConfig()])
@pytest.mark.parametrize("length", [4, 9, 16, 200])
@pytest.mark.parametrize("stride", [1, 3, 50])
def test_each_word_is_scored_once_at_its_first_piece(config, length, stride, tokenizer):
    task = Tagging("f", labels=LABELS)
    reader = Windows(length, stride=stride)
    encoder = Encoder(tokenizer, template(config, tokenizer.vocabulary, head=True), reader)
    store, predictions = task.encode(sentences(), encoder)
    assert max(store.sizes) <= length
    assert (len(store.rows) == 2) == (length == 200)
    outputs, seen = [], []
    for n in range(reader.passes(store, 3)):
        batch = reader.batch(store, n, range(3), batch_size=3, seed=None)
        labels = batch["labels"]
        seen += labels[labels >= 0].tolist()
        first = batch["tokens"][labels >= 0]
        letters = {ord(word[0].encode().decode("latin-1")[0]) for one in sentences() for word in one.words}
        assert {int(token) - 7 for token in first} <= letters
        outputs.append({"example": batch["example"], "scores": np.eye(5)[np.maximum(labels, 0)]})
    assert sorted(seen) == sorted(LABELS.index(tag) for one in sentences() for tag in one.tags)
    assert store.measure(outputs) == {"f1": 1.0, "precision": 1.0, "recall": 1.0, "accuracy": 1.0}
    said = predictions(outputs)
    assert [tuple(word["tag"] for word in one["words"]) for one in said] == [one.tags for one in sentences()]
    assert [word["word"] for word in said[0]["words"]] == list(sentences()[0].words)
    assert said[0]["words"][0]["probability"] == pytest.approx(np.e / (np.e + 4), abs=1e-6)


def test_entities_by_hand(tokenizer):
    """Gold: x at 0-1, y at 3, x at 5-7. Said: x at 0-1, x at 3, x at 5-6, so one of three is right of three."""
    task = Tagging("f", labels=LABELS)
    encoder = Encoder(tokenizer, template(BertConfig(), tokenizer.vocabulary, head=True), Windows(200))
    store, _ = task.encode(sentences(), encoder)
    said = {0: ("B-x", "I-x", "O", "B-x", "O", "B-x", "I-x", "O"), 1: ("O",)}
    outputs = []
    for row, tags in said.items():
        scores = np.zeros((1, 200, 5))
        places = np.flatnonzero(store.labels[row] >= 0)
        scores[0, places, [LABELS.index(tag) for tag in tags]] = 1
        outputs.append({"example": np.array([row]), "scores": scores})
    third = pytest.approx(1 / 3)
    assert store.measure(outputs) == {"f1": third, "precision": third, "recall": third, "accuracy": 7 / 9}
