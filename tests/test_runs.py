"""Runs as a user starts, stops, resumes, scores and continues them, on the experiments' own tiny() made tinier."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ctx_jax import runs
from ctx_jax.data import locked
from ctx_jax.experiment import Experiment
from ctx_jax.generation.decode import Sampling
from ctx_jax.signals import Interrupted
from ctx_jax.text import open_text
from ctx_jax.training.checkpoints import Checkpoints
from ctx_jax.training.loop import Training
from ctx_jax.training.metrics import Meter
from ctx_jax.training.state import abstract_state
from ctx_jax.training.step import prepared_shapes
from launch.sweep import is_locked
from tests.tiny import STEPS, smaller

OBJECTIVES = ("gpt", "transformer_xl", "bert", "xlnet")


def newest_state(experiment: Experiment, run: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, by path."""
    mesh, optimizer = experiment.mesh.build(), experiment.optimizer.build(experiment.training.steps)
    _, stores = open_text(experiment.data, ("train",))
    data = experiment.data
    shapes = prepared_shapes(experiment.objective, data.reader, stores["train"], data.batch_size)
    abstract = abstract_state(experiment.model.build(), optimizer, shapes, mesh)
    with Checkpoints(run) as checkpoints:
        step = checkpoints.latest()
        assert step is not None
        state = checkpoints.restore(step, abstract)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    timed = ("seconds", "tokens_per_second")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in timed} for record in records]


def interrupt_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends this process SIGINT, as Ctrl-C does, when step `step` has been dispatched."""
    push = Meter.push

    def pushed(self: Meter, at: int, measured: Any) -> None:
        push(self, at, measured)
        if at == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Meter, "push", pushed)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_run_stopped_at_any_step_ends_in_the_same_bits(
    name: str, speeches: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Data, corruption, dropout, optimizer and memory included; stopped after each step in turn, in one folder."""
    experiment = smaller(name, speeches, folder)
    straight = runs.train(experiment, tmp_path / "straight")
    for step in range(1, STEPS):
        with monkeypatch.context() as patch, pytest.raises(Interrupted, match=f"step {step} of {STEPS}"):
            interrupt_after(step, patch)
            runs.train(experiment, tmp_path / "stopped")
    stopped = runs.train(experiment, tmp_path / "stopped")

    assert stopped["loss"] == straight["loss"]
    assert stopped["evaluation"] == straight["evaluation"]
    expected, found = (newest_state(experiment, tmp_path / run) for run in ("straight", "stopped"))
    assert expected.keys() == found.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    if name in ("transformer_xl", "xlnet"):
        assert any("memory" in path and np.abs(array).max() > 0 for path, array in expected.items())
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")


def test_a_finished_run_is_not_trained_again(speeches: Path, folder: Path, tmp_path: Path, capsys):
    experiment = smaller("gpt", speeches, folder, steps=2)
    first = runs.train(experiment, tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_text()
    assert runs.train(experiment, tmp_path / "run") == first
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    (about := tmp_path / "run/text.json").rename(tmp_path / "text.json")
    assert runs.train(experiment, tmp_path / "run") == first
    assert "run has lost text.json, which says what text it was begun with" in capsys.readouterr().err
    assert about.read_text() == (tmp_path / "text.json").read_text()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_of_once(tmp_path: Path, monkeypatch, capsys, error: int):
    def flock(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):
        with runs.alone(tmp_path), locked(tmp_path / "other.lock"):
            assert not is_locked(tmp_path)
    said = f"note: {tmp_path} is on a file system without locks: do not give two commands for it at the same time\n"
    assert capsys.readouterr().err == said
    error = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), runs.alone(tmp_path):
        pass


def test_a_run_folder_belongs_to_one_experiment(speeches: Path, folder: Path, tmp_path: Path):
    experiment = smaller("gpt", speeches, folder, steps=1)
    runs.train(experiment, tmp_path / "run")
    other = replace(experiment, model=replace(experiment.model, layers=1))
    with pytest.raises(ValueError, match=r"another experiment \(model.layers: 2 -> 1\)"):
        runs.train(other, tmp_path / "run")
    (tmp_path / "run/experiment.json").rename(tmp_path / "experiment.json")
    with pytest.raises(ValueError, match=r"run has lost its experiment.json: put it back"):
        runs.train(experiment, tmp_path / "run")
    (tmp_path / "experiment.json").rename(tmp_path / "run/experiment.json")
    before = [(tmp_path / "run" / name).read_bytes() for name in ("metrics.jsonl", "experiment.json")]
    shutil.rmtree(tmp_path / "run/checkpoints")
    for wanted in (experiment, other):
        with pytest.raises(ValueError, match=r"was saved at step 1, but no checkpoint is left in .*run/checkpoints"):
            runs.train(wanted, tmp_path / "run")
    (tmp_path / "run/checkpoints").touch()
    with pytest.raises(ValueError, match="run/checkpoints is no folder"):
        runs.train(experiment, tmp_path / "run")
    assert before == [(tmp_path / "run" / name).read_bytes() for name in ("metrics.jsonl", "experiment.json")]
    with pytest.raises(NotADirectoryError, match=r"experiment\.json"):
        runs.train(experiment, tmp_path / "run/experiment.json")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("not a run")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        runs.train(experiment, tmp_path / "mine")


def test_continue_takes_parameters_optimizer_and_step_and_reads_anew(speeches: Path, folder: Path, tmp_path: Path):
    """BERT's second phase: longer windows, the same step count."""
    first = smaller("bert", speeches, folder, steps=2)
    runs.train(first, tmp_path / "first")
    longer = replace(first.data.reader, length=48)
    second = replace(first, data=replace(first.data, reader=longer), training=replace(first.training, steps=4))
    result = runs.train(second, tmp_path / "second", continue_from=tmp_path / "first")
    assert result["step"] == 4
    assert [record["step"] for record in lines(tmp_path / "second") if record["kind"] == "train"] == [3, 4]
    with pytest.raises(ValueError, match="has 2 already"):
        runs.train(replace(second, training=replace(first.training, steps=2)), tmp_path / "third", tmp_path / "first")


def test_from_takes_what_matches(speeches: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The position table of another length is new, the rest is the old run's."""
    first = smaller("gpt", speeches, folder, steps=2)
    runs.train(first, tmp_path / "first")
    still = replace(first.optimizer, schedule=replace(first.optimizer.schedule, rate=1e-30))
    second = replace(first, optimizer=still, model=replace(first.model, max_length=300), training=Training(steps=1))
    runs.train(second, tmp_path / "second", start_from=tmp_path / "first")
    old, new = newest_state(first, tmp_path / "first"), newest_state(second, tmp_path / "second")
    changed = [path for path in old if path.startswith("params/") and not np.array_equal(old[path], new[path])]
    assert changed == ["params/positions/embedding"]
    assert "new parameters: positions/embedding" in capsys.readouterr().err


@pytest.mark.parametrize("name", OBJECTIVES)
def test_evaluation_declares_how_it_read(name: str, speeches: Path, folder: Path, tmp_path: Path):
    experiment = smaller(name, speeches, folder, steps=1)
    trained = runs.train(experiment, tmp_path / "run")
    result = runs.evaluate(tmp_path / "run", split="validation")
    assert result["loss"] == pytest.approx(trained["evaluation"]["loss"], rel=1e-6)
    assert (result["target_length"], result["stride"]) == (32, 16 if name == "xlnet" else 32)
    assert result["memory_length"] == (24 if name in ("transformer_xl", "xlnet") else 0)
    if name in ("gpt", "transformer_xl"):
        store = open_text(experiment.data, ("validation",))[1]["validation"]
        assert result["tokens"] == len(store.tokens) - len(store.document_bytes)
        bits = result["nll"] * result["tokens"] / np.log(2) / store.document_bytes.sum()
        assert result["bits_per_byte"] == pytest.approx(bits)


def test_every_window_of_evaluation_scores_each_token_once(speeches: Path, folder: Path, tmp_path: Path):
    """Any stride and memory predict the same tokens; more context than in training changes the loss a little only."""
    runs.train(smaller("gpt", speeches, folder, steps=1), tmp_path / "gpt")
    runs.train(smaller("transformer_xl", speeches, folder, steps=1), tmp_path / "xl")
    whole = runs.evaluate(tmp_path / "gpt")
    sliding = runs.evaluate(tmp_path / "gpt", stride=8)
    assert (sliding["tokens"], sliding["stride"]) == (whole["tokens"], 8)
    remembering = runs.evaluate(
        tmp_path / "xl", length=8, memory_length=40, same_length=True, clamp_length=20, batch_size=1
    )
    assert remembering["tokens"] == whole["tokens"]
    assert (remembering["target_length"], remembering["memory_length"], remembering["streams"]) == (8, 40, 1)
    assert (remembering["same_length"], remembering["clamp_length"]) == (True, 20)
    with pytest.raises(ValueError, match="GptConfig has no memory_length"):
        runs.evaluate(tmp_path / "gpt", memory_length=40)
    with pytest.raises(ValueError, match="unknown split 'tset'; did you mean 'test'"):
        runs.evaluate(tmp_path / "gpt", split="tset")


def test_generation_goes_on_from_the_prompt(speeches: Path, folder: Path, tmp_path: Path):
    runs.train(smaller("gpt", speeches, folder, steps=1), tmp_path / "run")
    prompts = ("The people of", "Congress")
    result = runs.generate(tmp_path / "run", prompts, 8, Sampling(temperature=0), 0)
    assert [text.startswith(prompt) for text, prompt in zip(result["texts"], prompts, strict=True)] == [True, True]
    assert runs.generate(tmp_path / "run", prompts, 8, Sampling(temperature=0), 0) == result


def test_hosts_with_different_experiments_do_not_train_together(
    speeches: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs, "gather", lambda value: [value, value + 1])
    with pytest.raises(ValueError, match="the hosts were given different experiments"):
        runs.train(smaller("gpt", speeches, folder, steps=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_begun_meanwhile_is_left_alone(
    speeches: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two commands for one new folder: the second prepares while the first trains."""
    first = smaller("gpt", speeches, folder, steps=1)
    second = replace(first, training=replace(first.training, seed=9))
    open_text = runs.open_text

    def slow(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(runs, "open_text", open_text)
            runs.train(first, tmp_path / "run")
        return open_text(*arguments)

    monkeypatch.setattr(runs, "open_text", slow)
    with pytest.raises(ValueError, match=r"another experiment \(training.seed: 0 -> 9\)"):
        runs.train(second, tmp_path / "run")
