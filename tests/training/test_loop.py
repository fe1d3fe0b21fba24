"""Whole runs: interrupted, killed, continued, diverging; always the real loader, orbax and metrics file."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from functools import partial

import jax
import pytest

from ctx_jax.parallel.mesh import Mesh
from ctx_jax.signals import Interrupted
from ctx_jax.training import loop
from ctx_jax.training.checkpoints import Checkpoints
from ctx_jax.training.loop import Evaluator, Text, Training
from ctx_jax.training.metrics import TIMES, Diverged, Meter, read_metrics
from ctx_jax.training.optimizers import AdamW
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
        assert checkpoints.record(6) == {"experiment": {"name": "fake"}, "reader_start": 0, "evaluated": True}


def test_a_run_learns(whole):
    losses = [line["lm"] for line in lines(whole[0]) if line["kind"] == "evaluation"]
    assert losses[1] < losses[0]


def test_a_finished_run_is_not_run_again(whole):
    run, result = whole
    before = (run / "metrics.jsonl").read_text()
    assert train(run) == result
    assert (run / "metrics.jsonl").read_text() == before


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


def test_killed_between_checkpoints_equals_never_stopped(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, 6, error=RuntimeError("killed"))
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path)
    assert lines(tmp_path)[-1]["step"] == 5
    train(tmp_path)
    assert_equal(final(tmp_path), final(whole[0]))
    assert lines(tmp_path) == lines(whole[0])


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
