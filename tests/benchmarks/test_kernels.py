from __future__ import annotations

import json
import sys

import pytest

from experiments.benchmarks import kernels


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("norm", {"output", "x", "branch", "scale", "bias"}),
        ("cross_entropy", {"nll", "cost", "gradient"}),
        ("evaluation", {"output"}),
    ],
)
def test_the_other_kernels(case, names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--tiny", "--repeats", "1", "--cases", case])
    with pytest.raises(SystemExit) as exit:
        kernels.main()
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert exit.value.code == 0
    assert errors.keys() == names
    assert all(ours < 1e-2 for ours, _ in errors.values())
    assert any(ours > 1e-4 for ours, _ in errors.values())  # bf16 was compared with fp32


def test_a_kernel_is_compared_with_its_twin(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--tiny", "--repeats", "1", "--cases", "bert"])
    with pytest.raises(SystemExit) as exit:
        kernels.main()
    result = json.loads(capsys.readouterr().out)
    assert exit.value.code == 0
    assert result["errors"].keys() == {"output", "query", "key", "value"}
    for ours, twin in result["errors"].values():
        assert 1e-4 < ours < 1e-2 and 1e-4 < twin < 1e-2

    wrong = kernels.flash.self_attention
    monkeypatch.setattr(kernels.flash, "self_attention", lambda *x, **options: 1.02 * wrong(*x, **options))
    with pytest.raises(SystemExit) as exit:
        kernels.main()
    assert exit.value.code == 1
