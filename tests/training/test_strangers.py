"""Checkpoints that are not this step of this run, and runs of which no checkpoint, or not the newest, is left."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ctx_jax.experiment import find, save
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.serialization import to_json
from ctx_jax.training import checksums
from ctx_jax.training.checkpoints import Checkpoints, begun, find_checkpoint, saved
from tests.training.test_checkpoints import make_state

OURS = find("gpt:tiny")
OTHER = replace(OURS, training=replace(OURS.training, seed=1))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs ours, with the checkpoints 3 and 4, and other, with 5."""
    folder = tmp_path_factory.mktemp("runs")
    for name, experiment, steps in (("ours", OURS, (3, 4)), ("other", OTHER, (5,))):
        save(experiment, folder / name / "experiment.json")
        with Checkpoints(folder / name, keep=5) as checkpoints:
            for step in steps:
                checkpoints.save(step, make_state(step), {"experiment": to_json(experiment)})
    return folder


@pytest.fixture
def runs(kept: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(kept, tmp_path / "runs")


def newest_whole(run: Path) -> int | None:
    with Checkpoints(run, keep=5) as checkpoints:
        return checkpoints.newest_whole()


def rewrite(step: Path, change: Callable[[dict], object]) -> None:
    """Changes the record of a checkpoint, and its checksums with it."""
    file = step / "record/metadata"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))
    checksums.write(step)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("other/checkpoints/5", "is of another experiment (training.seed: 0 -> 1)"),
        ("ours/checkpoints/3", "holds step 3"),
    ],
)
def test_what_is_not_this_step_of_this_run_is_set_aside(runs: Path, capsys, source: str, why: str):
    """Copied from another run, or under another number."""
    run = runs / "ours"
    shutil.copytree(runs / source, run / "checkpoints/5")
    said = f"checkpoint {run}/checkpoints/5 {why}"
    with pytest.raises(ValueError, match=re.escape(f"{said}: choose another step of 3, 4, 5")):
        find_checkpoint(run, "5")
    with pytest.raises(ValueError, match=re.escape(said)):
        find_checkpoint(run / "checkpoints/5")
    assert find_checkpoint(run) == (run, 4) and saved(run) == [3, 4, 5]
    assert capsys.readouterr().err == f"note: {said}: step 4 is used\n"
    assert newest_whole(run) == 4
    assert capsys.readouterr().err == f"note: {said}; it is moved to {run}/damaged/5: step 4 is used\n"
    assert saved(run) == [3, 4] and saved(runs / "other") == [5]


def test_another_runs_checkpoints_alone_are_left_as_they_are(runs: Path):
    run = runs / "ours"
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(runs / "other/checkpoints", run / "checkpoints")
    with pytest.raises(ValueError, match=r"another experiment .*, and no other .* can be used: nothing is changed"):
        newest_whole(run)
    assert saved(run) == [5] and not (run / "damaged").exists()


def test_mesh_cadences_and_places_may_differ(runs: Path, capsys):
    """As the fingerprint has it; and a checkpoint of before the step was written into it is read."""
    run = runs / "ours"
    elsewhere = replace(OURS, data=replace(OURS.data, folder="/elsewhere"), mesh=Mesh(data=1))
    save(replace(elsewhere, training=replace(OURS.training, keep=9, best="nll")), run / "experiment.json")
    rewrite(run / "checkpoints/4", lambda record: record.pop("step"))
    assert newest_whole(run) == 4 and capsys.readouterr().err == ""


@pytest.mark.parametrize("experiment", [None, {}, {"type": "ctx_jax.experiment:Experiment", "nmae": "a"}])
def test_an_experiment_that_cannot_be_read_is_another(runs: Path, capsys, experiment):
    rewrite(runs / "ours/checkpoints/4", lambda record: record.update(experiment=experiment))
    assert newest_whole(runs / "ours") == 3
    assert "checkpoints/4 is of an experiment that cannot be read" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_lost_is_not_begun_anew(runs: Path, capsys):
    run = runs / "ours"
    assert begun(run)
    shutil.rmtree(run / "checkpoints/4")
    assert newest_whole(run) == 3
    assert capsys.readouterr().err == f"note: step 4 was saved, but is no longer in {run}/checkpoints: step 3 is used\n"
    for gone in ("checkpoints/3", "checkpoints"):
        shutil.rmtree(run / gone)
        with pytest.raises(ValueError, match=rf"^{run} was saved at step 4, but no checkpoint is left in .*: put it"):
            begun(run)
    (run / "latest").unlink()
    assert not begun(run)


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("gone")])
def test_what_is_no_folder_is_named(tmp_path: Path, make: Callable[[Path], None]):
    """A file, or a link to a disk that is not there."""
    make(tmp_path / "checkpoints")
    for find_it in (begun, find_checkpoint):
        with pytest.raises(ValueError, match=f"{tmp_path}/checkpoints is no folder, nor a link to one that is there"):
            find_it(tmp_path)


def test_a_step_is_on_disk_before_it_has_its_name_and_then_its_name_is(tmp_path: Path, monkeypatch):
    settled: list[tuple[int, list[int]]] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        settled.append((os.fstat(descriptor).st_ino, saved(tmp_path)))
        fsync(descriptor)

    with Checkpoints(tmp_path, keep=2) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", recorded)
        checkpoints.save(7, make_state(7), {})
        checkpoints.wait()
    folder = tmp_path / "checkpoints/7"
    assert (tmp_path / "latest").read_text() == "7\n"
    assert settled[-3:] == [(path.stat().st_ino, [7]) for path in (folder.parent, tmp_path / "latest", tmp_path)]
    assert {(path.stat().st_ino, ()) for path in (folder, *folder.rglob("*"))} <= {
        (place, tuple(steps)) for place, steps in settled[:-3]
    }
