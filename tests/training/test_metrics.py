from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest

from ctx_jax.training.metrics import (
    FILE,
    Display,
    Diverged,
    Meter,
    Metrics,
    describe_time,
    means,
    read_metrics,
    summary,
)


def measured(loss, norm=1.0):
    return {
        "loss": np.float32(loss),
        "terms": {"lm": np.float32(loss)},
        "metrics": {"accuracy": (np.float32(3), np.float32(4))},
        "grad_norm": np.float32(norm),
        "learning_rate": np.float32(0.5),
        "tokens": np.int32(10),
    }


def test_resuming_drops_what_lies_beyond_the_checkpoint(tmp_path):
    with Metrics(tmp_path, 0) as metrics:
        for step in (1, 2, 3):
            metrics.write("train", step, {"loss": 1.0 / step})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 4, "kind": "tr')  # killed while it wrote
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    with Metrics(tmp_path, 2) as metrics:
        metrics.write("train", 3, {"loss": 7.0})
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 7.0)]
    assert list(tmp_path.glob("tensorboard/events*"))


def test_numbers_that_are_none_are_never_written(tmp_path):
    with Metrics(tmp_path, 0) as metrics, pytest.raises(ValueError):
        metrics.write("evaluation", 1, {"loss": float("nan")})
    assert read_metrics(tmp_path) == []


def test_the_meter_reads_one_step_late(tmp_path, capsys):
    with Metrics(tmp_path, 0) as metrics, Display("run", 4) as display:
        meter = Meter(metrics, display, 4, 2, lambda: None)
        for step in (1, 2, 3):
            meter.push(step, measured(step))
            assert len(read_metrics(tmp_path)) == (step > 2)
        meter.push(4, measured(4))
        meter.flush()
        meter.flush()
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [2, 4]
    assert {key: lines[0][key] for key in ("kind", "loss", "lm", "accuracy", "learning_rate", "tokens")} == {
        "kind": "train", "loss": 2.0, "lm": 2.0, "accuracy": 0.75, "learning_rate": 0.5, "tokens": 10,
    }  # fmt: skip
    assert lines[1]["tokens_per_second"] > 0
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "run: step 1/4  loss 1.0000  compiled"
    assert printed[1].startswith("run: step 2/4  loss 2.0000")
    assert len(printed) == 3


@pytest.mark.parametrize("values", [(np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan)])
def test_the_meter_stops_a_run_that_diverges(tmp_path, values):
    with Metrics(tmp_path, 0) as metrics, Display("run", 9) as display:
        meter = Meter(metrics, display, 9, 1, lambda: 4)
        meter.push(5, measured(*values))
        with pytest.raises(Diverged, match=r"step 5: .* last good checkpoint is step 4"):
            meter.push(6, measured(1.0))
        meter = Meter(metrics, display, 9, 1, lambda: None)
        meter.push(1, measured(*values))
        with pytest.raises(Diverged, match="there is no checkpoint yet"):
            meter.flush()
    assert read_metrics(tmp_path) == []


def test_summary_of_a_run(tmp_path):
    with Metrics(tmp_path, 0) as metrics:
        metrics.write("train", 1, {"loss": 3.0, "tokens_per_second": 5.0})
        metrics.write("train", 2, {"loss": 2.0, "tokens_per_second": 7.0})
        metrics.write("evaluation", 2, {"loss": 2.5, "accuracy": 0.5})
    assert summary(tmp_path) == {
        "run": str(tmp_path), "step": 2, "loss": 2.0, "evaluation": {"loss": 2.5, "accuracy": 0.5},
        "tokens_per_second": 7.0,
    }  # fmt: skip


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with Display("bert", 10) as display:
        display.update(3, "loss 1.2500", False)
        display.log("said")
    shown = sys.stderr.getvalue()
    assert "bert" in shown and "3/10" in shown and "loss 1.2500" in shown and "bert: said" in shown


def test_means_and_times():
    assert means({"a": (6.0, 4.0), "b": (0.0, 0.0)}) == {"a": 1.5, "b": 0.0}
    assert [describe_time(seconds) for seconds in (12.4, 200, 18_420)] == ["12 s", "3 min 20 s", "5 h 7 min"]
