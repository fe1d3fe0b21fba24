"""From a table of GLUE to the file that its leaderboard takes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ctx_jax.cli import main
from tests.conftest import WORDS


def test_predictions_of_a_fine_tuned_run_are_in_the_order_of_the_test(run_of, tmp_path, capsys):
    chance, folder = random.Random(3), tmp_path / "MNLI"
    folder.mkdir()
    texts = [" ".join(chance.choices(WORDS, k=4)) for _ in range(12)]
    labels = ("entailment", "neutral", "contradiction")
    rows = "".join(f"{n}\t{text}\t{texts[n - 1]}\t{labels[n % 3]}\n" for n, text in enumerate(texts))
    for name in ("train", "dev_matched"):
        (folder / f"{name}.tsv").write_text("index\tsentence1\tsentence2\tgold_label\n" + rows)
    tests = {"test_matched": [2, 0, 1], "test_mismatched": [0, 1], "diagnostic": [0]}
    for name, order in tests.items():
        lines = "".join(f"{n}\t{texts[n]}\t{'' if n == 1 else texts[n]}\n" for n in order)
        (folder / f"{name}.tsv").write_text("index\tsentence1\tsentence2\n" + lines)
    run = tmp_path / "run"
    short = ["--training.epochs", "0.5", "--data.batch-size", "4", "--data.reader.length", "24"]
    main(["train", "glue:mnli", "--from", str(run_of("bert")), "--text", str(folder), "--run", str(run), *short])
    capsys.readouterr()
    command = ["submit", str(run), "--output", str(tmp_path / "out")]
    main([*command, "--diagnostic", str(folder / "diagnostic.tsv")])
    files = json.loads(capsys.readouterr().out)["files"]
    assert {name.rpartition("/")[2]: count for name, count in files.items()} == {
        "MNLI-m.tsv": 3, "MNLI-mm.tsv": 2, "AX.tsv": 1,
    }  # fmt: skip
    said = {}
    for name in files:
        head, *lines = Path(name).read_text().splitlines()
        assert head == "index\tprediction"
        assert [line.split("\t")[0] for line in lines] == [str(n) for n in range(len(lines))]
        assert all(line.split("\t")[1] in labels for line in lines)
        said[name.rpartition("/")[2]] = [line.split("\t")[1] for line in lines]
    assert said["AX.tsv"][0] == said["MNLI-m.tsv"][0] == said["MNLI-mm.tsv"][0]  # the same pair


def test_a_run_of_another_task_has_no_submission(run_of, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["submit", str(run_of("bert")), "--output", str(tmp_path)])
    assert stop.value.code == 2
    assert "has no task of GLUE: fine-tune on one first (train glue:rte" in capsys.readouterr().err
