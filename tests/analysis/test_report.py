from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctx_jax.analysis import report

VOID = {"meta", "link", "br"}


def make_run(folder: Path, name: str, *, steps: int = 40, masked: bool = False) -> Path:
    run = folder / name
    run.mkdir(parents=True)
    experiment = {
        "type": "ctx_jax.experiment:Experiment",
        "name": "<script>alert(1)</script>",
        "model": {"type": "ctx_jax.models.gpt:GptConfig", "width": 8},
        "objective": {"type": f"ctx_jax.objectives.x:{'Masked' if masked else 'Causal'}"},
    }
    (run / "experiment.json").write_text(json.dumps(experiment))
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        train = {"nll": 7 - step / 20, "learning_rate": 1e-3, "tokens_per_second": 100 if step == 1 else 2000 + step}
        records.append({"step": step, "kind": "train", **train})
        if step % 20 == 0:
            validation = {"nll": 7.5 - step / 20, "standard_error": 0.0125, "accuracy": 0.125}
            if not masked:
                validation |= {"perplexity": 1234.5, "bits_per_byte": 2.7182}
            records.append({"step": step, "kind": "evaluation", **validation})
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def written(tmp_path: Path, *runs: Path) -> str:
    report.write(runs, tmp_path / "out" / "report.html")
    return (tmp_path / "out" / "report.html").read_text()


class Structure(HTMLParser):
    """Checks that tags close in order; gathers the text of table cells and whatever would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("th", "td"):
            self.cells.append("")
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.loads += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")]

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["th"], ["td"]):
            self.cells[-1] += data


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path):
    page = written(tmp_path, make_run(tmp_path, "gpt"), make_run(tmp_path, "bert", masked=True))
    structure = Structure()
    structure.feed(page)
    assert structure.open == []
    assert structure.loads == []
    assert "url(http" not in page and "@import" not in page
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_results_are_the_last_values(tmp_path: Path):
    structure = Structure()
    structure.feed(written(tmp_path, make_run(tmp_path, "gpt"), make_run(tmp_path, "bert", masked=True)))
    heads, gpt, bert = np.array(structure.cells).reshape(3, -1).tolist()
    assert dict(zip(heads, gpt, strict=True)) == {
        "run": "gpt",
        "model": "Gpt",
        "objective": "Causal",
        "steps": "40",
        "training nats": "5.000",
        "validation nats": "5.500",
        "± standard error": "0.0125",
        "perplexity": "1,234.5",
        "bits per byte": "2.718",
        "accuracy": "12.5%",
        "tokens/s": "2,020",  # the median, 2020.5: the first step's compilation does not count
    }
    assert dict(zip(heads, bert, strict=True))["bits per byte"] == "-"


def test_only_what_was_measured_is_drawn(tmp_path: Path):
    page = written(tmp_path, make_run(tmp_path, "bert", masked=True))
    assert re.findall(r'aria-label="([^"]+)"', page) == ["Loss", "Accuracy", "Speed", "Learning rate"]
    assert "<title>bert</title>" in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_every_run_has_its_color_in_every_chart(tmp_path: Path):
    page = written(tmp_path, *(make_run(tmp_path, name) for name in "abc"))
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert all(color in svg for color in report.COLORS[:3])
        assert report.COLORS[3] not in svg


def test_what_is_not_finite_or_only_half_written_is_not_drawn(tmp_path: Path):
    run = make_run(tmp_path, "run", steps=3)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "kind": "train", "nll": NaN}\n')
        file.write('{"step": 5, "kind": "tr')  # killed while it wrote
    steps, values = report.read(run, "run").curve("train", "nll")
    assert steps.tolist() == [1, 2, 3]
    np.testing.assert_allclose(values, [6.95, 6.9, 6.85])


def test_long_curves_are_thinned_to_means(tmp_path: Path):
    steps, values = report.thinned(np.arange(1, 1001), np.arange(1000.0), 100)
    assert len(steps) == len(values) == 100
    assert (steps[0], values[0], steps[-1]) == (5.5, 4.5, 995.5)
    steps, values = report.thinned(np.arange(3), np.arange(3.0), 100)
    assert steps.tolist() == [0, 1, 2]


def test_names_tell_runs_apart():
    assert report.names([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert report.names([Path("x/gpt/1"), Path("x/bert/1"), Path("x/bert/2")]) == ["gpt/1", "bert/1", "bert/2"]
    assert report.names([Path("same"), Path("same")]) == ["same", "same"]


def test_bad_input_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="at least one run folder"):
        report.write([], tmp_path / "report.html")
    with pytest.raises(FileNotFoundError, match=r"has no metrics\.jsonl: give the folder of a run"):
        report.write([tmp_path], tmp_path / "report.html")
    run = make_run(tmp_path, "other", steps=2)
    (run / "experiment.json").unlink()
    with pytest.raises(ValueError, match="other is damaged"):
        report.write([run], tmp_path / "report.html")
