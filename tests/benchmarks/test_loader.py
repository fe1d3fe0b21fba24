from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "experiments" / "benchmarks"


@pytest.fixture
def loader(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("experiments.benchmarks.loader")


def test_a_case_from_text_to_its_line(loader, monkeypatch, capsys, speeches: Path, folder: Path):
    command = ["loader.py", "--alone", "--tiny", "--cases", "xlnet", "--seconds", "0.1", "--objective.num-predict", "8"]
    monkeypatch.setattr(sys, "argv", [*command, "--text", str(speeches), "--data", str(folder)])
    loader.main()
    result = json.loads(capsys.readouterr().out)
    assert result["case"] == "xlnet" and result["tokens_per_second"] > 4 * 64 and result["per_busy_core"] > 4 * 64


def test_checkouts_in_turn_on_the_cores(loader, monkeypatch, capsys, tmp_path: Path):
    limits, runs = [], []

    def run(command, *, env, **_):
        runs.append((limits[-1], env["PYTHONPATH"]))
        line = {"case": "txl", "tokens_per_second": len(runs), "per_busy_core": 1.0}
        return subprocess.CompletedProcess(command, 0, json.dumps(line) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", "given")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, allowed: limits.append(allowed), raising=False)
    monkeypatch.setattr(sys, "argv", ["loader.py", "--cases", "txl", "--cores", "1", "2", "--against", str(tmp_path)])
    loader.main()
    own, other = str(SCRIPTS.parents[1]), str(tmp_path)
    runs = [(limit, path.removesuffix(f"{os.pathsep}given")) for limit, path in runs if path.endswith("given")]
    assert runs == [(limit, folder) for limit in ([3], [3, 5]) for folder in (own, other)] * 3
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(line["checkout"], line["cores"]): (line["tokens_per_second"], line["rounds"]) for line in lines}
    assert found[own, 1] == (5, [1, 5, 9]) and found[other, 2] == (8, [4, 8, 12]) and len(found) == 4
