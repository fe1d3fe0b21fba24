"""Tags, answers and choices from a pretrained run to predictions, each by another model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ctx_jax.cli import main
from ctx_jax.experiment import load
from tests.conftest import WORDS

OPTIONS = ["--data.batch-size", "4", "--data.evaluation-batch-size", "4", "--training.log-every", "1"]


def run(capsys, *arguments: str | Path) -> dict:
    main([str(argument) for argument in arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_words_get_tags(run_of, tmp_path, capsys):
    chance = random.Random(4)
    sentences = [chance.choices(WORDS, k=chance.choice((4, 30))) for _ in range(20)]
    lines = [[f"{word}\t{'B-war' if word in ('war', 'peace') else 'O'}\n" for word in words] for words in sentences]
    (tmp_path / "a.conll").write_text("\n".join("".join(one) for one in lines).replace("the\tO", "war\tB-war"))
    result = run(
        capsys, "train", "finetune:tagging", "--from", run_of("bert"), "--text", tmp_path / "a.conll", "--run",
        tmp_path / "run", *OPTIONS, "--data.reader.length", "8", "--data.reader.stride", "3",
        "--training.epochs", "0.02",
    )  # fmt: skip
    assert set(result["evaluation"]) == {"loss", "f1", "precision", "recall", "accuracy"}
    kept = load(tmp_path / "run/experiment.json")
    assert (kept.data.corpus.labels, kept.model.token_classes) == (("O", "B-war", "I-war"), 3)
    assert (kept.model.classes, kept.training.best) == (None, "f1")
    scored = run(capsys, "evaluate", tmp_path / "run", "--split", "validation")
    assert {name: scored[name] for name in result["evaluation"]} == pytest.approx(result["evaluation"])
    assert (scored["target_length"], scored["stride"]) == (8, 3)
    other = run(capsys, "evaluate", tmp_path / "run", "--split", "validation", "--stride", "5")
    assert (other["stride"], other["loss"] != scored["loss"]) == (5, True)
    (tmp_path / "text").write_text(" ".join(sentences[0]) + "\n\n war\u00a0and peace\n")
    said = run(capsys, "predict", tmp_path / "run", "--input", tmp_path / "text")["predictions"]
    assert [(one["line"], [word["word"] for word in one["words"]]) for one in said] == [
        (1, sentences[0]),
        (3, ["war", "and", "peace"]),
    ]
    columns = run(capsys, "predict", tmp_path / "run", "--input", tmp_path / "a.conll")["predictions"]
    assert len(columns) == 20
    with pytest.raises(SystemExit):
        main(["evaluate", str(tmp_path / "run"), "--threshold", "1"])
    assert "--threshold: Tagging has no threshold" in capsys.readouterr().err


def test_questions_get_answers(run_of, tmp_path, capsys):
    chance = random.Random(0)
    data = []
    for number in range(20):
        words = chance.choices(WORDS, k=40)
        context = " ".join(words)
        entries = [
            {"id": f"{number}-{n}", "question": f"what {word}", "answers": [] if n else [
                {"text": word, "answer_start": context.index(word)}]} for n, word in enumerate(words[:2])
        ]  # fmt: skip
        data.append({"paragraphs": [{"context": context, "qas": entries}]})
    (tmp_path / "a.json").write_text(json.dumps({"data": data}))
    result = run(
        capsys, "train", "finetune:spans", "--from", run_of("gpt"), "--text", tmp_path / "a.json", "--run",
        tmp_path / "run", *OPTIONS, "--data.reader.length", "12", "--data.reader.stride", "3",
        "--training.epochs", "0.005",
    )  # fmt: skip
    assert {"spans", "exact_match", "f1_answered", "best_f1", "best_threshold"} <= set(result["evaluation"])
    never = run(capsys, "evaluate", tmp_path / "run", "--split", "validation", "--threshold", "-1e9")
    assert (never["f1"], never["f1_answered"], never["f1_unanswered"]) == (0.5, 0.0, 1.0)
    assert never["best_f1"] >= max(never["f1"], result["evaluation"]["f1"])
    output = tmp_path / "said" / "said.json"
    run(capsys, "predict", tmp_path / "run", "--input", tmp_path / "a.json", "--output", output, "--threshold", "1e9")
    said, best = (json.loads(output.with_suffix(suffix).read_text()) for suffix in (".json", ".nbest.json"))
    contexts = {one["id"]: p["context"] for a in data for p in a["paragraphs"] for one in p["qas"]}
    assert set(said) == set(contexts)
    assert all(text and text in contexts[name] for name, text in said.items())
    assert all(said[name] == found[0]["text"] for name, found in best.items())
    assert all(len({one["text"] for one in found}) == len(found) <= 20 for found in best.values())


def test_choices_are_made(run_of, tmp_path, capsys):
    chance = random.Random(0)
    rows = [[" ".join(chance.choices(WORDS, k=chance.randint(2, 9))) for _ in range(3)] for _ in range(20)]
    (tmp_path / "a.csv").write_text("".join(",".join(one) + f",{n % 2}\n" for n, one in enumerate(rows)))
    result = run(
        capsys, "train", "finetune:choices", "--from", run_of("xlnet"), "--text", tmp_path / "a.csv", "--run",
        tmp_path / "run", *OPTIONS, "--data.reader.length", "8", "--training.epochs", "0.2", "--data.corpus.columns",
        "q", "a", "b", "right", "--data.corpus.text", "q", "--data.corpus.choices", "a", "b", "--data.corpus.label",
        "right", "--training.accumulation", "2",
    )  # fmt: skip
    assert set(result["evaluation"]) == {"loss", "accuracy"}
    whole = run(capsys, "evaluate", tmp_path / "run", "--text", tmp_path / "a.csv")
    said = run(capsys, "predict", tmp_path / "run", "--input", tmp_path / "a.csv", "--batch-size", "3")["predictions"]
    assert [one["choice"] for one in said] == [row[1 + one["answer"]] for row, one in zip(rows, said, strict=True)]
    assert sum(one["answer"] == n % 2 for n, one in enumerate(said)) / 20 == pytest.approx(whole["accuracy"])
