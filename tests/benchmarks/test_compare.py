from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.benchmarks import compare, throughput

PEERS = """
import json, os, sys
print("transformers 5")
print(json.dumps({"case": "matmul_ceiling_tflops", "v": 773.0, "gpu": "a card"}))
line = {"tok_s": 1000, "mem_gib": 40.0, "files": os.listdir(".scratch/txl")}
print(json.dumps({"case": sys.argv[1], **({"error": "too large"} if sys.argv[1] == "xlnet" else line)}))
"""
OURS = """
import json, pathlib, sys
case, count = sys.argv[-1], pathlib.Path(sys.argv[sys.argv.index("--data") + 1])
count.mkdir(exist_ok=True)
rounds = len(list(count.iterdir()))
(count / str(rounds)).touch()
speed = [9000, 9600, 12000][rounds]
numbers = {"tokens_per_second": speed, "peak_gib": 10.0, "free_running": 9900, "mfu": 0.1, "device": "ours"}
print(json.dumps({"case": case, **numbers, "paths": {"relative": "pallas"}, "options": sys.argv}))
"""


def test_both_sides_in_turn(monkeypatch, capsys, tmp_path: Path):
    (tmp_path / "peers.py").write_text(PEERS)
    (tmp_path / "ours.py").write_text(OURS)
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "mem_transformer.py").touch()
    monkeypatch.setattr(compare, "OURS", tmp_path / "ours.py")
    command = ["compare.py", "--peers", str(tmp_path / "peers.py"), "--rounds", "3", "--cases", "txl", "xlnet"]
    monkeypatch.setattr(sys, "argv", [*command, "--txl", str(tmp_path / "original"), "--steps", "5"])
    with pytest.raises(SystemExit, match="True"):
        compare.main()
    printed = capsys.readouterr()
    first, second, _, _, row = printed.out.splitlines()
    result = json.loads(first)
    assert (result["device"], result["theirs"], result["ours"], result["ratio"]) == ("a card", 1000, 9600, 9.6)
    assert (result["memory_ratio"], result["rounds"]["ours"]) == (0.25, [9000, 9600, 12000])
    assert json.loads(second) == {"case": "xlnet", "error": "xlnet: too large"}
    assert row == "| txl | 1,000 | 9,600 | 9.6 | 9,900 | 0.1 | 40.0 | 10.0 | 0.25 |"
    own = [json.loads(line) for line in printed.err.splitlines() if "options" in line]
    assert all(line["options"][-4:] == ["--steps", "5", "--cases", "txl"] for line in own)
    assert '"case": "txl_compile"' in printed.err and '"files": ["mem_transformer.py"]' in printed.err


def test_every_case_has_a_peer():
    assert compare.CASES.keys() == throughput.CASES.keys()
