"""Which experiments a sweep has and what they are called; what runs, what goes on, and what is left out."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ctx_jax.cli import main
from ctx_jax.data.corpora import Mixture, TextFiles
from ctx_jax.experiment import find, load, save
from ctx_jax.identity import fingerprint
from ctx_jax.objectives.causal import Causal
from ctx_jax.runs import alone
from ctx_jax.signals import Interrupted, Preempted
from ctx_jax.training.checkpoints import find_checkpoint
from launch import sweep, sweep_command
from launch.sweep import chain, grid, planned
from launch.sweep_command import RESULTS, Sweep
from tests.tiny import STEPS, smaller

RATE, SEED = "optimizer.schedule.rate", "training.seed"


@pytest.fixture(scope="module")
def tiny():
    return find("gpt:tiny")


def points(variants) -> list[tuple[float, int]]:
    return [(each.experiment.optimizer.schedule.rate, each.experiment.training.seed) for each in variants]


def test_a_grid_has_every_combination(tiny):
    made = grid(tiny, {RATE: (1e-3, 2e-3), SEED: range(3)})
    assert points(made) == [(1e-3, 0), (1e-3, 1), (1e-3, 2), (2e-3, 0), (2e-3, 1), (2e-3, 2)]
    assert made[1].changes == ((RATE, 1e-3), (SEED, 1))
    assert {replace(each.experiment, optimizer=tiny.optimizer, training=tiny.training) for each in made} == {tiny}


def test_zip_takes_values_together_and_chain_one_after_the_other(tiny):
    zipped = sweep.zip(tiny, {RATE: (1e-3, 2e-3), SEED: (7, 8)})
    assert points(zipped) == [(1e-3, 7), (2e-3, 8)]
    assert points(chain(grid(tiny, {SEED: (1,)}), zipped)) == [(tiny.optimizer.schedule.rate, 1), *points(zipped)]
    crossed = grid(zipped, {SEED: (0, 1)})
    assert points(crossed) == [(1e-3, 0), (1e-3, 1), (2e-3, 0), (2e-3, 1)]
    with pytest.raises(ValueError, match=r"zip needs as many values of each field, not .*rate 2, training.seed 1"):
        sweep.zip(tiny, {RATE: (1e-3, 2e-3), SEED: (7,)})


def test_fields_that_fit_only_together_change_together(tiny):
    made = sweep.zip(tiny, {"model.heads": (3, 5), "model.width": (48, 80)})
    assert [(each.experiment.model.heads, each.experiment.model.width) for each in made] == [(3, 48), (5, 80)]


def test_whole_parts_and_parts_of_tuples_can_be_varied(tiny):
    made = grid(tiny, {"objective": (Causal(),), "training.evaluate_batches": (None, 3)})
    assert [each.experiment.training.evaluate_batches for each in made] == [None, 3]
    corpus = Mixture((TextFiles(Path("a")), TextFiles(Path("b"))), weights=(1, 2))
    mixed = replace(tiny, data=replace(tiny.data, corpus=corpus))
    (first, second) = grid(mixed, {"data.corpus.corpora.1.path": (Path("c"), "d")})
    assert [part.path for part in first.experiment.data.corpus.corpora] == [Path("a"), Path("c")]
    assert second.experiment.data.corpus.corpora[1].path == Path("d")
    with pytest.raises(ValueError, match="the tuple has no field '2'"):
        grid(mixed, {"data.corpus.corpora.2.path": ("c",)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"training.sed": (1,)}, "training.sed: Training has no field 'sed'; did you mean 'seed'?"),
        ({"trainig.seed": (1,)}, "trainig.seed: Experiment has no field 'trainig'; did you mean 'training'?"),
        ({"training.seed.x": (1,)}, "training.seed.x: training.seed is 0, which has no fields"),
        ({"training.steps": ("many",)}, "training.steps: 'many' is not of type int"),
        ({"training.steps": (1.5,)}, "training.steps: 1.5 is not of type int"),
        ({"training.steps": (True,)}, "training.steps: True is not of type int"),
        ({"training.steps": ([1],)}, r"training.steps: \[1\] cannot stand in an experiment"),
        ({"training.steps": (0,)}, "training steps 0: choose 1 or more"),
        ({"training.steps": 5}, "training.steps: 5 is one value: give several, as a tuple"),
        ({"model.dtype": "float32"}, "model.dtype: 'float32' is one value"),
        (["training.steps"], r"the fields are \['training.steps'\]: give a dict of dotted fields and their values"),
        ({1: (2,)}, "the fields are {1: .2,.}: give a dict"),
        ({"training.steps": ()}, "training.steps: give one value or more"),
        ({"model.heads": (3,)}, "heads 3 does not divide width 128"),
        ({"data.reader": (3,)}, "data.reader 3 has no passes"),
    ],
)
def test_a_wrong_field_or_value_is_named(tiny, fields, message):
    with pytest.raises(ValueError, match=message):
        grid(tiny, fields)


FILE = """
from dataclasses import replace
from ctx_jax.experiment import find
from launch import sweep

def rates():
    return sweep.grid(find("gpt:tiny"), {"optimizer.schedule.rate": (1e-3, 2e-3), "training.seed": (0, 1)})
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_names_say_what_varies_and_do_not_change(file, tiny):
    folder, plans = planned("mine.py:rates")
    assert folder == Path("runs/sweeps/mine-rates") and planned("mine.py")[0] == Path("runs/sweeps/mine")
    assert [plan.name for plan in plans] == [f"rate={rate},seed={seed}" for rate in (0.001, 0.002) for seed in (0, 1)]
    assert [plan.fingerprint for plan in plans] == [fingerprint(plan.experiment) for plan in plans]
    assert len({plan.fingerprint for plan in plans}) == 4
    assert plans[0].folder == folder / f"rate=0.001,seed=0-{plans[0].fingerprint}"
    # Another value more leaves the others where they were.
    file.write_text(FILE.replace("2e-3)", "2e-3, 4e-3)"))
    assert [plan.folder for plan in planned("mine.py:rates")[1]][:4] == [plan.folder for plan in plans]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data.reader.length": 64, "model.max_length": 128}, "length=64,max_length=128"),
        ({"a.reader.length": 64, "b.reader.length": 32}, "a.reader.length=64,b.reader.length=32"),
        ({"objective": Causal()}, "objective=Causal"),
        ({"data.corpus.path": "/some/where/a text; rm -rf *.txt"}, "path=a_text_rm_-rf_.txt"),
        ({"x.betas": (0.9, 1e-05), "y": None}, "betas=0.9+1e-05,y=None"),
        ({"x": "/"}, "x=_"),
        ({"x": "long" * 100}, "x=" + ("long" * 100)[:148]),
        ({"x": "ä" * 200}, "x=" + "ä" * 74),
        ({"x": "a" + "語" * 200}, "x=a" + "語" * 49),
        ({}, "gpt-tiny"),
    ],
)
def test_names_are_short_and_fit_to_be_folders(tiny, changes, name):
    assert sweep.called_by(sweep.Variant(tiny, tuple(changes.items()))) == name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[find('gpt:tiny')] * 2", "mine.py returned gpt-tiny (.*) twice"),
        ("[]", "mine.py returned no experiments"),
        ("3", "a sweep is made of experiments, not of int"),
        (
            "sweep.grid(find('gpt:tiny'), {'training.sed': (1,)})",
            "experiment 'mine.py' failed, mine.py line 7: training.sed",
        ),
    ],
)
def test_a_file_that_is_wrong(file, line, message, capsys):
    file.write_text(FILE.partition("return")[0] + "return " + line)
    with pytest.raises(SystemExit) as exit:
        main(["sweep", "mine.py"])
    shown = capsys.readouterr().err
    assert exit.value.code == 2 and shown.startswith("error: ") and shown.count("\n") == 1
    assert re.search(message, shown) and not Path("runs").exists()


RUN = """
import json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
seed = json.loads((folder / "experiment.json").read_text())["training"]["seed"]
(folder / "starts").open("a").write("x")
print("working", file=sys.stderr)
exec((Path(sys.argv[0]).parent / "behaviour.py").read_text())
print(json.dumps({"run": str(folder), "step": 600, "loss": 3.0 + seed, "evaluation": {"loss": 4.0 + seed}}))
"""


@pytest.fixture
def behaviour(program, monkeypatch, tmp_path):
    """Puts a few lines of Python in place of training; they see `folder` and `seed`."""
    command = program(RUN)
    (tmp_path / "behaviour.py").write_text("")
    monkeypatch.setattr(sweep_command, "train", lambda plan: [*command, str(plan.folder)])
    return (tmp_path / "behaviour.py").write_text


def starts(plans) -> list[int]:
    return [len((plan.folder / "starts").read_text()) if (plan.folder / "starts").exists() else 0 for plan in plans]


def test_finished_runs_are_left_out_and_failed_ones_retried_on_request(file, behaviour, capsys):
    behaviour("if seed == 1: sys.exit(print('the loss is nan', file=sys.stderr) or 1)")
    with pytest.raises(
        ChildProcessError, match=r"2 of 4 runs .*; rate=0.001,seed=1: the loss is nan; --retry-failed runs it again"
    ):
        sweep_command.run("mine.py:rates", Sweep(jobs=2))
    folder, plans = planned("mine.py:rates")
    assert [plan.state for plan in plans] == ["finished", "failed"] * 2 and starts(plans) == [1, 1, 1, 1]
    recorded = [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]
    about = {"name": "rate=0.001,seed=0", "fingerprint": plans[0].fingerprint, "state": "finished"}
    values = {"step": 600, "loss": 3.0, "evaluation": {"loss": 4.0}, "run": str(plans[0].folder)}
    assert recorded[0] == {**about, **values}
    assert recorded[1]["state"] == "failed" and "loss" not in recorded[1]
    assert [load(plan.folder / "experiment.json") for plan in plans] == [plan.experiment for plan in plans]

    behaviour("")
    with pytest.raises(ChildProcessError, match="2 of 4 runs are not finished"):
        sweep_command.run("mine.py:rates", Sweep())
    assert starts(plans) == [1, 1, 1, 1]
    capsys.readouterr()
    result = sweep_command.run("mine.py:rates", Sweep(retry_failed=True))
    assert starts(plans) == [1, 2, 1, 2]
    counts = {"sweep": str(folder), "finished": 4, "failed": 0, "left": 0}
    assert {name: result[name] for name in counts} == counts
    assert result["results"] == [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]
    table = capsys.readouterr().err
    rows = [
        line.split()[:5] for line in table.splitlines() if "rate=" in line and "finished " in line and ":" not in line
    ]
    assert rows[0] == ["rate=0.001,seed=0", "finished", "600", "3.0000", "4.0000"] and len(rows) == 4


def test_a_real_run_gives_its_result(tmp_path, monkeypatch, speeches, folder, capsys):
    monkeypatch.chdir(tmp_path)
    save(smaller("gpt", speeches, folder, evaluate_batches=1), Path("base.json"))
    line = 'return sweep.grid(find("base.json"), {"training.seed": (0,)})'
    Path("mine.py").write_text(FILE.partition("return")[0] + line)
    main(["sweep", "mine.py"])
    result = json.loads(capsys.readouterr().out)
    (record,), (plan,) = result["results"], planned("mine.py")[1]
    assert (record["name"], record["state"], record["step"]) == ("seed=0", "finished", STEPS)
    assert 3 < record["evaluation"]["loss"] < 7 and find_checkpoint(plan.folder)[1] == STEPS
    main(["sweep", "mine.py"])
    assert json.loads(capsys.readouterr().out)["results"] == result["results"]


def test_so_many_run_at_a_time(file, behaviour, tmp_path):
    behaviour(
        f"beside, begun = (Path({str(tmp_path)!r}) / name for name in ('beside', 'begun'))\n"
        "for each in (beside, begun): each.mkdir(exist_ok=True); (each / str(os.getpid())).touch()\n"
        "while len(list(begun.iterdir())) < 3: time.sleep(0.02)\n"
        "time.sleep(0.3); (folder / 'most').write_text(str(len(list(beside.iterdir()))))\n"
        "(beside / str(os.getpid())).unlink()"
    )
    sweep_command.run("mine.py:rates", Sweep(jobs=3))
    most = [int((plan.folder / "most").read_text()) for plan in planned("mine.py:rates")[1]]
    assert max(most) == 3


@pytest.mark.parametrize(
    ("number", "code", "error"), [(signal.SIGINT, 130, Interrupted), (signal.SIGTERM, 75, Preempted)]
)
def test_a_sweep_that_is_stopped_goes_on(file, behaviour, number, code, error):
    """The runs that were begun get the signal and save; the others are not begun."""
    behaviour(
        f"import signal\nsignal.signal({int(number)}, lambda *_: sys.exit({code}))\n"
        "(folder / 'ready').touch()\nif len((folder / 'starts').read_text()) == 1: time.sleep(60)"
    )
    _, plans = planned("mine.py:rates")

    def interrupt() -> None:
        while not all((plan.folder / "ready").exists() for plan in plans[:2]):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(error, match="the same command goes on"):
        sweep_command.run("mine.py:rates", Sweep(jobs=2))
    assert [plan.state for plan in plans] == ["unfinished"] * 2 + ["waiting"] * 2 and starts(plans) == [1, 1, 0, 0]
    behaviour("")
    sweep_command.run("mine.py:rates", Sweep(jobs=2))
    assert [plan.state for plan in plans] == ["finished"] * 4 and starts(plans) == [2, 2, 1, 1]


def test_what_another_command_runs_is_left_alone(file, behaviour):
    """As after the sweep itself was killed: its runs may live on."""
    _, plans = planned("mine.py:rates")
    save(plans[0].experiment, plans[0].folder / "experiment.json")
    with alone(plans[0].folder), pytest.raises(ChildProcessError, match=r"1 of 4 .*; rate=0.001,seed=0: running"):
        sweep_command.run("mine.py:rates", Sweep())
    assert starts(plans) == [0, 1, 1, 1]
    sweep_command.run("mine.py:rates", Sweep())
    assert starts(plans) == [1, 1, 1, 1]


def test_for_other_launchers_it_prints_the_commands(file, capsys):
    main(["sweep", "mine.py:rates", "--launcher", "print", "--folder", "it's; here"])
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["left"] == 4 and len(result["commands"]) == 4
    _, plans = planned("mine.py:rates", Path("it's; here"))
    for plan, command in zip(plans, result["commands"], strict=True):
        assert command in shown.err
        words = shlex.split(command)[1:]
        assert words == ["-m", "ctx_jax", "train", str(plan.folder / "experiment.json"), "--run", str(plan.folder)]
        assert load(plan.folder / "experiment.json") == plan.experiment and plan.state == "waiting"


def test_what_another_launcher_has_finished_is_left_out(file, tiny, capsys):
    """Its folder says so: the last step is saved and evaluated."""
    _, (plan, *others) = planned("mine.py:rates")
    steps = tiny.training.steps
    for step, last, state in (
        (steps - 1, {"train": steps - 1}, "unfinished"),
        (steps, {"train": steps, "evaluation": steps - 1}, "unfinished"),
        (steps, {"train": steps, "evaluation": steps}, "finished"),
    ):
        metrics = {kind: {"step": at, "kind": kind, "loss": 2.5, "tokens_per_second": 9} for kind, at in last.items()}
        record = plan.folder / "checkpoints" / str(step) / "record"
        record.mkdir(parents=True, exist_ok=True)
        (record / "metadata").write_text(json.dumps({"metrics": metrics}))
        assert plan.state == state
    result = sweep_command.run("mine.py:rates", Sweep(launcher="print"))
    assert (result["finished"], result["left"], len(result["commands"])) == (1, 3, 3)
    assert result["results"][0]["evaluation"] == {"loss": 2.5} and result["results"][0]["step"] == steps
    with alone(others[0].folder):
        assert others[0].state == "running"
    (plan.folder / "exit_code").write_text("1")  # of an earlier attempt
    assert plan.state == "finished"


def test_a_run_whose_checkpoints_are_lost_has_failed_and_the_others_go_on(file, behaviour, capsys):
    _, (plan, *others) = planned("mine.py:rates")
    plan.folder.mkdir(parents=True)
    (plan.folder / "latest").write_text("7")
    with pytest.raises(ChildProcessError, match=r"1 of 4 .*seed=0: .* was saved at step 7, but no checkpoint is left"):
        sweep_command.run("mine.py:rates", Sweep())
    assert [each.state for each in (plan, *others)] == ["failed", *["finished"] * 3] and starts(others) == [1, 1, 1]
    result = sweep_command.run("mine.py:rates", Sweep(launcher="print"))
    assert (result["failed"], result["left"], result["commands"]) == (1, 0, [])
    assert "was saved at step 7" in result["results"][0]["error"] and "error" not in result["results"][1]
    assert capsys.readouterr().err.count("rate=0.001,seed=0: runs/sweeps") == 2
    (plan.folder / "exit_code").write_text("0")  # what is finished needs no checkpoint
    assert "error" not in sweep_command.run("mine.py:rates", Sweep())["results"][0]


@pytest.mark.parametrize("text", ["", "3\n", "[1]\n", "null\n", "{\n"])
def test_a_result_that_is_none(file, text):
    _, (plan, *_) = planned("mine.py:rates")
    plan.folder.mkdir(parents=True)
    (plan.folder / "result.json").write_text(text)
    (plan.folder / "exit_code").write_text("0")
    assert plan.result == {} and plan.state == "finished"
    assert sweep_command.run("mine.py:rates", Sweep(launcher="print"))["finished"] == 1


def test_on_slurm_it_is_one_array_of_what_is_left(file, behaviour, programs, capsys, tmp_path):
    programs.add("sbatch", "print('41')")
    programs.add("squeue")
    _, plans = planned("mine.py:rates")
    plans[1].folder.mkdir(parents=True)
    (plans[1].folder / "exit_code").write_text("0\n")
    options = Sweep(launcher="slurm", jobs=2, slurm=replace(Sweep().slurm, time="60", partition="big"))
    dry = sweep_command.run("mine.py:rates", replace(options, slurm=replace(options.slurm, dry_run=True)))
    assert programs.calls == []
    result = sweep_command.run("mine.py:rates", options)
    assert (result["job"], result["finished"], result["left"]) == ("41", 1, 3)
    asked, submitted = programs.calls
    assert asked["argv"] == ["squeue", "--me", "--noheader", "--format=%F", "--name=mine-rates"]
    assert {"--job-name=mine-rates", "--array=0-2%2", "--time=60", "--partition=big"} <= set(submitted["argv"])
    subprocess.run(["bash", "-c", dry["script"]], check=True, capture_output=True)
    assert programs.calls[2:] == [submitted]  # the dry run showed the same
    # What a node does with it.
    programs.add("srun", "os.execvp('bash', ['bash', '-c', '\"$@\"', *sys.argv[sys.argv.index('--wait=60'):]])")
    for task in range(3):
        variables = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_ID": "41"}
        subprocess.run(["bash", "-c", submitted["stdin"]], check=True, env=variables, stdin=subprocess.DEVNULL)
    assert [plan.state for plan in plans] == ["finished"] * 4 and starts(plans) == [1, 0, 1, 1]
    assert plans[2].result["loss"] == 3.0
    assert "job" not in sweep_command.run("mine.py:rates", options)  # nothing is left


def test_a_sweep_that_is_in_the_queue_is_not_submitted_again(file, programs):
    programs.add("sbatch", "print('41')")
    programs.add("squeue", "print('40\\n40')")
    with pytest.raises(ValueError, match="mine-rates is in the queue as job 40: wait for it, or scancel it first"):
        sweep_command.run("mine.py:rates", Sweep(launcher="slurm"))
    assert [words[0] for words in programs.words] == ["squeue"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sweep", "sweep needs FILE.py[:function] before any option"),
        ("sweep no.py", "there is no file no.py"),
        ("sweep mine.py:rate", "unknown experiment 'mine.py:rate'; did you mean 'rates'?"),
        ("sweep mine.py --launcher slrum", "invalid choice 'slrum'"),
        ("sweep mine.py --jobs 0", "--jobs 0: choose 1 or more"),
        ("sweep mine.py --slurm.nodse 1", "unknown option --slurm.nodse; did you mean '--slurm.nodes'?"),
    ],
)
def test_mistakes_on_the_command_line(file, arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments.split())
    shown = capsys.readouterr().err
    assert exit.value.code == 2 and message in shown and shown.count("\n") == 1
