"""Which checkpoints of a run stay, and which of them is the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orbax.checkpoint as ocp

HIGHER = ("accuracy", "f1", "precision", "recall", "exact_match", "matthews", "pearson", "spearman")
"""Numbers of an evaluation that are the better the higher they are; all others, the lower."""


class Retention(ocp.checkpoint_managers.PreservationPolicy):
    """Which steps stay: the newest, every n-th, and the one with the lowest score."""

    def __init__(self, keep: int | None, keep_every: int) -> None:
        self.keep, self.keep_every = keep, keep_every
        self.scores: dict[int, float] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        stay = set(steps if self.keep is None else steps[-self.keep :])
        stay |= {step for step in steps if self.keep_every and step % self.keep_every == 0}
        stay |= {best} if (best := lowest(self.scores, steps)) is not None else set()
        return [checkpoint.step in stay for checkpoint in checkpoints]


def scores(lines: Iterable[dict[str, Any]], metric: str) -> dict[int, float]:
    """{step: score} of the lines of evaluations that gave this metric."""
    return {line["step"]: score(line, metric) for line in lines if line["kind"] == "evaluation" and metric in line}


def score(values: dict[str, Any], metric: str) -> float:
    """The metric, so that the lowest is the best."""
    return -values[metric] if metric in HIGHER else values[metric]


def exhausted(scores: dict[int, float], patience: int | None) -> bool:
    """Whether so many evaluations in a row, the last of them included, were no better than one before them; None =
    never."""
    if patience is None or not scores:
        return False
    steps = sorted(scores)
    first = min(steps, key=lambda step: (scores[step], step))
    return len(steps) - 1 - steps.index(first) >= patience


def lowest(scores: dict[int, float], steps: Sequence[int]) -> int | None:
    """The step with the lowest score, the later of equals; None if no step has one."""
    return min((step for step in steps if step in scores), key=lambda step: (scores[step], -step), default=None)
