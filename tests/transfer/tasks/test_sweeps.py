"""Sweeps of fine-tuning: the options of train, several seeds, and the best by the task's metric."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest

from ctx_jax.cli import main
from ctx_jax.experiment import called, find, load
from launch.sweep import Planned, grid, groups

FILE = """
from ctx_jax.experiment import find
from launch import sweep

def dropouts():
    return sweep.grid(find("finetune:classification"), {"model.dropout": (0.0, 0.5)})
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    words = ("peace", "war")
    (tmp_path / "examples.tsv").write_text(
        "text\tlabel\n" + "".join(f"the {words[n % 2]}\t{n % 2}\n" for n in range(40))
    )
    return tmp_path


def test_options_of_train_reach_every_run_and_what_varies_stays(here, run_of, capsys):
    source = str(run_of("bert"))
    options = ["--from", source, "--text", "examples.tsv", "--training.epochs", "1", "--data.batch-size", "12"]
    command = ["sweep", "mine.py", "--launcher", "print", "--seeds", "2", "--", *options]
    main(command)
    result = json.loads(capsys.readouterr().out)
    assert result["sweep"] == f"runs/sweeps/mine-{Path(source).name}"
    names = [f"dropout={rate},seed={seed}" for rate in (0.0, 0.5) for seed in (0, 1)]
    assert [record["name"] for record in result["results"]] == names
    kept = [load(Path(record["run"]) / "experiment.json") for record in result["results"]]
    assert [(each.model.dropout, each.training.seed) for each in kept] == [(0.0, 0), (0.0, 1), (0.5, 0), (0.5, 1)]
    theirs = load(Path(source) / "experiment.json").model
    assert all((each.model.width, each.model.classes, each.training.steps) == (theirs.width, 2, 3) for each in kept)

    words = shlex.split(result["commands"][2])
    assert words[-2:] == ["--from", source]
    main(words[words.index("train") :])  # as another launcher would
    capsys.readouterr()
    main(command)
    result = json.loads(capsys.readouterr().out)
    assert [record["state"] for record in result["results"]] == ["waiting", "waiting", "finished", "waiting"]
    assert load(Path(result["results"][2]["run"]) / "experiment.json").model.dropout == 0.5
    (group,) = result["groups"]
    assert (group["name"], group["runs"], group["metric"]) == ("dropout=0.5", 1, "accuracy")
    best = result["results"][2]["best"]["accuracy"]
    assert group["values"]["accuracy"] == {"mean": best, "deviation": 0.0, "min": best, "max": best}
    assert json.loads(Path(result["sweep"], "groups.json").read_text()) == result["groups"]


def test_groups_by_hand():
    tiny = find("gpt:tiny")
    plans = [
        Planned("", "", variant.experiment, Path(), variant.changes)
        for variant in grid(tiny, {"training.best": ("accuracy",), "model.layers": (1, 2), "training.seed": (0, 1, 2)})
    ]

    def finished(accuracy: float, loss: float = 1.0) -> dict:
        return {
            "state": "finished",
            "best": {"step": 3, "accuracy": accuracy, "loss": loss},
            "evaluation": {"loss": 9.0},
        }

    found = [finished(x) for x in (0.5, 0.6, 0.7)] + [finished(0.75, 2.0), finished(0.85, 4.0), {"state": "failed"}]
    first, second = groups(plans, found)
    assert (first["name"], first["runs"]) == ("best=accuracy,layers=2", 2)
    assert first["values"]["loss"]["mean"] == 3.0
    assert first["values"]["accuracy"] == pytest.approx(
        {"mean": 0.8, "deviation": math.sqrt(0.05**2 * 2), "min": 0.75, "max": 0.85}
    )
    assert second["values"]["accuracy"] == pytest.approx({"mean": 0.6, "deviation": 0.1, "min": 0.5, "max": 0.7})
    assert "step" not in first["values"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds 0: choose 1 or more"),
        (["--", "--run", "x"], "--run behind --: a sweep starts its runs itself, leave it out"),
        (["--", "--trainig.seed", "1"], "unknown option --trainig.seed; did you mean '--training.seed'?"),
        (["--", "--text", "none.tsv"], "no text in none.tsv"),
    ],
)
def test_mistakes_are_named(here, words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "mine.py", "--launcher", "print", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_grid_of_the_paper():
    runs = called(str(Path(__file__).parents[3] / "experiments/sweeps/finetuning.py") + ":bert")
    tried = {
        (each.experiment.data.batch_size, each.experiment.optimizer.schedule.rate, each.experiment.training.epochs)
        for each in runs
    }
    assert tried == {(size, rate, epochs) for size in (16, 32) for rate in (5e-5, 3e-5, 2e-5) for epochs in (2, 3, 4)}
    assert len(runs) == 18


@pytest.mark.parametrize(
    "function, rates", [("decay", (5e-5, 1e-4)), ("decay_regression", (5e-5, 1e-4)), ("decay_tagging", (1e-4, 2e-4))]
)
def test_rates_and_layer_wise_decay(function, rates):
    runs = called(str(Path(__file__).parents[3] / "experiments/sweeps/finetuning.py") + f":{function}")
    tried = [(each.experiment.optimizer.schedule.rate, each.experiment.optimizer.layer_decay) for each in runs]
    assert tried == [(rate, decay) for rate in rates for decay in (1.0, 0.9, 0.8)]
