"""Runs that are killed at random moments end as the run that never was."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ctx_jax.training.checkpoints import PARTS, saved
from ctx_jax.training.metrics import TIMES
from tests.kills.processes import environment, start

STEPS = 120
MOMENTS = ("preparation",) * 3 + ("step",) * 4 + ("save",) * 3
"""Of each of the four objectives: 40 kills in all."""


@pytest.mark.parametrize("name", ["gpt", "bert", "transformer_xl", "xlnet"])
def test_killed_at_random_moments_equals_never_killed(name: str, speeches: Path, tmp_path: Path):
    seed = {"gpt": 1, "bert": 2, "transformer_xl": 3, "xlnet": 4}[name]
    chance = random.Random(seed)
    surroundings = environment(tmp_path / "compiled") | {"TEXT": str(speeches)}

    def begin(run: str) -> subprocess.Popen[bytes]:
        command = ["-m", "ctx_jax", "train", f"tests/kills/experiments.py:{name}", "--run", str(tmp_path / run)]
        options = f"--training.steps {STEPS} --training.evaluate-every 20".split()
        data = {"DATA": str(tmp_path / f"data_{run}")}
        return start([*command, *options], surroundings | data, tmp_path / f"{run}.log")

    def finished(run: str) -> dict[str, Any]:
        assert begin(run).wait(timeout=300) == 0, (tmp_path / f"{run}.log").read_text()
        return json.loads((tmp_path / f"{run}.log").read_text().splitlines()[-1])

    expected = finished("whole")
    run, places = tmp_path / "killed", []
    for moment in MOMENTS:
        process = begin("killed")
        try:
            wait_for(moment, run, tmp_path / "data_killed", process, chance)
            assert process.poll() is None, (tmp_path / "killed.log").read_text()
        finally:
            process.kill()
        assert process.wait() == -9
        places.append((moment, max(saved(run), default=0), newest_line(run)))
    print(name, places)
    result = finished("killed")

    assert result == {**expected, "run": str(run), "tokens_per_second": result["tokens_per_second"]}
    assert lines(run) == lines(tmp_path / "whole")
    assert not (run / "damaged").exists()
    ends = [arrays(folder / "checkpoints" / str(STEPS)) for folder in (tmp_path / "whole", run)]
    assert jax.tree.structure(ends[0]) == jax.tree.structure(ends[1])
    jax.tree.map(np.testing.assert_array_equal, *ends)


def wait_for(moment: str, run: Path, data: Path, process: subprocess.Popen[bytes], chance: random.Random) -> None:
    """Until a random moment of this kind has come, or the process has ended."""
    begins, deadline = max(saved(run), default=0), time.monotonic() + 300
    target, pause = begins + chance.randint(1, 12), chance.uniform(0, 1.0 if moment == "preparation" else 0.2)
    saves = chance.randint(1, 3)

    def come() -> bool:
        if moment == "preparation":
            return data.is_dir() and any(data.iterdir())
        if moment == "step":
            return newest_line(run) >= target
        step = begins + 5 * saves
        return (run / "checkpoints" / f"{step}.orbax-checkpoint-tmp").exists() or step in saved(run)

    while not come() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(pause)


def newest_line(run: Path) -> int:
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return max((json.loads(line)["step"] for line in text.split("\n")[:-1]), default=0)


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def arrays(checkpoint: Path) -> dict[str, Any]:
    """Every array of a checkpoint."""

    def part(folder: Path) -> Any:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.metadata(folder).item_metadata.tree
            plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            return checkpointer.restore(folder, restore_args=plain)

    return {name: part(checkpoint / name) for name in PARTS if (checkpoint / name).is_dir()}
