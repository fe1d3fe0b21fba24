"""`report RUN...`: one page with the learning curves, results and settings of one or several runs.

The page holds everything it shows (drawings as SVG, no script, nothing fetched), so it can be mailed or archived.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from ctx_jax.training.metrics import FILE, read_metrics

COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#be185d", "#4b5563", "#65a30d")

STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#94a3b8",
    "axes.grid": True,
    "axes.labelcolor": "#475569",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 11,
    "grid.color": "#e2e8f0",
    "svg.fonttype": "none",
    "xtick.color": "#475569",
    "ytick.color": "#475569",
}


@dataclass(frozen=True)
class Run:
    """What a run folder says about a run."""

    name: str
    experiment: dict[str, Any]
    metrics: dict[str, list[dict[str, Any]]]
    """Kind ("train", "evaluation") -> its records, in the order of their steps."""

    def curve(self, kind: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values), [N] each, of the records that have a finite number for `metric`."""
        records = [record for record in self.metrics[kind] if _is_finite(record.get(metric))]
        return np.array([record["step"] for record in records]), np.array([record[metric] for record in records], float)

    def last(self, kind: str, metric: str) -> Any:
        """The newest value of `metric`, or None."""
        return next((record[metric] for record in reversed(self.metrics[kind]) if metric in record), None)

    def median(self, kind: str, metric: str) -> float | None:
        """The median of `metric`, or None: of a speed it leaves out compilation and pauses."""
        _, values = self.curve(kind, metric)
        return float(np.median(values)) if len(values) else None


def write(folders: Sequence[Path], path: Path) -> None:
    """Writes the page of these run folders to `path`.

    Raises ValueError without folders, and what `read` raises.
    """
    if not folders:
        raise ValueError("report needs at least one run folder")
    runs = [read(folder, name) for folder, name in zip(folders, names(folders), strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(runs), encoding="utf-8")


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def read(folder: Path, name: str) -> Run:
    """What the run folder holds. Raises FileNotFoundError without metrics, ValueError for what cannot be read."""
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"{folder} has no {FILE}: give the folder of a run that has trained")
    metrics: dict[str, list[dict[str, Any]]] = {"train": [], "evaluation": []}
    try:
        for record in read_metrics(folder):
            metrics[record["kind"]].append(record)
        experiment = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is damaged, its {FILE} or experiment.json cannot be read: {error!r}") from None
    return Run(name, experiment, metrics)


@dataclass(frozen=True)
class Chart:
    """One drawing, in which every run has its colour."""

    title: str
    caption: str
    curves: tuple[tuple[str, str], ...]
    """(kind, metric) pairs; beside a validation curve, training is drawn thin and pale."""
    points: int = 250
    """A longer curve is drawn as the means of so many stretches of it."""
    from_zero: bool = False
    """Whether the vertical axis begins at 0."""
    percent: bool = False


CHARTS = (
    Chart(
        "Loss",
        "nats per predicted token; thin: training, bold: validation",
        (("train", "nll"), ("evaluation", "nll")),
    ),
    Chart("Bits per byte", "validation", (("evaluation", "bits_per_byte"),)),
    Chart(
        "Accuracy",
        "of predicted tokens; thin: training, bold: validation",
        (("train", "accuracy"), ("evaluation", "accuracy")),
        percent=True,
    ),
    Chart("Speed", "training tokens per second", (("train", "tokens_per_second"),), points=50, from_zero=True),
    Chart("Learning rate", "of each step", (("train", "learning_rate"),), from_zero=True),
)


def draw(chart: Chart, runs: Sequence[Run], *, wide: bool) -> str:
    """The chart as an <svg> element."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": chart.title}):
        figure = Figure(figsize=(13.6, 4.4) if wide else (6.6, 3.7), layout="constrained")
        axes = figure.add_subplot()
        for color, run in zip(cycle(COLORS), runs, strict=False):
            for kind, metric in chart.curves:
                steps, values = thinned(*run.curve(kind, metric), chart.points)
                if kind == "train" and len(chart.curves) > 1:
                    axes.plot(steps, values, color=color, linewidth=1.0, alpha=0.45)
                else:
                    marker = "o" if len(steps) <= 30 else ""
                    axes.plot(steps, values, color=color, linewidth=1.9, marker=marker, markersize=4.5)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(10 if wide else 6, integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if chart.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif axes.get_ylim()[1] >= 1000:
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = buffer.getvalue()
    svg = re.sub(r' id="[a-z0-9.]+_\d+"', "", svg[svg.index("<svg") :])  # ids that would repeat from chart to chart
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(chart.title)}"', 1)


def thinned(steps: np.ndarray, values: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` points: means over stretches of the curve."""
    if len(steps) <= points:
        return steps, values
    parts = [np.array_split(array, points) for array in (steps, values)]
    return np.array([part.mean() for part in parts[0]]), np.array([part.mean() for part in parts[1]])


COLUMNS: tuple[tuple[str, Callable[[Run], str | None]], ...] = (
    ("model", lambda run: _type(run.experiment.get("model"))),
    ("objective", lambda run: _type(run.experiment.get("objective"))),
    ("steps", lambda run: _text(run.last("train", "step"), "{:,}")),
    ("training nats", lambda run: _text(run.last("train", "nll"), "{:.3f}")),
    ("validation nats", lambda run: _text(run.last("evaluation", "nll"), "{:.3f}")),
    ("± standard error", lambda run: _text(run.last("evaluation", "standard_error"), "{:.4f}")),
    ("perplexity", lambda run: _text(run.last("evaluation", "perplexity"), "{:,.1f}")),
    ("bits per byte", lambda run: _text(run.last("evaluation", "bits_per_byte"), "{:.3f}")),
    ("accuracy", lambda run: _text(run.last("evaluation", "accuracy"), "{:.1%}")),
    ("tokens/s", lambda run: _text(run.median("train", "tokens_per_second"), "{:,.0f}")),
)
"""Heading and text of each column of the results."""


def page(runs: Sequence[Run]) -> str:
    """The whole HTML document."""
    colored = [
        (run, f'<i style="background:{color}"></i>{html.escape(run.name)}')
        for run, color in zip(runs, cycle(COLORS), strict=False)
    ]
    charts = [chart for chart in CHARTS if any(len(run.curve(*curve)[0]) for run in runs for curve in chart.curves)]
    figures = []
    for index, chart in enumerate(charts):
        wide = index == 0 and len(charts) % 2 == 1
        caption = f"<figcaption><b>{chart.title}</b> {chart.caption}</figcaption>"
        figures.append(f"<figure{' class=wide' if wide else ''}>{caption}{draw(chart, runs, wide=wide)}</figure>")
    columns = [(title, [value(run) for run in runs]) for title, value in COLUMNS]
    columns = [(title, values) for title, values in columns if any(values)]
    rows = [
        f"<tr><th>{name}</th>"
        + "".join(f"<td>{html.escape(values[index] or '-')}</td>" for _, values in columns)
        + "</tr>"
        for index, (_, name) in enumerate(colored)
    ]
    settings = [
        f"<details><summary>{name}</summary><pre>{html.escape(json.dumps(run.experiment, indent=2))}</pre></details>"
        for run, name in colored
    ]
    return PAGE.substitute(
        title=html.escape(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs compared",
        legend="".join(f"<span>{name}</span>" for _, name in colored),
        figures="".join(figures),
        heading="".join(f"<th>{title}</th>" for title, _ in columns),
        rows="".join(rows),
        settings="".join(settings),
    )


def _type(value: Any) -> str | None:
    """ "Bert" of {"type": "ctx_jax.models.bert:BertConfig"}."""
    return value["type"].rpartition(":")[2].removesuffix("Config") if isinstance(value, dict) else None


def _text(value: Any, form: str) -> str | None:
    return form.format(value) if _is_finite(value) else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { margin: 0 auto; max-width: 1200px; padding: 2rem 1.5rem 4rem; background: #f8fafc; color: #0f172a;
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .8rem; }
i { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin-right: .5em; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; position: sticky; top: 0; padding: .6rem 0;
  background: #f8fafcee; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1.2rem; }
figure, .table, details { margin: 0; background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; }
figure { padding: 1rem 1rem .4rem; }
.wide { grid-column: 1 / -1; }
figcaption { color: #64748b; padding-bottom: .4rem; }
figcaption b { color: #0f172a; font-size: 1.05rem; margin-right: .5em; }
svg { width: 100%; height: auto; display: block; }
.table { overflow-x: auto; padding: .3rem 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .5rem; text-align: right; white-space: nowrap; }
th:first-child, th:nth-child(2), th:nth-child(3), td:nth-child(2), td:nth-child(3) { text-align: left; }
thead th { color: #64748b; font-weight: 500; border-bottom: 1px solid #e2e8f0;
  white-space: normal; vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid #f1f5f9; }
tbody th { font-weight: 600; }
details { margin-bottom: .6rem; padding: .6rem 1rem; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.45; }
</style>
</head>
<body>
<h1>$title</h1>
<div class="legend">$legend</div>
<div class="charts">$figures</div>
<h2>Results</h2>
<div class="table"><table><thead><tr><th>run</th>$heading</tr></thead><tbody>$rows</tbody></table></div>
<h2>Settings</h2>
$settings
</body>
</html>
""")
