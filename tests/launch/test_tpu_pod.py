"""The calls of gcloud, in their order, whatever happens to the pod; the options are those of `gcloud ... --help`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import tpu_pod

GCLOUD = """
import re, shutil
from pathlib import Path
folder = Path(__file__).parent
action = sys.argv[4]
def next_of(name, otherwise):
    file = folder / name
    values = file.read_text().split() if file.exists() else []
    file.write_text(" ".join(values[1:]))
    return values[0] if values else otherwise
if action == "describe":
    print(next_of("states", "ACTIVE"))
elif action == "scp":
    shutil.copy(sys.argv[5], folder / "copied.tar.gz")
    sys.exit(int(next_of("copies", "0")))
elif action == "ssh" and any(word.startswith("--command=cd ctx_jax && exec ") for word in sys.argv):
    print("a line of the run", flush=True)
    sys.exit(int(next_of("codes", "0")))
elif action == "ssh":
    if code := int(next_of("preparations", "0")):
        sys.exit(print("a long story\\nno connection", file=sys.stderr) or code)
elif action == "create":
    sys.exit(int(next_of("created", "0")))
"""

HANGS = """
    import time
    Path({!r}).touch()
    time.sleep(30)
"""

POD = "--name run-1 --zone us-east5-a --accelerator v5litepod-16 --poll 0".split()
PLACE = ["--zone=us-east5-a", "--quiet"]


@pytest.fixture
def gcloud(programs, tmp_path, monkeypatch):
    programs.add("gcloud", GCLOUD)
    clone = tmp_path / "clone"
    (clone / "part").mkdir(parents=True)
    for name in ("kept.py", "part/a b.py", "new.py", "ignored.txt"):
        (clone / name).write_text(name)
    (clone / ".gitignore").write_text("ignored.txt\n")
    subprocess.run(["git", "init", "--quiet"], cwd=clone, check=True)
    subprocess.run(["git", "add", "kept.py", "part"], cwd=clone, check=True)
    monkeypatch.chdir(clone)
    return programs


def actions(gcloud) -> list[str]:
    """The words behind `gcloud compute tpus queued-resources`, and whether the run itself was meant."""
    assert all(words[:4] == ["gcloud", "compute", "tpus", "queued-resources"] for words in gcloud.words)
    run = "--command=cd ctx_jax && exec "
    return ["run" if any(word.startswith(run) for word in words) else words[4] for words in gcloud.words]


def test_a_pod_is_made_used_and_deleted(gcloud, tmp_path, capfd, nasty):
    (gcloud.folder / "states").write_text("WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    assert tpu_pod.main([*POD, "--project", "p", "--spot", "--", *nasty]) == 0
    everywhere, place = ["--node=all", "--worker=all", "--batch-size=all"], [PLACE[0], "--project=p", PLACE[1]]
    create, *waited, copy, prepare, work, delete = (words[4:] for words in gcloud.words)
    kind = ["--accelerator-type=v5litepod-16", "--runtime-version=tpu-ubuntu2204-base"]
    assert create == ["create", "run-1", "--node-id=run-1", *kind, "--spot", *place]
    assert waited == [["describe", "run-1", "--format=value(state.state)", *place]] * 3
    assert copy[0] == "scp" and copy[2:] == ["run-1:ctx_jax.tar.gz", *everywhere, *place]
    assert prepare[:5] == ["ssh", "run-1", *everywhere] and prepare[5].startswith("--command=rm -rf ctx_jax && mkdir")
    assert work[:5] == ["ssh", "run-1", *everywhere] and work[6:] == place
    assert delete == ["delete", "run-1", "--force", *place]
    assert copied(gcloud) == COPIED
    shown = capfd.readouterr()
    assert "a line of the run" in shown.out and "run-1: PROVISIONING" in shown.err
    assert received(work[5], tmp_path) == nasty


COPIED = [".gitignore", "kept.py", "new.py", "part/a b.py"]


def copied(gcloud) -> list[str]:
    with tarfile.open(gcloud.folder / "copied.tar.gz") as archive:
        return sorted(archive.getnames())


def received(option: str, folder: Path) -> list[str]:
    """What the command of a worker's shell gets as its arguments."""
    python = folder / "home/ctx_jax/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    python.chmod(0o755)
    line = option.removeprefix("--command=")
    done = subprocess.run(["bash", "-c", line], cwd=folder / "home", capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[:2] == ["-m", "ctx_jax"]
    return json.loads(done.stdout)[2:]


ONE = ["create", "describe", "scp", "ssh", "run"]


def test_a_pod_that_is_taken_back_is_made_again(gcloud):
    """Once the run says so itself, once its connection breaks and the state tells why."""
    (gcloud.folder / "codes").write_text("75 255 0")
    (gcloud.folder / "states").write_text("ACTIVE ACTIVE SUSPENDED ACTIVE")
    assert tpu_pod.main([*POD, "--", "doctor"]) == 0
    assert actions(gcloud) == [*ONE, "delete", *ONE, "describe", "delete", *ONE, "delete"]


def test_a_pod_that_is_taken_back_before_it_runs_is_made_again(gcloud):
    """While it is waited for, while the code is copied, and while it is set up."""
    (gcloud.folder / "copies").write_text("1 0 0")
    (gcloud.folder / "preparations").write_text("255 0")
    (gcloud.folder / "states").write_text("ACCEPTED SUSPENDING ACTIVE SUSPENDED ACTIVE FAILED ACTIVE")
    assert tpu_pod.main([*POD, "--", "doctor"]) == 0
    waiting, copying = ["create", "describe", "describe", "delete"], ["create", "describe", "scp", "describe", "delete"]
    assert actions(gcloud) == [*waiting, *copying, *ONE[:4], "describe", "delete", *ONE, "delete"]


def test_a_preparation_that_fails_is_not_tried_again(gcloud, capsys):
    (gcloud.folder / "preparations").write_text("1")
    with pytest.raises(ChildProcessError) as error:
        tpu_pod.main([*POD, "--", "doctor"])
    assert str(error.value) == "gcloud compute tpus queued-resources ssh run-1 failed (exit code 1): no connection"
    assert "a long story" in capsys.readouterr().err
    assert actions(gcloud) == [*ONE[:4], "describe", "delete"]


@pytest.mark.parametrize(
    ("ignored", "sent", "code", "last"),
    [
        ("", [signal.SIGHUP], 75, "stopped by SIGHUP: give the same command again"),
        ("SIGHUP", [signal.SIGHUP, signal.SIGTERM], 75, "stopped by SIGTERM: give the same command again"),  # nohup
        ("SIGINT", [signal.SIGINT], 130, "interrupted"),  # a script's background job
    ],
)
def test_a_launcher_that_is_told_to_stop_while_it_waits_deletes_the_pod(gcloud, tmp_path, ignored, sent, code, last):
    ready = tmp_path / "ready"
    gcloud.add("gcloud", GCLOUD.replace('print(next_of("states", "ACTIVE"))', HANGS.format(str(ready))))
    begin = f"import signal; signal.signal(signal.{ignored}, signal.SIG_IGN); " if ignored else ""
    begin += "from launch import command, tpu_pod; command.run(tpu_pod.main)"
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen([sys.executable, "-c", begin, *POD, "--", "doctor"], stderr=log)
    try:
        when(ready, lambda: [launcher.send_signal(number) for number in sent])
        assert launcher.wait(30) == code and actions(gcloud) == ["create", "describe", "delete"]
    finally:
        launcher.kill()
        launcher.wait()
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith(f"error: {last}")


def test_a_launcher_that_is_told_to_stop_while_it_runs_makes_no_new_pod(gcloud, tmp_path):
    ready = tmp_path / "ready"
    gcloud.add("gcloud", GCLOUD.replace('print("a line of the run", flush=True)', HANGS.format(str(ready))))
    threading.Thread(target=when, args=(ready, lambda: os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()
    assert tpu_pod.main([*POD, "--", "doctor"]) == 75
    assert actions(gcloud) == [*ONE, "delete"]


def when(file: Path, act: Callable[[], object]) -> None:
    """Acts when the file is there."""
    while not file.exists():
        time.sleep(0.02)
    act()


def test_retries_are_counted(gcloud):
    (gcloud.folder / "codes").write_text("75 75 75")
    assert tpu_pod.main([*POD, "--retries", "1", "--", "doctor"]) == 75
    assert actions(gcloud) == [*ONE, "delete"] * 2


def test_a_run_that_fails_is_not_tried_again(gcloud, capsys):
    (gcloud.folder / "codes").write_text("2")
    assert tpu_pod.main([*POD, "--", "doctor"]) == 2
    assert actions(gcloud) == [*ONE, "describe", "delete"]


def test_a_pod_that_cannot_be_had_is_deleted_too(gcloud, capsys):
    (gcloud.folder / "states").write_text("ACCEPTED FAILED")
    with pytest.raises(ChildProcessError, match="run-1 is FAILED: look at it with gcloud compute tpus"):
        tpu_pod.main([*POD, "--", "doctor"])
    assert actions(gcloud) == ["create", "describe", "describe", "delete"]
    gcloud.file.unlink()
    (gcloud.folder / "created").write_text("1")
    with pytest.raises(
        ChildProcessError,
        match=r"^gcloud compute .* create run-1 failed \(exit code 1\): it said nothing$",
    ):
        tpu_pod.main([*POD, "--", "doctor"])
    assert actions(gcloud) == ["create"]  # what this did not make it does not delete


def test_a_pod_may_be_kept_and_have_several_slices(gcloud, capsys):
    assert tpu_pod.main([*POD, "--keep", "--slices", "4", "--setup", "make install", "--", "doctor"]) == 0
    assert actions(gcloud) == ONE
    assert "--node-count=4" in gcloud.words[0] and not any("--node-id" in word for word in gcloud.words[0])
    prepare = gcloud.words[3][-3]
    assert prepare.startswith("--command=rm -rf ctx_jax && mkdir ctx_jax && tar -xzf ctx_jax.tar.gz -C ctx_jax && cd ")
    assert prepare.endswith(" && cd ctx_jax && make install")
    assert "run-1 is left; gcloud compute tpus queued-resources delete run-1 --force" in capsys.readouterr().err


def test_what_is_shown_does_the_same(gcloud, capsys, nasty):
    assert tpu_pod.main([*POD, "--", *nasty]) == 0
    calls = gcloud.words
    gcloud.file.unlink()
    capsys.readouterr()
    assert tpu_pod.main([*POD, "--dry-run", "--", *nasty]) == 0
    assert gcloud.calls == []
    lines = capsys.readouterr().out
    subprocess.run(["bash", "-c", lines], check=True, capture_output=True)
    shown = gcloud.words
    for code in ("3", "75"):
        (gcloud.folder / "codes").write_text(code)
        done = subprocess.run(["bash", "-c", lines], capture_output=True)
        assert done.returncode == int(code) and actions(gcloud)[-2:] == ["run", "delete"]
        assert copied(gcloud) == COPIED  # not the archive itself, which lies there by now
    local_archive = [[re.sub(r"^/.*/ctx_jax.tar.gz$", "ctx_jax.tar.gz", word) for word in words] for words in calls]
    assert shown == local_archive
