"""What Slurm is told, and what the script does on a node; tests/slurm does it on a real one."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launch import slurm
from launch.slurm import Slurm, sbatch, script

SRUN = "os.execvp('bash', ['bash', '-c', '\"$@\"', *sys.argv[sys.argv.index('--wait=60'):]])"
"""Runs the words behind srun's own options."""


def test_a_job_is_submitted_with_every_option(programs, tmp_path, monkeypatch, capsys, nasty):
    monkeypatch.chdir(tmp_path)
    programs.add("sbatch", "print('17;cluster')")
    options = (
        "--nodes 4 --gpus 8 --cpus 12 --memory 64G --time 1-00:00:00 --partition big --account us --signal 300 "
        "--options exclusive mail-type=END"
    ).split()
    arguments = ["--name", "a b; 'c'", *options, "--setup", "module load cuda", "--", *nasty]
    assert slurm.main(arguments) == 0 and capsys.readouterr().out == "17\n"
    (call,) = programs.calls
    assert call["argv"] == [
        "sbatch",
        "--parsable",
        "--requeue",
        "--job-name=a b; 'c'",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=12",
        "--mem=64G",
        "--time=1-00:00:00",
        "--partition=big",
        "--account=us",
        "--signal=USR1@300",
        f"--chdir={tmp_path}",
        f"--output={tmp_path}/runs/slurm/%x-%j.log",
        "--open-mode=append",
        "--exclusive",
        "--mail-type=END",
    ]
    assert "\nmodule load cuda\n" in call["stdin"] and (tmp_path / "runs/slurm").is_dir()
    assert slurm.main(["--dry-run", *arguments]) == 0
    assert len(programs.calls) == 1  # nothing was submitted
    subprocess.run(["bash", "-c", capsys.readouterr().out], check=True, capture_output=True)
    assert programs.calls == [call, call]  # and what was printed submits the same


def test_without_gpus_or_a_limit_little_is_said():
    command = sbatch(Slurm(), jobs=1)
    assert [word for word in command if "gpu" in word or "signal" in word or "array" in word or "time" in word] == []
    assert "--ntasks-per-node=1" in command
    assert "--array=0-4%2" in sbatch(Slurm(), jobs=5, at_once=2)
    assert any(word.endswith("/%x-%A_%a.log") for word in sbatch(Slurm(), jobs=5))
    assert "--output=/a%%b/%x-%j.log" in sbatch(Slurm(logs=Path("/a%b")), jobs=1)


def ran(text: str, **environment: str) -> int:
    variables = {**os.environ, "SLURM_JOB_ID": "17", **environment}
    return subprocess.run(["bash", "-c", text], env=variables, stdin=subprocess.DEVNULL, capture_output=True).returncode


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (0, "RUNNING/None", 0, False),
        (1, "RUNNING/None", 0, False),
        (137, "RUNNING/None", 0, False),
        (75, "RUNNING/None", 0, True),
        (143, "RUNNING/None", 0, True),
        (75, "COMPLETING/TimeLimit", 2, True),
        (75, "COMPLETING/None", 0, False),  # scancel
        (75, "RUNNING/None", 3, False),
    ],
)
def test_only_what_was_preempted_goes_back_into_the_queue(programs, code, state, restarts, requeued):
    programs.add("srun", SRUN)
    programs.add("squeue", f"print({state!r})")
    programs.add("scontrol")
    text = script(replace(Slurm(), requeues=3), [["bash", "-c", f"exit {code}"]])
    assert ran(text, SLURM_RESTART_COUNT=str(restarts)) == code
    requeues = [words for words in programs.words if words[0] == "scontrol"]
    assert requeues == [["scontrol", "requeue", "17"]] * requeued


def test_the_words_of_each_job_of_an_array_arrive_as_they_are(programs, program, tmp_path, nasty):
    programs.add("srun", SRUN)
    programs.add("squeue")
    echo = program("print('warming up')\nprint(json.dumps(sys.argv[1:]))\nsys.exit(len(sys.argv) - 2)")
    folders = [tmp_path / "it's; $HOME", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "exit_code").write_text("5")
    text = script(Slurm(), [[*echo, *nasty], [*echo, "two"]], folders)
    assert ran(text, SLURM_ARRAY_TASK_ID="0") == len(nasty) - 1
    assert json.loads((folders[0] / "result.json").read_text().splitlines()[-1]) == nasty
    assert (folders[0] / "exit_code").read_text() == f"{len(nasty) - 1}\n"
    assert list(folders[1].iterdir()) == []
    assert ran(text, SLURM_ARRAY_TASK_ID="1") == 0
    assert json.loads((folders[1] / "result.json").read_text().splitlines()[-1]) == ["two"]
    assert (folders[1] / "exit_code").read_text() == "0\n"
