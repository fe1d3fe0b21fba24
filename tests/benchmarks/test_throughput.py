from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ctx_jax import kernels
from ctx_jax.doctor import needs
from ctx_jax.training.flops import train_flops_per_token
from experiments.benchmarks import throughput


@pytest.mark.parametrize(
    ("name", "theirs", "padding"),
    [
        pytest.param("gpt2", 124_475_904, 0, id="GPT-2, its table of 50,304"),
        pytest.param("bert128", 109_514_298, 70 * 769, id="BertForMaskedLM"),
        pytest.param("txl", 41_055_436, 52 * 513, id="the original Transformer-XL"),
    ],
)
def test_cases_have_the_parameters_of_their_peers(name: str, theirs: int, padding: int):
    experiment = throughput.experiment_of(name, None, Path("data"), tiny=False)
    assert needs(replace(experiment, model=replace(experiment.model, scan=True)))["parameters"] == theirs + padding


def test_cases_are_trained_as_their_peers():
    dropouts = {"gpt2": (0.0, 0.0), "gpt2m": (0.0, 0.0), "txl": (0.1, 0.0)}
    for name in throughput.CASES:
        experiment = throughput.experiment_of(name, None, Path("data"), tiny=False)
        model, optimizer = experiment.model, experiment.optimizer
        assert (model.dropout, model.attention_dropout) == dropouts.get(name, (0.1, 0.1))
        assert (optimizer.clip, type(optimizer).__name__) == ((0.25, "Adam") if name == "txl" else (1.0, "AdamW"))
        assert model.dtype == ("float32" if name == "bert_mini" else "bfloat16")
    xlnet = throughput.experiment_of("xlnet", None, Path("data"), tiny=False)
    assert (xlnet.objective.num_predict, xlnet.objective.perm_size) == (85, 512)


def test_a_case_from_text_to_its_line(monkeypatch, capsys, speeches: Path, folder: Path):
    monkeypatch.setattr(kernels, "_paths", {})

    def line(*options: str) -> tuple[int, dict]:
        command = ["throughput.py", "--alone", "txl", "--tiny", "--steps", "2", "--text", str(speeches)]
        monkeypatch.setattr(sys, "argv", [*command, "--data", str(folder), *options])
        with pytest.raises(SystemExit) as exit:
            throughput.main()
        return exit.value.code, json.loads(capsys.readouterr().out)

    code, result = line("--model.layers", "1", "--model.dtype", "float32")
    assert (code, result["B"], result["T"], result["paths"]) == (
        0,
        4,
        64,
        dict.fromkeys(("relative attention", "LayerNorm", "cross-entropy"), "XLA: no kernel for cpu"),
    )
    assert result["tokens_per_second"] == pytest.approx(4 * 64 / result["ms"] * 1e3, rel=1e-2)
    model = replace(throughput.experiment_of("txl", None, folder, tiny=True).model, layers=1)
    operations = result["tokens_per_second"] * train_flops_per_token(model, 64)
    assert result["mfu"] == pytest.approx(operations / result["ceiling_tflops"] / 1e12, abs=1e-3)
    assert result["loss"] == pytest.approx(math.log(512), abs=0.3)
    assert result["planned_gib"] >= 0 and result["free_running"] > 0

    code, result = line("--model.heads", "3")
    assert code == 1 and "heads 3" in result["error"]
