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
import orbax.checkpoint as ocp
import pytest

from ctx_jax import runs
from ctx_jax.data import locked
from ctx_jax.experiment import Experiment, load, save
from ctx_jax.generation.beams import Beams
from ctx_jax.generation.sampling import Sampling
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.signals import Interrupted
from ctx_jax.text import open_text
from ctx_jax.training.checkpoints import PARTS, saved
from ctx_jax.training.loop import Training
from ctx_jax.training.metrics import Meter
from launch.sweep import is_locked
from tests.tiny import STEPS, smaller

OBJECTIVES = ("gpt", "transformer_xl", "bert", "xlnet")


@pytest.fixture(scope="module")
def straight(speeches: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """straight(name): an experiment, its run from the first step to the last, and what that gave back. Several tests
    look at it: what they change, they put back."""
    root, results = tmp_path_factory.mktemp("straight"), {}

    def run(name: str) -> tuple[Experiment, Path, dict[str, Any]]:
        experiment = smaller(name, speeches, folder)
        if name not in results:
            results[name] = runs.train(experiment, root / name)
        return experiment, root / name, results[name]

    return run


def newest_state(run: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, by path."""
    folder = run.absolute() / "checkpoints" / str(max(saved(run)))
    checkpointer, trees = ocp.PyTreeCheckpointer(), {}
    for part in (part for part in PARTS if (folder / part).is_dir()):
        tree = checkpointer.metadata(folder / part).item_metadata.tree
        wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        trees[part] = checkpointer.restore(folder / part, restore_args=wanted)
    leaves = jax.tree_util.tree_leaves_with_path(trees)
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
def test_a_run_stopped_on_its_way_ends_in_the_same_bits(
    name: str, straight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Data, corruption, dropout, optimizer and memory included; stopped after the first step and before the last, in
    one folder (after every step: tests/training/test_loop.py)."""
    experiment, run, result = straight(name)
    for step in (1, STEPS - 1):
        with monkeypatch.context() as patch, pytest.raises(Interrupted, match=f"step {step} of {STEPS}"):
            interrupt_after(step, patch)
            runs.train(experiment, tmp_path / "stopped")
    stopped = runs.train(experiment, tmp_path / "stopped")

    assert stopped["loss"] == result["loss"]
    assert stopped["evaluation"] == result["evaluation"]
    expected, found = newest_state(run), newest_state(tmp_path / "stopped")
    assert expected.keys() == found.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    if name in ("transformer_xl", "xlnet"):
        assert any("memory" in path and np.abs(array).max() > 0 for path, array in expected.items())
    assert lines(tmp_path / "stopped") == lines(run)


def test_a_finished_run_is_not_trained_again(straight, tmp_path: Path, capsys):
    experiment, run, result = straight("gpt")
    before = (run / "metrics.jsonl").read_text()
    assert runs.train(experiment, run) == result
    assert (run / "metrics.jsonl").read_text() == before
    (about := run / "text.json").rename(tmp_path / "text.json")
    assert runs.train(experiment, run) == result
    assert f"{run} has lost text.json, which says what text it was begun with" in capsys.readouterr().err
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


def test_a_run_folder_belongs_to_one_experiment(straight, tmp_path: Path):
    experiment, run, _ = straight("gpt")
    shutil.copytree(run, tmp_path / "run")
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
        with pytest.raises(
            ValueError, match=rf"was saved at step {STEPS}, but no checkpoint is left in .*run/checkpoints"
        ):
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


def test_continue_takes_parameters_optimizer_and_step_and_reads_anew(straight, tmp_path: Path):
    """BERT's second phase: longer windows, the same step count."""
    first, run, _ = straight("bert")
    longer = replace(first.data.reader, length=48)
    more = replace(first.training, steps=STEPS + 2)
    second = replace(first, data=replace(first.data, reader=longer), training=more)
    result = runs.train(second, tmp_path / "second", continue_from=run)
    assert result["step"] == STEPS + 2
    trained = [record["step"] for record in lines(tmp_path / "second") if record["kind"] == "train"]
    assert trained == [STEPS + 1, STEPS + 2]
    with pytest.raises(ValueError, match=f"has {STEPS} already"):
        runs.train(replace(second, training=first.training), tmp_path / "third", run)


def test_from_takes_what_matches(straight, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The position table of another length is new, the rest is the old run's."""
    first, run, _ = straight("gpt")
    still = replace(first.optimizer, schedule=replace(first.optimizer.schedule, rate=1e-30))
    second = replace(first, optimizer=still, model=replace(first.model, max_length=300), training=Training(steps=1))
    runs.train(second, tmp_path / "second", start_from=run)
    old, new = newest_state(run), newest_state(tmp_path / "second")
    changed = [path for path in old if path.startswith("params/") and not np.array_equal(old[path], new[path])]
    assert changed == ["params/positions/embedding"]
    assert "new parameters: positions/embedding" in capsys.readouterr().err


@pytest.mark.parametrize("name", OBJECTIVES)
def test_evaluation_declares_how_it_read(name: str, straight):
    experiment, run, trained = straight(name)
    result = runs.evaluate(run, split="validation")
    assert result["loss"] == pytest.approx(trained["evaluation"]["loss"], rel=1e-6)
    assert (result["target_length"], result["stride"]) == (32, 16 if name == "xlnet" else 32)
    assert result["memory_length"] == (24 if name in ("transformer_xl", "xlnet") else 0)
    if name in ("gpt", "transformer_xl"):
        store = open_text(experiment.data, ("validation",))[1]["validation"]
        assert result["tokens"] == len(store.tokens) - len(store.document_bytes)
        bits = result["nll"] * result["tokens"] / np.log(2) / store.document_bytes.sum()
        assert result["bits_per_byte"] == pytest.approx(bits)


def test_every_window_of_evaluation_scores_each_token_once(straight):
    """Any stride and memory predict the same tokens."""
    gpt, xl = straight("gpt")[1], straight("transformer_xl")[1]
    whole = runs.evaluate(gpt)
    sliding = runs.evaluate(gpt, stride=8)
    assert (sliding["tokens"], sliding["stride"]) == (whole["tokens"], 8)
    remembering = runs.evaluate(xl, length=8, memory_length=40, same_length=True, clamp_length=20, batch_size=1)
    assert remembering["tokens"] == whole["tokens"]
    assert (remembering["target_length"], remembering["memory_length"], remembering["streams"]) == (8, 40, 1)
    assert (remembering["same_length"], remembering["clamp_length"]) == (True, 20)
    with pytest.raises(ValueError, match="GptConfig has no memory_length"):
        runs.evaluate(gpt, memory_length=40)
    with pytest.raises(ValueError, match="unknown split 'tset'; did you mean 'test'"):
        runs.evaluate(gpt, split="tset")


def test_generation_goes_on_from_the_prompt(straight):
    _, run, _ = straight("gpt")
    prompts = ("The people of", "Congress")
    result = runs.generate(run, prompts, 8, Sampling(temperature=0), 0)
    assert [text.startswith(prompt) for text, prompt in zip(result["texts"], prompts, strict=True)] == [True, True]
    assert runs.generate(run, prompts, 8, Sampling(temperature=0), 0) == result


def test_the_best_text_of_a_beam_search_is_cut_before_a_stop_string(straight):
    _, run, _ = straight("gpt")
    prompt = "The people of"

    def found(*stop: str) -> str:
        varied = Sampling(temperature=0, repetition_penalty=8)
        (text,) = runs.generate(run, (prompt,), 8, varied, 0, search=Beams(3), stop=stop)["texts"]
        return text.removeprefix(prompt)

    whole = found()
    assert (cut := whole.index(whole[3:])) > 0
    assert found(whole[3:], "\0") == whole[:cut]
    assert found("\0") == whole


def test_a_run_of_a_mesh_that_does_not_fit_is_used_on_what_is_there(straight, tmp_path, capsys):
    _, run, _ = straight("gpt")
    other = shutil.copytree(run, tmp_path / "other")
    save(replace(load(run / "experiment.json"), mesh=Mesh(data=2, fsdp=2)), other / "experiment.json")
    prompts = ("The people of",)
    found = runs.generate(other, prompts, 8, Sampling(temperature=0), 0)
    assert found["texts"] == runs.generate(run, prompts, 8, Sampling(temperature=0), 0)["texts"]
    said = "note: the run's mesh (data=2 fsdp=2 tensor=1) does not fit 1 devices: data=1 fsdp=1 tensor=1 is used"
    assert said in capsys.readouterr().err
    assert runs.evaluate(other)["loss"] == runs.evaluate(run)["loss"]


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
