"""What a run tells: `metrics.jsonl` and TensorBoard events for later, progress on stderr for now."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tensorboardX import SummaryWriter

from ctx_jax.data import write_durably
from ctx_jax.progress import tell
from ctx_jax.training.retention import lowest, scores

FILE = "metrics.jsonl"
KINDS = ("train", "evaluation")
TIMES = ("seconds", "tokens_per_second")
"""The fields that differ between equal runs."""


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run, in order: {"step", "kind": "train" or "evaluation", "loss", ...}. Those that are damaged are
    told of, and left out; a torn last line, of a run that was killed while it wrote, is none of them."""
    path = run / FILE
    *lines, end = (path.read_bytes().decode(errors="replace") if path.exists() else "").split("\n")
    records = [parsed(line) for line in lines]
    if damaged := [str(number) for number, record in enumerate(records, start=1) if record is None]:
        more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
        tell(f"note: {path} is damaged at line {', '.join(damaged[:5])}{more}, which is left out")
    return [record for record in (*records, parsed(end)) if record is not None]


def parsed(line: str) -> dict[str, Any] | None:
    """What a line holds, if it is one that `Metrics` writes."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if is_line(record) else None


def is_line(record: Any) -> bool:
    """Whether this is what a line holds."""
    return isinstance(record, dict) and isinstance(record.get("step"), int) and record.get("kind") in KINDS


def summary(
    run: Path, step: int, last: dict[str, dict[str, Any]] | None = None, metric: str | None = None
) -> dict[str, Any]:
    """What a run ended with after `step` steps: {"run", "step", "loss", "evaluation": {name: value},
    "tokens_per_second"}, and "best", the best evaluation by `metric` with its "step".

    Args:
        last: the last line of each kind (`Metrics.last`); None = those in the run's folder.

    Raises ValueError if these are not of the run's end.
    """
    lines = read_metrics(run) if last is None or metric is not None else []
    last = {record["kind"]: record for record in lines} if last is None else last
    if "train" not in last or last.get("evaluation", {}).get("step") != step:
        raise ValueError(f"{run} is finished, but its {FILE} does not say with what: evaluate {run}")
    train, evaluation = last["train"], last["evaluation"]
    evaluations = {record["step"]: record for record in (*lines, evaluation) if record["kind"] == "evaluation"}
    found = {} if metric is None else scores(evaluations.values(), metric)
    best = lowest(found, [number for number in found if number <= step])
    return {
        "run": str(run),
        "step": step,
        "loss": train["loss"],
        "evaluation": numbers(evaluation),
        **({} if best is None else {"best": {"step": best, **numbers(evaluations[best])}}),
        "tokens_per_second": train["tokens_per_second"],
    }


def numbers(evaluation: dict[str, Any]) -> dict[str, float]:
    """What an evaluation's line says of the model."""
    return {name: value for name, value in evaluation.items() if name not in ("step", "kind", *TIMES)}


class Metrics:
    """Writes the metrics of a run that starts, or goes on, after `step` steps, to disk in process 0 only."""

    def __init__(
        self, run: Path, step: int, evaluated: bool = True, last: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Drops what an interrupted run wrote beyond `step` (and beyond its training, if that is not `evaluated`), so
        that the file becomes that of a run never stopped.

        Args:
            last: the last line of each kind, as the checkpoint knows them; None = those in the file.
        """
        self.start = time.monotonic()
        due = KINDS if evaluated else ("train",)
        kept = [
            record
            for record in read_metrics(run)
            if record["step"] < step or (record["step"] == step and record["kind"] in due)
        ]
        self.last = {record["kind"]: record for record in kept} if last is None else dict(last)
        self.evaluations = [record for record in kept if record["kind"] == "evaluation"]
        if any(record not in kept for record in self.last.values()):
            tell(f"note: {run / FILE} has lost lines that it had at step {step}: curves drawn of it have a gap")
        self.active = jax.process_index() == 0
        if self.active:
            write_durably(run / FILE, "".join(json.dumps(record) + "\n" for record in kept))
            self.file = (run / FILE).open("a", encoding="utf-8")
            self.events = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """One line, and one TensorBoard scalar `kind/name` for each value."""
        record = {"step": step, "kind": kind, **values, "seconds": round(time.monotonic() - self.start, 3)}
        self.last[kind] = record
        if not self.active:
            return
        with self._named():
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()
        for name, value in values.items():
            self.events.add_scalar(f"{kind}/{name}", value, step)

    def settle(self) -> None:
        """Waits until every line is on disk: what a checkpoint follows must be there when it is."""
        if self.active:
            with self._named():
                os.fsync(self.file.fileno())

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A full disk does not say where."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.file.name) from error

    def close(self) -> None:
        if self.active:
            self.file.close()
            self.events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Display:
    """Progress on stderr: a bar on a terminal, plain lines elsewhere; in process 0 only."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.active = jax.process_index() == 0
        self.bar = None
        if self.active and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[state]}"), console=Console(stderr=True))
            self.task = self.bar.add_task(name, total=steps, state="compiling")
            self.bar.start()

    def update(self, step: int, state: str, keep: bool) -> None:
        """Moves the bar; without one, prints the state if it is to be kept."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, state=state)
        elif keep:
            self.log(f"step {step}/{self.steps}  {state}")

    def log(self, text: str) -> None:
        """Prints a line that stays."""
        if self.bar is not None:
            self.bar.console.print(f"{self.name}: {text}", markup=False, highlight=False)
        elif self.active:
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Diverged(Exception):
    """The loss or the gradient is no longer a finite number."""


class Meter:
    """Reads each step's metrics when the next step has been dispatched, stops a run that diverges, and keeps time."""

    def __init__(
        self, metrics: Metrics, display: Display, steps: int, log_every: int, last_saved: Callable[[], int | None]
    ) -> None:
        self.metrics, self.display, self.steps, self.log_every = metrics, display, steps, log_every
        self.last_saved = last_saved
        self.pending: tuple[int, Any] | None = None
        self.clock: float | None = None  # unset: the next step is not timed, since it compiles
        self.tokens, self.seconds, self.timed = 0, 0.0, 0

    def push(self, step: int, measured: dict[str, Any]) -> None:
        """Takes a step's metrics, which are still being computed, and reads those of the step before."""
        self.flush()
        self.pending = step, measured

    def restart_clock(self) -> None:
        """Leaves out the time since the last reading."""
        self.clock = time.monotonic()

    def flush(self) -> None:
        """Waits for the step that was pushed last. Raises Diverged."""
        if self.pending is None:
            return
        (step, measured), self.pending = self.pending, None
        measured = jax.device_get(measured)
        loss, norm, tokens = float(measured["loss"]), float(measured["grad_norm"]), int(measured["tokens"])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            saved = self.last_saved()
            good = "there is no checkpoint yet" if saved is None else f"the last good checkpoint is step {saved}"
            raise Diverged(f"step {step}: the loss is {loss}, the gradient's norm {norm}; {good}")
        now, first = time.monotonic(), self.clock is None and not self.timed
        if self.clock is not None:
            self.tokens += tokens
            self.seconds += now - self.clock
            self.timed += 1
        self.clock = now
        keep = step == self.steps or due(step, self.log_every)
        if first and not keep:
            self.display.log(f"step {step}/{self.steps}  loss {loss:.4f}  compiled")
        rate, state = 0.0, f"loss {loss:.4f}"
        if self.timed:
            rate, left = self.tokens / self.seconds, self.seconds / self.timed * (self.steps - step)
            state += f"  {rate:,.0f} tokens/s  {describe_time(left)} left"
        self.display.update(step, state, keep)
        if keep:
            terms = {name: float(value) for name, value in measured["terms"].items()}
            values = {"loss": loss, **terms, **means(measured["metrics"]), "grad_norm": norm}
            values |= {"learning_rate": float(measured["learning_rate"]), "tokens": tokens}
            values["tokens_per_second"] = round(rate, 1)
            self.metrics.write("train", step, values)


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one."""
    return every > 0 and step % every == 0


def means(sums: dict[str, Any]) -> dict[str, float]:
    """Sum by count; 0 where nothing was counted."""
    return {name: float(total) / float(count) if count else 0.0 for name, (total, count) in sums.items()}


def describe_time(seconds: float) -> str:
    """12 s, 3 min 20 s, 5 h 7 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
