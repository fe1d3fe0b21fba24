"""Hosts before they train: who does not come, fails, is told to stop or is killed, and what the others say of it."""

from __future__ import annotations

import itertools
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from ctx_jax.parallel import hosts
from ctx_jax.training import stopping
from ctx_jax.training.stopping import Watch
from tests.kills.processes import environment, start, start_hosts


class Store:
    """The store of the coordination service; this is process 0 of two."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]


@pytest.fixture
def store(monkeypatch) -> dict[str, str]:
    client = Store()
    state = SimpleNamespace(client=client, process_id=0, num_processes=2, coordinator_address="first:1234")
    monkeypatch.setattr(hosts, "_state", lambda: state)
    for name in ("LINGER", "PULSE"):
        monkeypatch.setattr(stopping, name, 0.01)
    return client.values


@pytest.fixture
def ended(monkeypatch):
    """What a process said as its last, and its code."""
    said: list[tuple[str, int]] = []

    def end(message: str, code: int) -> None:
        said.append((message, code))
        raise SystemExit(code)

    monkeypatch.setattr(stopping, "end", end)
    return said


def test_all_give_a_value_and_the_slowest_is_waited_for(store, monkeypatch):
    rounds = iter(range(2))

    def second() -> None:
        time.sleep(0.2)
        store[f"ctx_jax/gather/{next(rounds)}/1"] = "7"

    monkeypatch.setattr(hosts, "_rounds", itertools.count())
    for _ in range(2):
        thread = threading.Thread(target=second)
        thread.start()
        assert hosts.gather(5) == [5, 7]
        thread.join()


@pytest.mark.parametrize(
    ("topic", "text", "line", "code"),
    [
        ("stopped", '["h", 15]', "host h (process 1 of 2) was stopped by SIGTERM: the same command goes on", 75),
        ("stopped", '["h", 2]', "host h (process 1 of 2) was stopped by Ctrl-C: the same command goes on", 130),
        ("progress", '["failed", "h", 0, "no text", 3]', "host h (process 1 of 2) failed: no text", 1),
    ],
)
def test_what_another_host_told_is_said(store, ended, topic, text, line, code):
    store[f"ctx_jax/{topic}/1"] = text
    with pytest.raises(SystemExit):
        Watch()._look_at_others()
    assert ended == [(line, code)]


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({}, r"host unknown \(process 1 of 2\) is gone: nothing was heard of it for 61 s, at start"),
        (
            {"ctx_jax/progress/1": '["runs", "h", 0, "the preparation", 3]'},
            r"host h \(process 1 of 2\) is gone: nothing was heard of it for 61 s, at the preparation",
        ),
        ({"ctx_jax/progress/1": '["ended", "h", 0, "", 3]'}, None),
    ],
)
def test_a_host_that_says_nothing_is_gone(store, ended, monkeypatch, told, line):
    store.update(told)
    watch, now = Watch(), time.monotonic()
    watch._look_at_others()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    if line is None:
        watch._look_at_others()
    else:
        with pytest.raises(SystemExit):
            watch._look_at_others()
        assert re.match(line, ended[0][0]) and ended[0][1] == 1


def test_a_failure_is_told_once_and_stays_told(store):
    left = []
    with pytest.raises(ValueError, match="the first"), Watch() as watch, ExitStack() as outer, watch.telling(outer):
        outer.callback(left.append, "lock")
        with ExitStack() as inner, watch.telling(inner):
            inner.callback(left.append, "checkpoints")
            raise ValueError("the first\nreason")
    assert store["ctx_jax/progress/0"].startswith('["failed", ') and "the first reason" in store["ctx_jax/progress/0"]
    assert left == []  # closing would wait for the others


def test_who_ends_in_order_says_so(store):
    with Watch() as watch, ExitStack() as stack, watch.telling(stack):
        assert store["ctx_jax/progress/0"].startswith('["runs", ')
    assert store["ctx_jax/progress/0"].startswith('["ended", ')


def test_ctrl_c_in_the_preparation_ends_the_others_too(store, ended):
    with pytest.raises(SystemExit), Watch() as watch, ExitStack() as stack, watch.telling(stack):
        raise KeyboardInterrupt
    assert ended == [("interrupted: the same command goes on", 130)]
    assert store["ctx_jax/stopped/0"].endswith(", 2]")


def test_a_port_that_is_in_use(store, monkeypatch):
    def initialize(**arguments: object) -> None:
        raise jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(hosts, "explain_aborts", lambda: None)
    with pytest.raises(ValueError, match="the port of first:1234 is in use: choose another"):
        hosts.start_hosts("first:1234", 2, 0)


JOINS = """
import sys
from ctx_jax.parallel import hosts
hosts.JOIN, hosts.TELL = int(sys.argv[2]), 1
print("joining", file=sys.stderr, flush=True)
hosts.start_hosts(sys.argv[1], 3, 0)
"""


def test_processes_that_do_not_come(tmp_path: Path):
    """One waits until it gives up, one until it is told to."""
    with socket.create_server(("localhost", 0)) as first, socket.create_server(("localhost", 0)) as second:
        addresses = [f"localhost:{probe.getsockname()[1]}" for probe in (first, second)]
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    waiting = [
        start(["-c", JOINS, address, patience], environment(tmp_path), log)
        for address, patience, log in zip(addresses, ("2", "60"), logs, strict=True)
    ]
    try:
        until(lambda: "so far" in logs[1].read_text())
        waiting[1].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in waiting] == [1, 75]
    finally:
        for process in waiting:
            process.kill()
            process.wait()
    _, waits, last = logs[0].read_text().splitlines()
    assert waits == f"process 0 waits for the other 2 processes at {addresses[0]}: 1 s so far"
    assert last.startswith(
        f"error: not all of the 3 processes have come to {addresses[0]} within 2 s (this is process 0)"
    )
    line = "error: stopped by SIGTERM while it waited for the other processes: give the same command again"
    assert logs[1].read_text().splitlines()[-1] == line


PREPARES = """
import sys, time
from contextlib import ExitStack
from ctx_jax.parallel.hosts import gather, start_hosts
from ctx_jax.training import stopping
from ctx_jax.training.stopping import Watch, ended_by_notice
stopping.PULSE, stopping.LINGER = 0.2, 1.0
with ended_by_notice():
    start_hosts()
    with Watch() as watch, ExitStack() as stack, watch.telling(stack):
        gather(1)
        print("preparing", file=sys.stderr, flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("process", "number", "code", "line"),
    [
        (1, signal.SIGTERM, 75, "1 of 2) was stopped by SIGTERM: the same command goes on"),
        (0, signal.SIGKILL, 1, "1 of 2) has lost process 0 at"),
    ],
)
def test_one_that_ends_while_it_prepares_ends_the_other(process, number, code, line, tmp_path: Path):
    both = start_hosts(["-c", PREPARES], environment(tmp_path), 2, tmp_path)
    logs = [tmp_path / f"process_{each}.log" for each in range(2)]
    try:
        until(lambda: all("preparing" in log.read_text() for log in logs))
        both[process].send_signal(number)
        codes = [each.wait(60) for each in both]
    finally:
        for each in both:
            each.kill()
            each.wait()
    assert codes[process] == (75 if number == signal.SIGTERM else -9) and codes[1 - process] == code
    last = logs[1 - process].read_text().splitlines()[-1]
    assert last.startswith(f"error: host {socket.gethostname()} (process {line}")


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
