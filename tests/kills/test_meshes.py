"""4 processes x 2 devices, killed, go on as 2 x 2, as 1 x 8 and as 1 x 1: the run is the one that never stopped."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

from ctx_jax.training.checkpoints import saved
from tests.kills.processes import environment, start_hosts

STEPS = 40
LAYOUTS = (
    (4, 2, "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2", 12),
    (2, 2, "--mesh.data 2 --mesh.fsdp 2", 22),
    (1, 8, "--mesh.data 4 --mesh.tensor 2", 32),
    (1, 1, "", None),
)
"""Processes, devices of each, the mesh, and the step after which all are killed."""


def trained(run: Path, name: str, layout: tuple[int, int, str, int | None], speeches: Path, logs: Path) -> None:
    processes, devices, mesh, kill_after = layout
    logs.mkdir(parents=True)
    surroundings = environment(run.parent / "compiled", devices)
    surroundings |= {"TEXT": str(speeches), "DATA": str(run.parent / "data"), "RATE": "1e-4"}
    command = ["-m", "tests.kills.recorder", str(logs / "records"), "train", f"tests/kills/experiments.py:{name}"]
    options = f"--run {run} --training.steps {STEPS} {mesh}".split()
    hosts = start_hosts([*command, *options], surroundings, processes, logs)
    try:
        if kill_after is not None:
            wait_for(run, kill_after, hosts)
            for host in hosts:
                host.kill()
        codes = [host.wait(timeout=300) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert codes == [0 if kill_after is None else -9] * processes, (logs / "process_0.log").read_text()


def wait_for(run: Path, step: int, hosts: list[subprocess.Popen[bytes]]) -> None:
    """Until the run has done so many steps."""
    deadline = time.monotonic() + 300
    while not any(line["step"] >= step for line in losses(run)):
        assert time.monotonic() < deadline and all(host.poll() is None for host in hosts), "the run ended by itself"
        time.sleep(0.05)


def losses(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1] if '"train"' in line]


def recorded(logs: Path, what: str) -> dict[int, dict[int, str]]:
    """{step: {row: hash}} of all processes."""
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for file in sorted((logs / "records").glob("*.jsonl")):
        for line in map(json.loads, file.read_text().split("\n")[:-1]):
            rows = found[line["step"]]
            for row, digest in line[what].items():
                assert rows.setdefault(int(row), digest) == digest
    return found


@pytest.mark.parametrize("name", ["gpt", "bert", "transformer_xl", "xlnet"])
def test_another_mesh_goes_on_with_the_same_run(name: str, speeches: Path, tmp_path: Path):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    trained(whole, name, LAYOUTS[-1], speeches, tmp_path / "undisturbed")
    begins = []
    for number, layout in enumerate(LAYOUTS):
        begins.append(max(saved(moved), default=0))
        trained(moved, name, layout, speeches, tmp_path / f"moved_{number}")
    assert begins[0] == 0 and all(before < after for before, after in itertools.pairwise(begins))

    logs = [tmp_path / f"moved_{number}" for number in range(len(LAYOUTS))]
    for what in ("rows", "documents"):
        expected = recorded(tmp_path / "undisturbed", what)
        assert set(expected) == set(range(STEPS))
        for log in logs:
            found = recorded(log, what)
            for step, rows in found.items():
                assert rows.items() <= expected[step].items(), (log.name, what, step)
                # One process may be killed before it has written what another has.
                assert len(rows) == len(expected[step]) or step >= max(found) - 1
    # What a layout begins with is what the one before it had at that step, to the bit.
    for begin, before, after in zip(begins[1:], logs, logs[1:], strict=False):
        memory = recorded(after, "memory")[begin]
        assert memory.items() >= recorded(before, "memory")[begin].items()
        assert len(memory) == (16 if name in ("transformer_xl", "xlnet") else 0)

    expected_losses, losses_found = ([line["loss"] for line in losses(run)] for run in (whole, moved))
    assert len(expected_losses) == len(losses_found) == STEPS
    assert len(set(expected_losses)) == STEPS
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses_found, expected_losses, strict=True))
    print(f"{name}: the losses differ by {worst:.1e} at most")
    assert worst < 1e-6
