from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from ctx_jax.doctor import needs
from experiments.benchmarks import precision

SMALL = "--tiny --training.steps 5 --model.layers 1 --model.dropout 0 --model.attention-dropout 0".split()


def call(monkeypatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["precision.py", *SMALL, *options])
    with pytest.raises(SystemExit) as exit:
        precision.main()
    return exit.value.code


def test_the_same_run_in_two_dtypes_from_token_stores(monkeypatch, capsys, speeches: Path, tmp_path: Path):
    precision.open_text(precision.experiment_of(str(speeches), tmp_path, tiny=True).data, precision.SPLITS)
    asked, train = [], precision.loop.train

    def recorded(**pieces):
        asked.append((pieces["model"].config.dtype, jax.config.jax_default_matmul_precision))
        assert pieces["text"].store.split == "train" and pieces["evaluation_text"].store.split == "validation"
        return train(**pieces)

    monkeypatch.setattr(precision.loop, "train", recorded)
    monkeypatch.setattr(precision, "LAST", 2)
    capsys.readouterr()
    assert call(monkeypatch, "--data", str(tmp_path)) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert asked == [("float32", "highest"), ("bfloat16", "default")]
    for dtype, _ in asked:
        lines = [line.split() for line in printed.err.splitlines() if line.startswith(f"{dtype}: step")]
        losses = {words[2]: float(words[4]) for words in lines if words[3] == "loss"}
        assert result[dtype]["loss"] == pytest.approx((losses["4/5"] + losses["5/5"]) / 2, abs=1e-4)
        assert result[dtype]["held_out"] < losses["2/5"]
    for name, difference in result["differences"].items():
        fp32, bf16 = result["float32"][name], result["bfloat16"][name]
        assert difference == pytest.approx(bf16 / fp32 - 1, abs=1e-6) and 0 < abs(difference) < 1e-3


def test_the_network_is_gpt2_small_with_its_dropout():
    experiment = precision.experiment_of(None, Path("data"), tiny=False)
    assert needs(replace(experiment, model=replace(experiment.model, scan=True)))["parameters"] == 124_475_904
    assert (experiment.model.dropout, experiment.model.attention_dropout, experiment.training.steps) == (0.1, 0.1, 2000)


@pytest.mark.parametrize(("differences", "code"), [((0.001, -0.004), 0), ((0.001, -0.006), 1), ((0.006, 0.001), 1)])
def test_exit_code(differences, code, monkeypatch, capsys, speeches: Path, folder: Path):
    found = {"differences": dict(zip(("loss", "held_out"), differences, strict=True))}
    monkeypatch.setattr(precision, "compare", lambda experiment, stores: {**found, "splits": sorted(stores)})
    assert call(monkeypatch, "--text", str(speeches), "--data", str(folder)) == code
    assert json.loads(capsys.readouterr().out) == {**found, "splits": ["train", "validation"]}


def test_a_folder_without_the_stores(monkeypatch, capsys, speeches: Path, tmp_path: Path):
    assert call(monkeypatch, "--data", str(tmp_path)) == 2
    assert "holds 0 train stores, not 1: name the text" in capsys.readouterr().err
    precision.open_text(precision.experiment_of(str(speeches), tmp_path, tiny=True).data, precision.SPLITS)
    too_few = ["--data.tokenizer.vocabulary-size", "290", "--model.vocabulary-size", "300"]
    assert call(monkeypatch, "--data", str(tmp_path), *too_few) == 2
    assert "340 pieces, the model 300: set --model.vocabulary-size 340" in capsys.readouterr().err
