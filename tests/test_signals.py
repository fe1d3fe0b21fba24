"""Signals from the first line of a command to its last; what is begun by a launcher ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ctx_jax.signals import SIGNALS, received

COMMAND = """
import atexit, os, signal, sys, time, types

def send(number):
    os.kill(os.getpid(), number)

class Imports:
    def find_spec(self, name, *_):
        if name == "ctx_jax.cli" and when == "imports":
            send(number)

class Last:
    def __init__(self):
        self.kill, self.process, self.number = os.kill, os.getpid(), number
    def __del__(self):
        self.kill(self.process, self.number)

class Late:
    def flush(self):
        send(number)

def command():
    if when == "command":
        send(number)
        time.sleep(10)
    print("the result", flush=True)
    if when == "exit":
        atexit.register(send, number)
        sys.last = Last()
    elif when == "failure":
        sys.stdout = Late()
        raise SystemExit(3)

number, when = int(sys.argv[1]), sys.argv[2]
if when == "imports":
    sys.meta_path.insert(0, Imports())
else:
    sys.modules["ctx_jax.cli"] = types.SimpleNamespace(main=command)
from ctx_jax.__main__ import main
main()
"""
"""`ctx_jax` with a command that takes no time in place of all."""


@pytest.mark.parametrize(
    ("number", "when", "code", "said"),
    [
        (signal.SIGTERM, "imports", 75, "error: stopped by SIGTERM: give the same command again\n"),
        (signal.SIGINT, "imports", 130, "error: stopped by Ctrl-C: give the same command again\n"),
        (signal.SIGUSR1, "command", 75, "error: stopped by SIGUSR1: give the same command again\n"),
        (signal.SIGTERM, "exit", 0, ""),
        (signal.SIGINT, "exit", 0, ""),
        (signal.SIGUSR1, "exit", 0, ""),
        (signal.SIGTERM, "failure", 3, ""),
    ],
)
def test_a_signal_at_any_moment_gives_the_true_code(number, when, code, said):
    command = [sys.executable, "-c", COMMAND, str(int(number)), when]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)
    assert done.stdout == ("" if code in (75, 130) else "the result\n")


ROOT = Path(__file__).resolve().parents[1]

LAUNCHER = """
import os, subprocess, sys, time
command = "import sys, time, types; sys.modules['ctx_jax.cli'] = types.SimpleNamespace(main=lambda: print('begun', "
command += "flush=True) or time.sleep(60)); from ctx_jax.__main__ import main; main()"
os.environ["CTX_JAX_LAUNCHER"] = str(os.getpid())
with open(sys.argv[1], "wb") as log:
    subprocess.run([sys.executable, "-c", command], stdout=log, stderr=log)
"""


def test_what_a_killed_launcher_began_is_told_to_stop(tmp_path):
    log = tmp_path / "log"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(log)], cwd=ROOT)
    try:
        until(lambda: log.exists() and log.read_text() == "begun\n")
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: log.read_text() == "begun\nerror: stopped by SIGTERM: give the same command again\n")


DEAF = """
import sys, types
from contextlib import suppress
from ctx_jax.signals import say

def command():
    say("first")
    sys.stdin.readline()
    for _ in range(2):
        {}
    raise SystemExit(7)

sys.modules["ctx_jax.cli"] = types.SimpleNamespace(main=command)
from ctx_jax.__main__ import main
main()
"""


SPEAKS = "print('more', file=sys.stderr, flush=True)"


@pytest.mark.parametrize("speaks", [f"say('more'); {SPEAKS}", f"with suppress(BrokenPipeError): {SPEAKS}"])
def test_what_nobody_hears_changes_no_exit_code(speaks):
    command = [sys.executable, "-c", DEAF.format(speaks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stderr is not None and process.stdin is not None and process.stderr.read(5) == b"first"
        process.stderr.close()
        process.stdin.write(b"go on\n")
        process.stdin.close()
        assert process.wait(30) == 7


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_thread_receives_and_the_innermost_block_answers():
    before = [signal.getsignal(number) for number in SIGNALS]
    outer: list[int] = []
    inner: list[tuple[int, bool]] = []
    noted: list[int] = []
    main = threading.current_thread()
    with received([signal.SIGUSR1, signal.SIGTERM], outer.append):
        with received(
            [signal.SIGUSR1], lambda number: inner.append((number, threading.current_thread() is main)), noted.append
        ):
            signal.raise_signal(signal.SIGUSR1)
            assert noted == [signal.SIGUSR1]  # at once
            until(lambda: inner)
        signal.raise_signal(signal.SIGTERM)
        until(lambda: outer)
    assert (inner, outer) == ([(signal.SIGUSR1, False)], [signal.SIGTERM])
    assert before == [signal.getsignal(number) for number in SIGNALS] and signal.set_wakeup_fd(-1) == -1


def test_elsewhere_than_in_the_main_thread_there_are_no_signals():
    entered = []

    def enter() -> None:
        with received([signal.SIGUSR1], entered.append):
            entered.append(0)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [0]
