"""Whole runs: interrupted, killed, continued, diverging; always the real loader, orbax and metrics file."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import pytest

from ctx_jax.parallel.mesh import Mesh
from ctx_jax.signals import Interrupted
from ctx_jax.training import checksums, loop
from ctx_jax.training.checkpoints import Checkpoints, begun, find_checkpoint, saved
from ctx_jax.training.loop import Evaluator, Text, Training
from ctx_jax.training.metrics import TIMES, Diverged, Meter, Metrics, read_metrics
from ctx_jax.training.optimizers import AdamW
from ctx_jax.training.retention import exhausted
from ctx_jax.training.schedules import WarmUp
from ctx_jax.training.state import abstract_state, init_state, variables
from ctx_jax.training.stopping import Watch
from tests.training.fakes import Forgetful, Model, Objective, Rows, Store, assert_equal, make_batch, prepared

MESH = Mesh().build(jax.devices()[:1])
OPTIMIZER = AdamW(WarmUp(rate=1e-2, warmup=2))
TRAINING = Training(steps=6, seed=5, accumulation=2, evaluate_every=4, checkpoint_every=4, log_every=1, keep=2)
PIECES = {
    "model": Model(rate=0.2),
    "objective": Objective(),
    "optimizer": OPTIMIZER,
    "mesh": MESH,
    "text": Text(Store(), Rows()),
    "evaluation_text": Text(Store(rows=20), Rows()),
    "batch_size": 8,
    "training": TRAINING,
    "experiment": {"name": "fake"},
}


def train(run, **changes):
    with Watch() as watch:
        return loop.train(**{**PIECES, "run": run, "watch": watch, **changes})


def final(run, step=6, model=PIECES["model"]):
    abstract = abstract_state(model, OPTIMIZER.build(6), prepared(make_batch()), MESH)
    with Checkpoints(run) as checkpoints:
        return checkpoints.restore(step, abstract)


def lines(run):
    """metrics.jsonl without the fields of time."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in read_metrics(run)]


def interrupt(monkeypatch, *steps, error=None, number=signal.SIGINT):
    """Ctrl-C (or another signal, or an error) when these steps have been dispatched."""
    push = Meter.push

    def pushed(self, step, measured):
        push(self, step, measured)
        if step in steps:
            if error is not None:
                raise error
            signal.raise_signal(number)

    monkeypatch.setattr(Meter, "push", pushed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody disturbs, and its result."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    return run, train(run)


def test_runs_of_other_seeds_share_the_programs(whole, tmp_path):
    """And draw other numbers: the largest seed, too."""
    miss, events = "/jax/compilation_cache/cache_misses", []

    def note(event, **_):
        events.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        losses = {train(tmp_path / str(seed), training=replace(TRAINING, seed=seed))["loss"] for seed in (6, 2**32 - 1)}
        assert miss not in events and len({*losses, whole[1]["loss"]}) == 3
        train(tmp_path / "rate", optimizer=AdamW(WarmUp(rate=2e-2, warmup=2)))
        assert miss in events  # the numbers of a schedule are the program's
    finally:
        jax.monitoring.unregister_event_listener(note)


def test_a_run_leaves_what_it_promises(whole):
    run, result = whole
    assert set(result) == {"run", "step", "loss", "evaluation", "tokens_per_second"}
    assert result["run"] == str(run) and result["step"] == 6 and result["tokens_per_second"] > 0
    assert set(result["evaluation"]) == {"loss", "lm", "row", "accuracy"}
    records = lines(run)
    assert [(line["kind"], line["step"]) for line in records] == [
        ("train", 1), ("train", 2), ("train", 3), ("train", 4), ("evaluation", 4), ("train", 5), ("train", 6),
        ("evaluation", 6),
    ]  # fmt: skip
    assert records[0]["learning_rate"] == 0 and records[-2]["loss"] == result["loss"]
    assert json.dumps(result)
    with Checkpoints(run) as checkpoints:
        assert checkpoints.steps() == [4, 6]
        assert checkpoints.record(6) == {
            "step": 6, "experiment": {"name": "fake"}, "reader_start": 0, "evaluated": True,
            "metrics": {line["kind"]: line for line in read_metrics(run)[-2:]},
        }  # fmt: skip


def test_a_run_learns(whole):
    losses = [line["lm"] for line in lines(whole[0]) if line["kind"] == "evaluation"]
    assert losses[1] < losses[0]


def test_a_finished_run_is_not_run_again(whole):
    run, result = whole
    before = (run / "metrics.jsonl").read_text()
    assert train(run) == result
    assert (run / "metrics.jsonl").read_text() == before


def test_a_finished_run_says_how_it_ended_whatever_became_of_its_metrics(whole, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "run")
    said = {**whole[1], "run": str(run)}
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:-2]
    (run / "metrics.jsonl").write_text("".join(kept))
    assert train(run) == said
    (run / "metrics.jsonl").unlink()
    assert train(run) == said


def test_of_an_older_checkpoint_the_metrics_say_it(whole, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "run")
    file = run / "checkpoints/6/record/metadata"
    file.write_text(json.dumps({"experiment": {"name": "fake"}, "reader_start": 0, "evaluated": True}))
    checksums.write(run / "checkpoints/6")
    assert train(run) == {**whole[1], "run": str(run)}
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:-2]
    (run / "metrics.jsonl").write_text("".join(kept))
    with pytest.raises(ValueError, match=r"run is finished, but its metrics.jsonl does not say with what: evaluate"):
        train(run)


def test_metrics_are_on_disk_before_the_checkpoint_that_follows_from_them(tmp_path, monkeypatch):
    order = []
    write, settle, save = Metrics.write, Metrics.settle, Checkpoints.save
    monkeypatch.setattr(Metrics, "write", lambda self, *line: [order.append(line[:2]), write(self, *line)])
    monkeypatch.setattr(Metrics, "settle", lambda self: [order.append("settle"), settle(self)])
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, *rest: [order.append(step), save(self, step, *rest)])
    train(tmp_path)
    assert order == [
        *(("train", step) for step in (1, 2, 3, 4)), ("evaluation", 4), "settle", 4,
        ("train", 5), ("train", 6), ("evaluation", 6), "settle", 6,
    ]  # fmt: skip


def test_each_thing_that_is_waited_for_before_the_first_step_has_its_own_time(tmp_path, monkeypatch):
    at, told = Watch.at, []
    monkeypatch.setattr(Watch, "at", lambda self, *what: [told.append(what), at(self, *what)])
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        with pytest.raises(Interrupted):
            train(tmp_path)
    compiled = "the first step, which is compiled"
    sums = (0, "the checksums of the newest checkpoint")
    assert told[told.index(sums) :][:4] == [sums, (0, "the first state"), (0, compiled), (1, "step 1")]
    told.clear()
    train(tmp_path)
    assert told[told.index(sums) :][:4] == [sums, (1, "the state of step 1"), (1, compiled), (2, "step 2")]


def test_the_best_step_is_known_without_the_metrics(tmp_path, monkeypatch, capsys):
    losses = {2: 1.0, 4: 3.0, 6: 2.0}
    values = iter(losses.values())
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: {"loss": next(values)})
    training = replace(TRAINING, evaluate_every=2, checkpoint_every=0, keep=1, best="loss")
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(Interrupted):
            train(tmp_path, training=training)
    assert saved(tmp_path) == [2, 5]
    (tmp_path / "metrics.jsonl").unlink()
    assert train(tmp_path, training=training)["evaluation"] == {"loss": 2.0}
    assert "metrics.jsonl has lost lines that it had at step 5" in capsys.readouterr().err
    assert saved(tmp_path) == [2, 6]
    (tmp_path / "metrics.jsonl").unlink()
    assert find_checkpoint(tmp_path, "best") == (tmp_path, 2)


def test_interrupted_at_every_step_equals_never_stopped(whole, tmp_path, monkeypatch, capsys):
    """Parameters, moments, memory, dropout, data and metrics, to the last bit."""
    interrupt(monkeypatch, 1, 2, 3, 4, 5)
    handler = signal.getsignal(signal.SIGINT)
    for step in range(1, 6):
        with pytest.raises(Interrupted, match=f"stopped after step {step} of 6, which is saved"):
            train(tmp_path)
        assert signal.getsignal(signal.SIGINT) is handler
    result = train(tmp_path)
    assert_equal(final(tmp_path), final(whole[0]))
    assert lines(tmp_path) == lines(whole[0])
    assert {**result, "run": 0, "tokens_per_second": 0} == {**whole[1], "run": 0, "tokens_per_second": 0}
    assert "goes on after step 5 of 6" in capsys.readouterr().err


def test_killed_between_checkpoints_equals_never_stopped(whole, tmp_path, monkeypatch, capsys):
    """Before the first, too: nothing stands in the way of beginning again."""
    for step, checkpoints in ((3, []), (6, [4])):
        with monkeypatch.context() as patch:
            interrupt(patch, step, error=RuntimeError("killed"))
            with pytest.raises(RuntimeError, match="killed"):
                train(tmp_path)
        assert lines(tmp_path)[-1]["step"] == step - 1 and saved(tmp_path) == checkpoints
        assert begun(tmp_path) == bool(checkpoints)
    train(tmp_path)
    assert_equal(final(tmp_path), final(whole[0]))
    assert lines(tmp_path) == lines(whole[0])
    assert "note" not in capsys.readouterr().err


def test_a_run_that_diverges_names_the_step_and_the_checkpoint(tmp_path):
    reader = Rows()
    example = int(reader.batch(Store(rows=1000), 2, [3], batch_size=8, seed=5)["example"][0])
    training = Training(steps=6, seed=5, checkpoint_every=2)
    text = Text(Store(rows=1000), reader)
    with pytest.raises(Diverged, match=r"step 3: the loss is inf, .* the last good checkpoint is step 2"):
        train(tmp_path, objective=Objective(explode_at=example), training=training, text=text)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2]


def test_continuing_takes_the_state_and_starts_the_reader_anew(whole, tmp_path, monkeypatch):
    more = partial(train, training=replace(TRAINING, steps=9), continue_from=whole[0])
    with pytest.raises(ValueError, match=r"training steps 6: .*whole has 6 already"):
        train(tmp_path / "none", continue_from=whole[0])
    with monkeypatch.context() as patch:
        interrupt(patch, 7)
        with pytest.raises(Interrupted):
            more(tmp_path / "stopped")
    state = final(tmp_path / "stopped", step=7)
    assert_equal(state.memory.documents, first_memory())
    more(tmp_path / "stopped")
    more(tmp_path / "free")
    assert_equal(final(tmp_path / "stopped", step=9), final(tmp_path / "free", step=9))
    assert [line["step"] for line in lines(tmp_path / "free") if line["kind"] == "train"] == [7, 8, 9]


def first_memory():
    """The documents that the memory holds after the first batch of the reader."""
    return Rows().batch(Store(), 0, range(8), batch_size=8, seed=5)["documents"][:, -4:]


def test_starting_from_another_model_lists_what_is_new(whole, tmp_path, capsys):
    train(tmp_path, model=Model(depth=1, rate=0.2), start_from=whole[0], training=Training(steps=1))
    said = capsys.readouterr().err
    assert (
        "new parameters: stack/layers/" in said and "embedding" not in said.split("new parameters:")[1].split("\n")[0]
    )


def test_preparing_in_the_loader_trains_alike(whole, tmp_path):
    train(tmp_path, objective=Objective(in_loader=True), training=replace(TRAINING, steps=3))
    losses, expected = ([line["loss"] for line in lines(run)[:3]] for run in (tmp_path, whole[0]))
    assert losses == pytest.approx(expected, rel=1e-6)


def test_evaluation_does_not_depend_on_the_batch_size():
    model = Forgetful(rate=0.2)
    params = variables(init_state(model, OPTIMIZER.build(6), prepared(make_batch()), MESH, seed=0).params, {})
    one, other = (Evaluator(model, Objective(), MESH, PIECES["evaluation_text"], size) for size in (8, 4))
    assert one(params) == pytest.approx(other(params), rel=1e-6)
    capped = Evaluator(model, Objective(), MESH, PIECES["evaluation_text"], 8, 1)
    assert capped(params)["lm"] != one(params)["lm"]


def test_what_does_not_fit_is_said_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="batch_size 7 is not divisible by 2"):
        train(tmp_path / "run", batch_size=7)
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        train(tmp_path / "run", start_from=tmp_path / "none")
    for field in ({"steps": 0}, {"log_every": -1}, {"evaluate_batches": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match=f"training {next(iter(field))} "):
            Training(**field)


@pytest.mark.parametrize(
    ("values", "patience", "ends"),
    [
        ([3, 2, 2, 2], 2, True),  # as good is no better
        ([3, 2, 2], 2, False),
        ([3, 2, 4, 1], 2, False),
        ([1, 2, 3], 2, True),
        ([1, 2, 3], None, False),
        ([1], 1, False),
        ([], 1, False),
    ],
)
def test_patience_counts_evaluations_since_the_best(values, patience, ends):
    assert exhausted({10 * number: float(value) for number, value in enumerate(values, 1)}, patience) is ends


def test_a_run_that_gets_no_better_ends_early(tmp_path, monkeypatch):
    run = tmp_path / "run"
    still = AdamW(WarmUp(rate=1e-30))
    training = replace(TRAINING, steps=9, evaluate_every=1, checkpoint_every=0, log_every=2, patience=2, best="loss")
    result = train(run, training=training, optimizer=still)
    assert (result["step"], saved(run)) == (3, [2, 3])
    assert result["best"] == {"step": 3, **result["evaluation"]}
    assert train(run, training=training, optimizer=still) == result
    monkeypatch.setattr(Evaluator, "__call__", interrupted := mock.Mock(side_effect=AssertionError))
    with pytest.raises(AssertionError):  # with more patience it goes on
        train(run, training=replace(training, patience=3), optimizer=still)
    interrupted.assert_called_once()
    with pytest.raises(ValueError, match="patience 0: choose 1 or more, or None to train to the end"):
        Training(patience=0)
