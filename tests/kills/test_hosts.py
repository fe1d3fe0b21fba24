"""A host that vanishes or hangs ends the run of the other, with one line that names it."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pytest

from tests.kills.processes import environment, start_hosts
from tests.kills.test_meshes import wait_for


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (signal.SIGKILL, (), r"host {host} \(process 1 of 2\) is gone: nothing was heard of it for \d+ s, at step \d+"),
        (
            signal.SIGSTOP,
            ("--training.timeout", "45"),
            r"host {host} \(process 0 of 2\) has waited \d+ s for step \d+, while host {host} \(process 1\) is",
        ),
    ],
)
def test_the_other_host_names_it(number: int, options: tuple[str, ...], message: str, speeches: Path, tmp_path: Path):
    surroundings = environment(tmp_path / "compiled") | {"TEXT": str(speeches), "DATA": str(tmp_path / "data")}
    run = tmp_path / "run"
    command = ["-m", "ctx_jax", "train", "tests/kills/experiments.py:gpt", "--run", str(run)]
    hosts = start_hosts([*command, "--training.steps", "100000", *options], surroundings, 2, tmp_path)
    try:
        wait_for(run, 3, hosts)
        hosts[1].send_signal(number)
        code = hosts[0].wait(timeout=300)
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    last = (tmp_path / "process_0.log").read_text().splitlines()[-1]
    assert code == 1
    assert re.match("error: " + message.format(host=re.escape(socket.gethostname())), last), last
