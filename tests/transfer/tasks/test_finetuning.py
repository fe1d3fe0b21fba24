"""From a pretrained run and a file of examples to a run that scores and predicts, by name."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.cli import main
from ctx_jax.experiment import Experiment, find, load, save
from ctx_jax.runs import of_another_task, open_run
from ctx_jax.text import kept
from ctx_jax.training.loop import matching
from ctx_jax.transfer.finetuning import HEAD, completed
from tests.conftest import WORDS

OPTIONS = [
    "--training.epochs",
    "2",
    "--data.batch-size",
    "8",
    "--training.log-every",
    "1",
    "--data.reader.length",
    "24",
]


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    """Whether the first word is in the first half of the list."""
    chance, path = random.Random(1), tmp_path_factory.mktemp("examples") / "examples.tsv"
    lines = [chance.choices(WORDS, k=chance.randint(3, 6)) for _ in range(60)]
    text = "".join(
        f"{' '.join(words)}\t{'early' if WORDS.index(words[0]) < len(WORDS) // 2 else 'late'}\n" for words in lines
    )
    path.write_text("text\tlabel\n" + text)
    return path


def run(capsys, *arguments: str | Path) -> dict:
    main([str(argument) for argument in arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_pretrained_run_learns_a_task(run_of, examples, tmp_path, capsys):
    pretrained, tuned = run_of("bert"), tmp_path / "run"
    command = ["train", "finetune:classification", "--from", pretrained, "--text", examples, "--run", tuned]
    command += ["--training.epochs", "2", *OPTIONS]
    result = run(capsys, *command)
    assert result["step"] == 14  # 54 examples twice, by eight
    assert {"loss", "accuracy", "f1", "matthews", "collapsed"} == set(result["evaluation"])
    assert run(capsys, *command) == result  # it is finished
    kept = load(tuned / "experiment.json")
    assert (kept.data.corpus.labels, kept.model.classes, kept.training.best) == (("early", "late"), 2, "accuracy")
    record = json.loads((tuned / "checkpoints/14/record/metadata").read_text())
    assert record["experiment"]["data"]["corpus"]["labels"] == ["early", "late"]

    scored = run(capsys, "evaluate", tuned, "--split", "validation")
    assert {name: scored[name] for name in result["evaluation"]} == pytest.approx(result["evaluation"])
    whole = run(capsys, "evaluate", tuned, "--text", examples)

    lines = examples.read_text().splitlines()[1:]
    texts = [line.split("\t")[0] for line in lines]
    (tmp_path / "texts.txt").write_text("\n".join([*texts[:30], "", *texts[30:]]))
    output = tmp_path / "said.jsonl"
    done = run(capsys, "predict", tuned, "--input", tmp_path / "texts.txt", "--output", output, "--batch-size", "7")
    assert (done["texts"], done["output"]) == (60, str(output))
    said = [json.loads(line) for line in output.read_text().splitlines()]
    assert [one["line"] for one in said] == [*range(1, 31), *range(32, 62)]
    right = [one["label"] == line.split("\t")[1] for one, line in zip(said, lines, strict=True)]
    assert sum(right) / 60 == pytest.approx(whole["accuracy"])
    for one in said:
        assert list(one["probabilities"]) == ["early", "late"]
        assert sum(one["probabilities"].values()) == pytest.approx(1, abs=2e-6)
        assert one["probability"] == max(one["probabilities"].values())
    table = run(capsys, "predict", tuned, "--input", examples)["predictions"]
    assert [one["label"] for one in table] == [one["label"] for one in said]


def test_a_head_of_another_task_is_not_taken_over(run_of, examples, tmp_path):
    pretrained = run_of("bert")
    theirs = open_run(pretrained).variables["params"]
    found, new = matching(pretrained, 0, jax.tree.map(jnp.zeros_like, theirs), HEAD)
    assert new == ["classifier"]
    assert not found["classifier"]["kernel"].any()  # theirs is of next sentences
    np.testing.assert_array_equal(found["pooler"]["kernel"], theirs["pooler"]["kernel"])

    ours = completed(replace_corpus(find("finetune:classification"), path=examples))
    tuned = shutil.copytree(pretrained, tmp_path / "run")
    save(ours, tuned / "experiment.json")
    assert of_another_task(ours, pretrained)
    assert not of_another_task(ours, tuned)
    assert of_another_task(replace_corpus(ours, labels=("late", "early")), tuned)


def replace_corpus(experiment: Experiment, **values: Any) -> Experiment:
    data = replace(experiment.data, corpus=replace(experiment.data.corpus, **values))
    return replace(experiment, data=data)


def test_pairs_and_numbers_by_another_model(run_of, tmp_path, capsys):
    chance = random.Random(2)
    texts = [(" ".join(chance.choices(WORDS, k=5)), " ".join(chance.choices(WORDS, k=3))) for _ in range(40)]
    lines = [f"{first}\t{second}\t{number % 6}\n" for number, (first, second) in enumerate(texts)]
    (tmp_path / "pairs.tsv").write_text("first\tsecond\tlabel\n" + "".join(lines))
    result = run(
        capsys, "train", "finetune:regression", "--from", run_of("xlnet"), "--text", tmp_path / "pairs.tsv",
        "--run", tmp_path / "run", *OPTIONS, "--training.epochs", "0.5",
    )  # fmt: skip
    assert {"loss", "pearson", "spearman"} == set(result["evaluation"])
    (tmp_path / "texts").write_text("the people\tof the state\nwar\tpeace")
    said = run(capsys, "predict", tmp_path / "run", "--input", tmp_path / "texts")["predictions"]
    assert [list(one) for one in said] == [["line", "value"]] * 2
    (tmp_path / "texts").write_text("the people\tof the state\nwar\n")
    with pytest.raises(SystemExit):
        main(["predict", str(tmp_path / "run"), "--input", str(tmp_path / "texts")])
    assert "texts line 2 has 1 texts, not 2: put one tab between the two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "{bad}"], "bad.tsv line 3: the field 'label' is empty"),
        (["--text", "{examples}", "--data.corpus.labels", "early", "lat"], "unknown label 'late'; did you mean 'lat'?"),
        (["--text", "{examples}", "--data.corpus.label", "lable"], "has no column 'lable'; did you mean 'label'?"),
        (["--text", "{examples}", "--data.reader.length", "2"], "data.reader.length 2 has no room for text: choose 3"),
        (["--text", "{one}"], "one.tsv has one label alone, x: give examples of two or more"),
    ],
)
def test_bad_input_is_named(arguments, message, run_of, examples, tmp_path, capsys):
    (tmp_path / "bad.tsv").write_text("text\tlabel\na\tx\nb\t\n")
    (tmp_path / "one.tsv").write_text("text\tlabel\n" + "a\tx\n" * 20)
    places = {"bad": tmp_path / "bad.tsv", "one": tmp_path / "one.tsv", "examples": examples}
    words = [argument.format(**places) for argument in arguments]
    with pytest.raises(SystemExit) as stop:
        main(["train", "finetune:classification", "--from", str(run_of("bert")), "--run", f"{tmp_path}/run", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_without_its_own_tokenizer_is_not_fine_tuned(run_of, examples, tmp_path, capsys):
    shutil.copytree(run_of("bert"), tmp_path / "bert")
    words = [
        "train",
        "finetune:classification",
        "--from",
        tmp_path / "bert",
        "--text",
        examples,
        "--run",
        tmp_path / "new",
    ]
    about = dict.fromkeys(("train", "validation", "test", "splitter"), "") | {
        "tokenizer": kept(run_of("bert")).fingerprint
    }
    (tmp_path / "bert/text.json").write_text(json.dumps(about))
    shutil.rmtree(tmp_path / "bert/tokenizer")
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    assert f"bert has lost its tokenizer, which its embeddings need: restore {tmp_path}" in capsys.readouterr().err
    run(capsys, "tokenizer", "train", "characters", "--text", examples, "--output", tmp_path / "bert/tokenizer")
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    assert "bert/tokenizer is not the tokenizer that" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_what_was_not_fine_tuned_predicts_nothing(run_of, examples, capsys):
    with pytest.raises(SystemExit):
        main(["predict", str(run_of("bert")), "--input", str(examples)])
    assert "has no task: fine-tune it first" in capsys.readouterr().err
