from __future__ import annotations

import io
import json
import os
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
    expected = {
        "run": str(tmp_path), "step": 2, "loss": 2.0, "evaluation": {"loss": 2.5, "accuracy": 0.5},
        "tokens_per_second": 7.0,
    }  # fmt: skip
    assert summary(tmp_path, 2) == summary(tmp_path, 2, metrics.last) == expected
    for step in (1, 3):  # an end that is lost, of either kind
        with pytest.raises(ValueError, match=r"is finished, but its metrics.jsonl does not say with what: evaluate"):
            summary(tmp_path, step)
    file = tmp_path / FILE
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="does not say with what"):
        summary(tmp_path, 2)


DAMAGED = ("{}", "[]", '{"step": 1}', '{"step": 1, "kind": "other"}', '{"step": "1", "kind": "train"}', "\0\0", "{")


def test_what_can_be_read_is_read_and_the_rest_told_of(tmp_path, capsys):
    """A last line may be torn, or lack its end alone; another is damaged."""
    good = ['{"step": 1, "kind": "train", "loss": 3.0}', '{"step": 2, "kind": "train", "loss": 2.0}']
    (tmp_path / FILE).write_bytes("\n".join([good[0], *DAMAGED, good[1]]).encode() + b"\n\xff\n" + b'{"step": 3, "ki')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    assert capsys.readouterr().err == (
        f"note: {tmp_path}/metrics.jsonl is damaged at line 2, 3, 4, 5, 6 and 3 more, which is left out\n"
    )
    (tmp_path / FILE).write_text("\n".join(good))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    assert capsys.readouterr().err == ""


def test_a_run_goes_on_over_a_damaged_line(tmp_path, capsys):
    with Metrics(tmp_path, 0) as metrics:
        for step in (1, 2, 3):
            metrics.write("train", step, {"loss": 1.0 / step})
        last = dict(metrics.last)
    lines = (tmp_path / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text(lines[0] + lines[1][7:] + lines[2])
    with Metrics(tmp_path, 3, last=last) as metrics:
        assert metrics.last == last
    assert capsys.readouterr().err == f"note: {tmp_path}/metrics.jsonl is damaged at line 2, which is left out\n"
    assert (tmp_path / FILE).read_text() == lines[0] + lines[2]
    (tmp_path / FILE).unlink()
    with Metrics(tmp_path, 3, last=last) as metrics:
        assert metrics.last == last
    assert "metrics.jsonl has lost lines that it had at step 3" in capsys.readouterr().err


def test_settled_lines_are_on_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    with Metrics(tmp_path, 0) as metrics:
        metrics.write("train", 1, {"loss": 1.0})
        metrics.settle()
        place, folder = (tmp_path / FILE).stat(), tmp_path.stat()
        ours = [each for each in synced if each.st_ino in (place.st_ino, folder.st_ino)]  # TensorBoard has its own
    assert [each.st_ino for each in ours] == [place.st_ino, folder.st_ino, place.st_ino]
    assert [ours[0].st_size, ours[2].st_size] == [0, place.st_size]


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
