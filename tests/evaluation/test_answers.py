"""SQuAD's JSON, its scores by hand, and answers that come back from tokens as they were."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctx_jax.data.examples import Windows
from ctx_jax.data.symbols import Bytes
from ctx_jax.data.tokenizers import Tokenizer
from ctx_jax.evaluation.answers import Answers, best_spans, best_threshold, normalized, scored
from ctx_jax.evaluation.files import Encoder
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.transfer.inputs import template

CONTEXT = "The Étoile cost $12.50 (in \u201cfrancs\u201d),\n and Zoë\u00a0paid it on 3 May 1889."
ANSWERS = ("$12.50", "12", "\u201cfrancs\u201d", "Zoë", "3 May 1889", "Étoile", CONTEXT)


def asked(answers: list[str], context: str = CONTEXT) -> list[dict[str, Any]]:
    """A question for each answer, none for an empty one."""
    return [
        {
            "id": f"q{number}",
            "question": f"What is {number}?",
            "answers": [{"text": text, "answer_start": context.index(text)}] if text else [],
            "is_impossible": not text,
        }
        for number, text in enumerate(answers)
    ]


def write(path: Path, questions: list[dict[str, Any]], **layout: Any) -> Path:
    paragraph = {"context": CONTEXT, "qas": questions}
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [paragraph]}]}, **layout), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Bytes().train([], tmp_path_factory.mktemp("bytes") / "t")


@pytest.mark.parametrize("config", [BertConfig(), XLNetConfig(), GptConfig(classes=2)])
@pytest.mark.parametrize(("length", "stride"), [(128, 64), (64, 7), (64, 16), (50, 3)])
def test_answers_come_back_as_they_were(config, length, stride, tokenizer, tmp_path):
    """The model's numbers are those of the labels: whoever learns them perfectly gives the answers back."""
    questions = asked([*ANSWERS, ""])
    task = Answers(write(tmp_path / "a.json", questions), whole=True, longest=100).with_labels()
    assert task.unanswerable
    reader = Windows(length, stride=stride)
    encoder = Encoder(tokenizer, template(config, tokenizer.vocabulary, head=True), reader)
    store, predictions = task.encode(list(task.examples("train")), encoder)
    assert (len(store.rows) > len(questions)) == (length < 100)
    outputs = []
    for n in range(reader.passes(store, 4)):
        batch = reader.batch(store, n, range(4), batch_size=4, seed=None)
        scores = np.full((*batch["tokens"].shape, 2), -1e9)
        scores[batch["places"] > 0] = 0
        for row, places in enumerate(batch["labels"]):
            assert batch["places"][row, places].all() or batch["example"][row] < 0
            scores[row, places, [0, 1]] = 5.0
        outputs.append({"example": batch["example"], "scores": scores})
    said = predictions(outputs)
    held = [text if length >= 100 or len(text) < 20 else None for text in (*ANSWERS, "")]
    for one, text in zip(said, held, strict=True):
        assert text is None or one["answer"] == text
    measured = store.measure(outputs)
    if length >= 100:
        assert {name: measured[name] for name in ("f1", "exact_match", "best_f1")} == dict.fromkeys(
            ("f1", "exact_match", "best_f1"), 1.0
        )
    files = {path.name: json.loads(text) for path, text in task.files(said, tmp_path / "said.json").items()}
    assert set(files) == {"said.json", "said.nbest.json", "said.null_odds.json"}
    assert files["said.json"]["q0"] == "$12.50"
    assert files["said.null_odds.json"]["q0"] < 0 < files["said.null_odds.json"]["q7"]
    assert files["said.nbest.json"]["q0"][0]["text"] == "$12.50"


def test_normalisation_and_f1_by_hand():
    assert normalized(" The  Étoile, (an) a.b.") == "étoile ab"
    assert scored("the cat sat", ["a cat sat", "dog"]) == (1.0, 1.0)
    assert scored("big cat sat", ["the cat sat down"]) == (pytest.approx(2 * (2 / 3) * (2 / 3) / (4 / 3)), 0.0)
    assert scored("cat cat", ["cat"]) == (pytest.approx(2 / 3), 0.0)
    assert scored("", []) == (1.0, 1.0)
    assert scored("cat", []) == (0.0, 0.0)
    assert scored("", ["cat"]) == (0.0, 0.0)


def test_the_best_spans_are_those_of_all():
    rng = np.random.default_rng(0)
    for size, longest in itertools.product((1, 4, 9), (1, 3, 20)):
        start, end, allowed = rng.normal(size=size), rng.normal(size=size), rng.random(size) < 0.7
        every = sorted(
            ((start[a] + end[b], a, b) for a in range(size) for b in range(a, min(size, a + longest)) if allowed[a]),
            reverse=True,
        )
        found = best_spans(start, end, allowed, longest, 5)
        assert [(a, b) for _, a, b in found] == [(a, b) for _, a, b in every[:5]]
        np.testing.assert_allclose([score for score, _, _ in found], [score for score, _, _ in every[:5]])


def test_the_best_threshold_is_that_of_all():
    rng = np.random.default_rng(1)
    for _ in range(20):
        null, has = rng.normal(size=12), rng.random(12) < 0.6
        f1 = np.where(has, rng.random(12), 0.0)
        tried = [np.where(null <= t, f1, (~has).astype(float)).mean() for t in [null.min() - 1, *null]]
        found = best_threshold(null, f1, has)
        assert found["best_f1"] == pytest.approx(max(tried))
        at = np.where(null <= found["best_threshold"], f1, (~has).astype(float)).mean()
        assert at == pytest.approx(max(tried))


def test_articles_are_held_out_as_wholes(tmp_path):
    def paragraph(n: int) -> dict[str, Any]:
        questions = asked([f"a{n}"] * 2, f"a{n}")
        return {"context": f"a{n}", "qas": [one | {"id": f"{n} {one['id']}"} for one in questions]}

    data = [{"paragraphs": [paragraph(n)]} for n in range(20)]
    (tmp_path / "a.json").write_text(json.dumps({"data": data}))
    task = Answers(tmp_path / "a.json")
    held = {split: [one.context for one in task.examples(split)] for split in ("train", "validation", "test")}
    assert (held["validation"], held["test"], len(held["train"])) == (["a14", "a14"], ["a4", "a4"], 36)
    assert task.with_labels().unanswerable is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": [{"text": "12", "answer_start": 3}]}, r"a.json line 21: question 'q1': the answer '12' is not in"),
        ({"answers": [{"text": "12"}]}, r"line 21: question 'q1': an answer needs text and answer_start"),
        ({"answers": [{"text": "12", "answer_start": True}]}, r"line 21: question 'q1': an answer needs text and"),
        ({"answers": None}, r"line 21: question 'q1': it has no list of answers: give one, which is \[\] where"),
        ({"answers": {"text": ["12"]}}, r"line 21: question 'q1': it has no list of answers"),
        ({"question": " "}, r"line 21: question 'q1': its question is empty"),
        ({"id": 7}, r'line 21: question 7: its id must be a text: write it in quotes, "7"$'),
        ({"id": " "}, r"line 21: question ' ': its id is empty or no text: fill it"),
        ({"question": "a \ud800"}, r"line 21: question 'q1': its question has half a surrogate pair .*: remove it, or"),
        ({"id": "\udc00"}, r"a.json line 21: question '\\udc00': its id has half a surrogate pair"),
        (
            {"answers": [{"text": "\ud800", "answer_start": 3}]},
            r"line 21: question 'q1': an answer has half a surrogate",
        ),
        ({"id": "q0"}, r"line 21: question 'q0' has the id of the one in line 10: give each an id of its own"),
    ],
)
def test_bad_questions_are_named(change, message, tmp_path):
    questions = asked(["$12.50", "12", "Zoë"])
    questions[1] |= change
    with pytest.raises(ValueError, match=message):
        list(Answers(write(tmp_path / "a.json", questions, indent=1), whole=True).examples("train"))


def test_half_a_surrogate_pair_can_be_replaced(tmp_path):
    paragraph = {"context": "a \ud800 b", "qas": asked(["\ud800 b"], "a \ud800 b")}
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    with pytest.raises(ValueError, match=r"a.json line 1: question 'q0': its context has half a surrogate pair"):
        list(Answers(tmp_path / "a.json", whole=True).examples("train"))
    (one,) = Answers(tmp_path / "a.json", whole=True, errors="replace").examples("train")
    assert (one.context, one.answers) == ("a \ufffd b", (("\ufffd b", 2),))


def test_an_id_is_of_one_question_in_all_of_a_file(tmp_path):
    data = [{"paragraphs": [{"context": "a", "qas": asked(["a"], "a")}]} for _ in range(2)]
    (tmp_path / "a.json").write_text(json.dumps({"data": data}))
    task = Answers(tmp_path / "a.json", whole=True)
    for read in (lambda: task.examples("train"), lambda: task.inputs(tmp_path / "a.json")):
        with pytest.raises(ValueError, match=r"a.json line 1: question 'q0' has the id of the one in line 1"):
            list(read())


def test_what_is_no_squad_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"data": [\n}')
    with pytest.raises(ValueError, match=r"a.json line 2 is not JSON: Expecting value"):
        list(Answers(tmp_path / "a.json", whole=True).examples("train"))
    (tmp_path / "a.json").write_text('{"data": [{"text": "x"}]}')
    with pytest.raises(ValueError, match=r"a.json is not SQuAD's JSON: it must be like"):
        list(Answers(tmp_path / "a.json", whole=True).examples("train"))
