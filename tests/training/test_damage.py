"""Checkpoints whose files are no longer what was written, and which checkpoints stay."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import pytest

from ctx_jax.training import checksums
from ctx_jax.training.checkpoints import Checkpoints, find_checkpoint, saved
from tests.training.fakes import assert_equal
from tests.training.test_checkpoints import abstract, make_state


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints 3 and 4."""
    run = tmp_path_factory.mktemp("run")
    with Checkpoints(run, keep=5) as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, make_state(step), {"experiment": {}})
    return run


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
def test_harm_to_any_file_is_found(two: Path, harm):
    """Each file in turn, orbax's own and the list of checksums included."""
    folder = two / "checkpoints" / "4"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) > 40 and checksums.damage(folder) is None
    for file in files:
        before = file.read_bytes()
        harm(file)
        assert checksums.damage(folder) is not None, file
        file.write_bytes(before)
    assert checksums.damage(folder) is None


def test_processes_share_the_reading(two: Path):
    folder = two / "checkpoints" / "4"
    names = list(checksums.files(folder))
    file = folder / names[7]
    before = file.read_bytes()
    flip(file)
    found = [checksums.damage(folder, part, 5) for part in range(5)]
    assert found == [None, None, (7, f"{names[7]} does not hold what was written"), None, None]
    file.write_bytes(before)


def test_a_damaged_step_is_set_aside_and_the_one_before_it_used(two: Path, tmp_path: Path, capsys):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    data = next((tmp_path / "checkpoints/4/params/d").iterdir())
    flip(data)
    expected = (
        f"note: checkpoint {tmp_path}/checkpoints/4 is damaged: params/d/{data.name} does not hold what was written"
    )
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.newest_whole() == 3
        assert capsys.readouterr().err == f"{expected}: step 3 is used\n"
    assert find_checkpoint(tmp_path) == (tmp_path, 3) and saved(tmp_path) == [3, 4]
    with pytest.raises(ValueError, match=r"checkpoints/4 is damaged: params/d/.*: choose another step of 3, 4"):
        find_checkpoint(tmp_path, "4")
    capsys.readouterr()
    for place in ("4", "4-2"):
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            assert checkpoints.newest_whole() == 3
            assert_equal(checkpoints.restore(3, abstract(make_state(3))), make_state(3))
            assert f"; it is moved to {tmp_path}/damaged/{place}: step 3 is used" in capsys.readouterr().err
            checkpoints.save(4, make_state(4), {})
        (tmp_path / "checkpoints/4/checksums.sha256").unlink()
    assert sorted(path.name for path in (tmp_path / "damaged").iterdir()) == ["4", "4-2"]


def test_if_none_is_whole_nothing_is_moved(two: Path, tmp_path: Path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    for step in (3, 4):
        (tmp_path / f"checkpoints/{step}/record/metadata").write_text("{}")
    with (
        Checkpoints(tmp_path, keep=1) as checkpoints,
        pytest.raises(ValueError, match=r"checkpoints/4 is damaged: record/metadata .* nothing is changed; put back"),
    ):
        checkpoints.newest_whole()
    assert saved(tmp_path) == [3, 4] and not (tmp_path / "damaged").exists()


def test_folders_of_other_names_are_no_steps(two: Path, tmp_path: Path):
    shutil.copytree(two, tmp_path / "run")
    steps = saved(two)
    for name in ("²", "030", "30.bak", "-1", "٣"):
        (tmp_path / "run/checkpoints" / name).mkdir()
    assert saved(tmp_path / "run") == steps
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        find_checkpoint(tmp_path / "run/checkpoints/²")


def test_a_save_that_was_killed_while_it_was_hashed_is_cleared_away(two: Path, tmp_path: Path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoints/4").rename(tmp_path / "checkpoints/4.orbax-checkpoint-tmp.written")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.newest_whole() == 3
        checkpoints.save(4, make_state(4), {})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


def test_a_full_disk_costs_the_step_alone(tmp_path: Path, monkeypatch, capfd):
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(checksums, "write", full)
            checkpoints.save(2, make_state(2), {})
            with pytest.raises(OSError, match=f"No space left on device: .*{re.escape(str(tmp_path))}"):
                checkpoints.wait()
    assert capfd.readouterr() == ("", "")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.newest_whole() == 1
        checkpoints.save(2, make_state(2), {})
    assert saved(tmp_path) == [1, 2]


def test_the_last_the_best_and_every_nth_stay(tmp_path: Path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(1, 10):
            checkpoints.retention.scores[step] = abs(step - 3)
            checkpoints.save(step, make_state(step), {})
        assert checkpoints.steps() == [3, 4, 8, 9]
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 3, "kind": "train", "loss": 1}\n'
        '{"step": 3, "kind": "evaluation", "loss": 5, "accuracy": 0.5}\n'
        '{"step": 8, "kind": "evaluation", "loss": 4}\n'
        '{"step": 7, "kind": "evaluation", "loss": 3}\n'
    )
    assert [find_checkpoint(tmp_path, choice)[1] for choice in ("last", "best", "4")] == [9, 8, 4]
    assert find_checkpoint(tmp_path, "best", "accuracy")[1] == 3
    for choice in ("7", "newest", "-1"):
        with pytest.raises(
            ValueError, match=f"--checkpoint {choice}: .* has no such checkpoint: choose best, last or one"
        ):
            find_checkpoint(tmp_path, choice)
    with pytest.raises(
        ValueError, match="no checkpoint of a step that was evaluated for 'nll': choose last or one of 3"
    ):
        find_checkpoint(tmp_path, "best", "nll")
    with pytest.raises(ValueError, match="checkpoints/8 is a checkpoint already, leave the option out"):
        find_checkpoint(tmp_path / "checkpoints/8", "best")
