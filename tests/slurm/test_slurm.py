"""Jobs on a real Slurm of one node: several tasks, an array, and one that is preempted, requeued and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ctx_jax import runs
from ctx_jax.experiment import Experiment, save
from ctx_jax.training.metrics import FILE, read_metrics
from launch import slurm
from launch.slurm import Slurm, sbatch, script
from tests.tiny import STEPS, smaller

PROGRAM = "import json, os, signal, sys, time\nfrom pathlib import Path\n"


def state(job: str) -> str:
    """Of a job in the queue; "" when it has left it."""
    asked = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, subprocess.run(["squeue"], capture_output=True, text=True).stdout
        time.sleep(0.5)


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """Submits a program of a few lines of Python, and gives the number of the job."""
    monkeypatch.chdir(tmp_path)
    jobs = []

    def submit(text: str, *words: str, **options) -> str:
        path = tmp_path / f"program{len(jobs)}.py"
        path.write_text(PROGRAM + text)
        chosen = Slurm(name="it's a; $(test)", logs=tmp_path / "logs", time="5", **options)
        command = [sys.executable, str(path), *words]
        jobs.append(slurm.submit(chosen, sbatch(chosen, 1), script(chosen, [command])))
        return jobs[-1]

    yield submit
    for job in jobs:
        subprocess.run(["scancel", job], check=True)


def log(tmp_path: Path, job: str) -> str:
    return (tmp_path / f"logs/it's a; $(test)-{job}.log").read_text()


def test_two_tasks_compute_one_sum(submit, tmp_path):
    job = submit(
        "import jax\nimport numpy as np\nfrom jax.experimental.multihost_utils import process_allgather\n"
        "jax.distributed.initialize()\n"
        "print('seen', process_allgather(np.array([10 + jax.process_index()])).ravel().tolist(), sys.argv[1:])",
        "a b'; $HOME",
        tasks=2,
    )
    until(lambda: not state(job))
    assert log(tmp_path, job).count('seen [10, 11] ["a b\'; $HOME"]') == 2


STOPPABLE = """
folder = Path(sys.argv[1])
count = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
def stop(number, _):
    (folder / f"saved-{os.environ['SLURM_PROCID']}").write_text(str(number))
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, stop)
(folder / f"begun-{count}-{os.environ['SLURM_PROCID']}").touch()
if count == 0:
    time.sleep(100)
print("went on from", (folder / f"saved-{os.environ['SLURM_PROCID']}").read_text())
"""


def test_a_preempted_job_is_requeued_and_goes_on(submit, tmp_path):
    job = submit(STOPPABLE, str(tmp_path), tasks=2)
    until(lambda: len(list(tmp_path.glob("begun-0-*"))) == 2)
    subprocess.run(["scancel", "--signal=USR1", job], check=True)  # to the tasks, as --signal does
    until(lambda: state(job) == "PENDING")
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)  # not after two minutes
    until(lambda: not state(job))
    assert log(tmp_path, job).count("went on from 10\n") == 2


def test_a_cancelled_job_stays_cancelled(submit, tmp_path):
    job = submit(STOPPABLE, str(tmp_path), tasks=1)
    until(lambda: len(list(tmp_path.glob("begun-0-*"))) == 1)
    subprocess.run(["scancel", job], check=True)
    until(lambda: not state(job))
    assert (tmp_path / "saved-0").exists() and not list(tmp_path.glob("begun-1-*"))


def test_a_job_that_fails_is_not_requeued(submit, tmp_path):
    job = submit("print('lost'); sys.exit(2)", tasks=2)
    until(lambda: not state(job))
    assert log(tmp_path, job).count("lost") == 2


@pytest.fixture
def trained(tmp_path, monkeypatch, speeches, folder):
    """Submits the training of a small experiment in two tasks; gives the number of the job."""
    monkeypatch.chdir(tmp_path)

    def trained(experiment: Experiment, run: str) -> str:
        save(experiment, Path(f"{run}.json"))
        words = ["train", f"{run}.json", "--run", run]
        command = [sys.executable, "-m", "launch.slurm", "--tasks", "2", "--time", "10", "--logs", "logs", "--", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return trained


def losses(run: str) -> dict[int, float]:
    """Of each step; one that was done twice must have given the same."""
    found: dict[int, float] = {}
    for record in read_metrics(Path(run)):
        if record["kind"] == "train":
            assert found.setdefault(record["step"], record["loss"]) == record["loss"]
    return found


def test_a_run_of_two_tasks_is_the_run_of_one(trained, speeches, folder):
    experiment = smaller("gpt", speeches, folder, evaluate_batches=1)
    job = trained(experiment, "it's two; $(tasks)")
    until(lambda: not state(job))
    runs.train(experiment, Path("one"))
    two, one = losses("it's two; $(tasks)"), losses("one")
    assert list(two) == list(one) == list(range(1, STEPS + 1))
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)


def test_a_preempted_run_is_requeued_and_ends_as_if_it_had_not_been(trained, speeches, folder):
    """Its first part is told to end as before a time limit, its second as by a preemption."""
    experiment = smaller("transformer_xl", speeches, folder, steps=120, evaluate_batches=1)
    job = trained(experiment, "undisturbed")
    until(lambda: not state(job), 300)
    job = trained(experiment, "preempted")
    for notice, step in (("USR1", 10), ("TERM", 60)):
        until(lambda step=step: len(losses_so_far("preempted")) >= step, 300)
        subprocess.run(["scancel", f"--signal={notice}", job], check=True)
        until(lambda: state(job) == "PENDING")
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
    until(lambda: not state(job), 300)
    said = Path(f"logs/ctx_jax-{job}.log").read_text()
    assert said.count("preempted: goes on after step") == 2
    assert losses("preempted") == losses("undisturbed") and len(losses("undisturbed")) == 120


def losses_so_far(run: str) -> list[str]:
    file = Path(run) / FILE
    return [line for line in file.read_text().splitlines() if '"train"' in line] if file.exists() else []


def test_a_sweep_is_an_array(tmp_path, monkeypatch, speeches, folder):
    """Submitted, refused while it is in the queue, and its results shown when it is done."""
    monkeypatch.chdir(tmp_path)
    base = smaller("gpt", speeches, folder, evaluate_batches=1)
    save(replace(base, training=replace(base.training, seed=9)), Path("base.json"))
    Path("mine.py").write_text(
        "from ctx_jax.experiment import find\nfrom launch import sweep\n"
        "def seeds():\n    return sweep.grid(find('base.json'), {'training.seed': (0, 1, 2)})\n"
    )
    command = [sys.executable, "-m", "ctx_jax", "sweep", "mine.py", "--launcher", "slurm", "--slurm.time", "10"]
    submitted = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert submitted["left"] == 3 and submitted["job"].isdecimal()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and f"mine is in the queue as job {submitted['job']}" in again.stderr
    until(lambda: not state(submitted["job"]), 300)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout)
    assert (result["finished"], result["left"]) == (3, 0) and "job" not in result
    assert [record["step"] for record in result["results"]] == [STEPS] * 3
    assert len({record["loss"] for record in result["results"]}) == 3
    assert len([line for line in done.stderr.splitlines() if "finished" in line]) == 3
