"""A launcher's command line: what is wrong is one line, and text that a shell reads is what was meant."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ctx_jax.options import UsageError
from launch import gke, local, slurm, tpu_pod
from launch.command import output_of, parsed, run, with_input
from launch.slurm import Slurm


@pytest.mark.parametrize(
    ("main", "line", "message"),
    [
        (slurm.main, "", "nothing to run: put the command after the options"),
        (slurm.main, "--nodes 2 --", "nothing to run"),
        (slurm.main, "--nodse 2 -- train gpt:tiny", "unknown option --nodse; did you mean '--nodes'?"),
        (slurm.main, "train gpt:tiny", "'train' belongs to no option"),
        (slurm.main, "--nodes 0 -- train gpt:tiny", "--nodes 0: choose 1 or more"),
        (slurm.main, "--name a/b -- train gpt:tiny", "--name 'a/b' cannot name a log file"),
        (local.main, "-- trian gpt:tiny", "unknown command 'trian'; did you mean 'train'?"),
        (local.main, "--processes none -- train gpt:tiny", "--processes: invalid literal for int"),
        (local.main, "--gpus 1 --cpu-devices 1 -- train gpt:tiny", "--cpu-devices and --gpus: choose one"),
        (tpu_pod.main, "--name a -- train gpt:tiny", "--zone"),
        (tpu_pod.main, "--name A;b --zone z --accelerator v4-8 -- train x", "--name 'A;b': choose lower-case letters"),
        (gke.main, "--name a --image i --accelerator t --topology 4 -- train x", "--topology '4': write the chips"),
        (gke.main, "--name a --image i --accelerator t --topology 1x1 -- train x", "1 chips, no multiple of --chips 4"),
    ],
)
def test_mistakes_are_one_line(main, line, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launcher", *line.split()])
    with pytest.raises(SystemExit) as exit:
        run(main)
    shown = capsys.readouterr()
    assert exit.value.code == 2 and shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and message in shown.err


def test_options_end_at_the_first_dashes():
    options, words = parsed(Slurm, ["--nodes", "2", "--", "train", "--", "--nodes"], "launch.slurm")
    assert options == Slurm(nodes=2) and words == ["train", "--", "--nodes"]
    with pytest.raises(UsageError):
        parsed(Slurm, ["--nodes", "2"], "launch.slurm")


def test_input_reaches_a_command_to_the_letter(nasty):
    text = "\n".join([*nasty, "END", "$HOME `id` \\", "END_"])
    echo = [sys.executable, "-c", "import json, sys; print(json.dumps([sys.argv[1:], sys.stdin.read()]))", *nasty]
    done = subprocess.run(["bash", "-c", with_input(echo, text)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [nasty, text + "\n"]


def test_a_program_that_is_not_there_or_fails(programs):
    with pytest.raises(ChildProcessError, match="no program 'no-such-program' here: install it, or give --dry-run"):
        output_of(["no-such-program"])
    programs.add("sbatch", "sys.exit(print('no such partition', file=sys.stderr) or 1)")
    with pytest.raises(ChildProcessError, match=r"sbatch failed \(exit code 1\): no such partition"):
        output_of(["sbatch", "--parsable"])
