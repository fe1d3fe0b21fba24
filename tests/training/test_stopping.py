"""Runs that are asked to stop, alone and on two hosts; what is said when nothing moves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from ctx_jax.signals import Preempted
from ctx_jax.training.checkpoints import find_checkpoint, saved
from ctx_jax.training.loop import Evaluator
from ctx_jax.training.stopping import Stop
from tests.kills.processes import environment, start, start_hosts
from tests.training.fakes import assert_equal
from tests.training.test_loop import MESH, TRAINING, final, interrupt, lines, train, whole

__all__ = ["whole"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_systems_notice_ends_the_step_and_saves(whole, tmp_path: Path, monkeypatch, capfd, number):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with monkeypatch.context() as patch:
        interrupt(patch, 3, number=number)
        with pytest.raises(Preempted, match="stopped after step 3 of 6, which is saved: the same command goes on"):
            train(tmp_path)
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    assert f"{signal.Signals(number).name}: stopping after this step" in capfd.readouterr().err
    train(tmp_path)
    assert_equal(final(tmp_path), final(whole[0]))
    assert lines(tmp_path) == lines(whole[0])


@pytest.mark.parametrize("step", [4, 6])
def test_a_stop_saves_before_the_evaluation_which_is_done_on_return(whole, tmp_path: Path, monkeypatch, step: int):
    """The last step, too: a run is done when it is evaluated."""
    evaluations = []
    evaluate = Evaluator.__call__

    def counted(self, *arguments):
        evaluations.append(1)
        return evaluate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "__call__", counted)
        interrupt(patch, step, number=signal.SIGTERM)
        with pytest.raises(Preempted):
            train(tmp_path)
        assert len(evaluations) == (step - 1) // 4 and saved(tmp_path)[-1] == step
    assert {**train(tmp_path), "run": 0, "tokens_per_second": 0} == {**whole[1], "run": 0, "tokens_per_second": 0}
    assert lines(tmp_path) == lines(whole[0])
    assert_equal(final(tmp_path), final(whole[0]))


def test_a_stop_in_the_middle_of_an_evaluation(whole, tmp_path: Path, monkeypatch):
    init, calls = Evaluator.__init__, []

    def made(self, *arguments):
        init(self, *arguments)
        step = self.step

        def interrupted(*arguments):
            calls.append(1)
            signal.raise_signal(signal.SIGTERM)
            return step(*arguments)

        self.step = interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "__init__", made)
        with pytest.raises(Preempted, match="stopped after step 4 of 6"):
            train(tmp_path)
        assert len(calls) == 1 and saved(tmp_path) == [4]
    train(tmp_path)
    assert lines(tmp_path) == lines(whole[0])
    assert_equal(final(tmp_path), final(whole[0]))


def test_the_best_step_stays(tmp_path: Path):
    training = replace(TRAINING, evaluate_every=2, checkpoint_every=0, keep=1, keep_every=4, best="loss", steps=6)
    train(tmp_path / "run", training=training)
    losses = {line["step"]: line["loss"] for line in lines(tmp_path / "run") if line["kind"] == "evaluation"}
    assert saved(tmp_path / "run") == sorted({4, 6, min(losses, key=losses.__getitem__)})
    with pytest.raises(
        ValueError, match=r"training.best 'los' is no number of the evaluation: choose from loss, lm, row"
    ):
        train(tmp_path / "other", training=replace(training, best="los"))
    assert saved(tmp_path / "other") == [2]  # nothing is lost
    train(tmp_path / "other", training=replace(training))
    assert_equal(final(tmp_path / "other"), final(tmp_path / "run"))
    train(tmp_path / "highest", training=replace(training, best="accuracy", keep_every=0))
    shares = {line["step"]: line["accuracy"] for line in lines(tmp_path / "highest") if line["kind"] == "evaluation"}
    best = max(shares, key=lambda step: (shares[step], step))
    assert saved(tmp_path / "highest") == sorted({6, best})
    assert find_checkpoint(tmp_path / "highest", "best", "accuracy")[1] == best


def test_nobody_asked():
    with Stop(MESH).listening() as stop:
        assert (stop.agreed(), stop.asked) == (0, 0)


ALONE = """
import signal, sys, time
from ctx_jax.training.stopping import Stop, Watch
import jax
mesh = jax.sharding.Mesh(jax.devices(), "data")
how = sys.argv[1]
with Watch(0.5 if how == "watch" else 0) as watch, Stop(mesh).listening() as stop:
    watch.at(7, "step 8")
    stop.started = how != "early"
    print("ready", flush=True)
    # As a collective does that does not come back, this lets no handler of Python's run.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    signal.sigwait([signal.SIGALRM])
"""


@pytest.mark.parametrize(
    ("how", "signals", "code", "last"),
    [
        ("early", [signal.SIGTERM], 75, "stopped by SIGTERM before a step was done"),
        ("twice", [signal.SIGTERM, signal.SIGUSR1], 75, "stopped at once by SIGUSR1"),
        ("twice", [signal.SIGTERM, signal.SIGINT], 130, "stopped at once by Ctrl-C"),
        ("echo", [signal.SIGTERM, signal.SIGINT], 130, "stopped at once by Ctrl-C"),
        ("watch", [], 1, "has waited 1 s for step 8: nothing moves any more"),
    ],
)
def test_a_process_that_hangs_ends_with_a_line_that_says_why(how, signals, code, last, tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, how],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert process.stderr is not None
        for number in signals[:-1]:
            process.send_signal(number)
            while "stopping after this step" not in process.stderr.readline():
                assert process.poll() is None
        if how == "echo":  # as `timeout` does
            process.send_signal(signals[0])
            time.sleep(0.3)
        if signals:
            process.send_signal(signals[-1])
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    assert said.splitlines()[-1].startswith("error: ") and last in said.splitlines()[-1]


def test_two_hosts_stop_after_the_same_step_and_one_goes_on(speeches: Path, folder: Path, tmp_path: Path):
    """One of them gets the notice; a process with as many devices ends the run."""
    surroundings = environment(Path(jax.config.jax_compilation_cache_dir or tmp_path), devices=1)
    surroundings |= {"TEXT": str(speeches), "DATA": str(folder)}
    run = tmp_path / "run"
    command = ["-m", "ctx_jax", "train", "tests/kills/experiments.py:gpt", "--run", str(run)]
    command += ["--training.checkpoint-every", "0", "--training.steps", "100000", "--training.log-every", "1"]
    hosts = start_hosts(command, surroundings, 2, tmp_path)
    try:
        deadline = time.monotonic() + 300
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").stat().st_size == 0:
            assert time.monotonic() < deadline and all(host.poll() is None for host in hosts)
            time.sleep(0.05)
        hosts[1].send_signal(signal.SIGTERM)
        codes = [host.wait(timeout=120) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    said = [(tmp_path / f"process_{number}.log").read_text() for number in range(2)]
    assert codes == [75, 75], said
    (step,) = saved(run)
    for text in said:
        assert (
            text.splitlines()[-1]
            == f"error: stopped after step {step} of 100000, which is saved: the same command goes on"
        )
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == step

    alone = start(command, environment(tmp_path, devices=2) | surroundings, tmp_path / "alone.log")
    try:
        deadline = time.monotonic() + 300
        while f"goes on after step {step} of 100000" not in (tmp_path / "alone.log").read_text():
            assert time.monotonic() < deadline and alone.poll() is None, (tmp_path / "alone.log").read_text()
            time.sleep(0.05)
    finally:
        alone.kill()
        alone.wait()
    assert os.listdir(run / "checkpoints") == [str(step)]
