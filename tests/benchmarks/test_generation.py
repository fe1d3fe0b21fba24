from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ctx_jax.experiment import find
from experiments.benchmarks import generation

SIDE = """
import json, pathlib, sys
count = pathlib.Path(__file__).with_suffix(".count")
round = int(count.read_text()) if count.exists() else 0
count.write_text(str(round + 1))
print("a note")
for rows in sys.argv[2:4]:
    print(json.dumps({"B": int(rows), "tok_s": SPEED * int(rows) + 100 * round, "options": sys.argv}))
"""


def test_both_sides_in_turn(monkeypatch, tmp_path: Path):
    for name, speed in (("peers", "1000"), ("ours", "3000")):
        (tmp_path / f"{name}.py").write_text(SIDE.replace("SPEED", speed))
    monkeypatch.setattr(generation, "__file__", str(tmp_path / "ours.py"))
    one, many = generation.in_turn(tmp_path / "peers.py", 3, [1, 64], ["--tiny"])
    assert (one["B"], one["theirs"], one["ours"], one["ratio"]) == (1, 1100, 3100, 2.82)
    assert many["rounds"] == {"theirs": [64_000, 64_100, 64_200], "ours": [192_000, 192_100, 192_200]}


def test_a_side_that_measures_nothing_is_an_error(monkeypatch, tmp_path: Path, capfd):
    peers = tmp_path / "peers.py"
    peers.write_text("raise RuntimeError('no card')")
    monkeypatch.setattr("sys.argv", ["generation.py", "--peers", str(peers), "--batch", "8", "--tiny"])
    with pytest.raises(SystemExit, match=r"error: .*peers.py printed no line of batch 8: see what it says above"):
        generation.main()
    assert "no card" in capfd.readouterr().err
    monkeypatch.setattr("sys.argv", ["generation.py", "--peers", str(tmp_path / "none.py")])
    with pytest.raises(SystemExit, match="2"):
        generation.main()
    assert "none.py is not there: name the script of the other side" in capfd.readouterr().err


def test_every_token_that_is_asked_for_is_generated():
    config = replace(find("gpt:gpt2").model, dtype="bfloat16", **generation.TINY | {"layers": 1})
    result = generation.measure(config, rows=3, prompt=5, length=20, repeats=1)
    assert (result["B"], result["prompt"], result["length"]) == (3, 5, 20)
    assert result["tok_s"] > 0
