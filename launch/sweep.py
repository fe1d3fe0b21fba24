"""Sweeps: experiments that differ in a few fields, each a run of its own.

    from ctx_jax.experiment import find
    from launch import sweep

    def rates():
        return sweep.grid(find("gpt:tiny"), {"optimizer.schedule.rate": (1e-3, 3e-3), "training.seed": (0, 1)})

    python -m ctx_jax sweep FILE.py:rates --jobs 2

A base is an experiment, or what another of these functions returned: `grid(zip(base, {...}), {...})`.
"""

from __future__ import annotations

import builtins
import fcntl
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from ctx_jax.data import UNSUPPORTED
from ctx_jax.experiment import Experiment, called
from ctx_jax.identity import fingerprint
from ctx_jax.serialization import from_json, nearest, to_json
from ctx_jax.signals import INTERRUPTED, REQUEUE
from ctx_jax.training.checkpoints import METRICS, begun, read_record, saved
from ctx_jax.training.loop import ended
from ctx_jax.training.metrics import summary
from ctx_jax.training.retention import score
from ctx_jax.transfer.finetuning import completed

LONGEST = 150
"""Bytes of a name (a folder's has 255); the fingerprint behind it tells longer ones apart."""


class Variant(NamedTuple):
    """An experiment, and what was changed in it: (dotted field, value)."""

    experiment: Experiment
    changes: tuple[tuple[str, Any], ...] = ()


SEED = "training.seed"

Base = Experiment | Variant | Iterable[Experiment | Variant]
Values = Mapping[str, Iterable[Any]]


def grid(base: Base, fields: Values) -> list[Variant]:
    """Every combination of the fields' values; the last field changes fastest.

    Raises ValueError naming the field if there is no such one, or a value is of another type or does not fit.
    """
    columns = checked(fields)
    combinations = list(itertools.product(*columns.values()))
    return [
        changed(variant, dict(builtins.zip(columns, values, strict=True)))
        for variant in variants(base)
        for values in combinations
    ]


def zip(base: Base, fields: Values) -> list[Variant]:
    """The fields' first values together, then their second, and so on. Raises ValueError as `grid`, and if one field
    has more values than another."""
    columns = checked(fields)
    counts = {field: len(values) for field, values in columns.items()}
    if len(set(counts.values())) > 1:
        described = ", ".join(f"{field} {count}" for field, count in counts.items())
        raise ValueError(f"zip needs as many values of each field, not {described}")
    rows = list(builtins.zip(*columns.values(), strict=True))
    return [
        changed(variant, dict(builtins.zip(columns, row, strict=True))) for variant in variants(base) for row in rows
    ]


def chain(*bases: Base) -> list[Variant]:
    """One after the other."""
    return [variant for base in bases for variant in variants(base)]


def variants(base: Base) -> list[Variant]:
    """The base as a list of variants. Raises ValueError if it is none."""
    items = [base] if isinstance(base, Experiment | Variant) else list(base) if isinstance(base, Iterable) else [base]
    for item in items:
        if not isinstance(item, Experiment | Variant):
            raise ValueError(f"a sweep is made of experiments, not of {type(item).__name__}")
    return [Variant(item) if isinstance(item, Experiment) else item for item in items]


def checked(fields: Values) -> dict[str, tuple[Any, ...]]:
    """The values of each field as a tuple. Raises ValueError if there are none."""
    if not isinstance(fields, Mapping) or not all(isinstance(field, str) for field in fields):
        raise ValueError(f"the fields are {fields!r}: give a dict of dotted fields and their values, {{field: values}}")
    for field, values in fields.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"{field}: {values!r} is one value: give several, as a tuple")
    columns = {field: tuple(values) for field, values in fields.items()}
    for field, values in columns.items():
        if not values:
            raise ValueError(f"{field}: give one value or more")
    return columns


def changed(variant: Variant, changes: Mapping[str, Any]) -> Variant:
    """The variant with the fields changed all at once, so that only the result must fit together."""
    value = to_json(variant.experiment)
    for field, new in changes.items():
        try:
            put(value, field, to_json(new))
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from None
    return Variant(from_json(value), (*variant.changes, *changes.items()))


def put(node: Any, field: str, value: Any) -> None:
    """Sets a dotted field of an experiment's JSON. Raises ValueError naming the nearest field if there is none."""
    parts = field.split(".")
    for number, part in enumerate(parts):
        if isinstance(node, dict):
            kind, keys = node["type"].rpartition(":")[2], {name: name for name in node if name != "type"}
        elif isinstance(node, list):
            kind, keys = "the tuple", {str(index): index for index in range(len(node))}
        else:
            raise ValueError(f"{'.'.join(parts[:number])} is {node!r}, which has no fields")
        if part not in keys:
            raise ValueError(f"{kind} has no field {part!r}{nearest(part, list(keys))}")
        if number == len(parts) - 1:
            node[keys[part]] = value
        else:
            node = node[keys[part]]


class Planned(NamedTuple):
    """One run of a sweep."""

    name: str
    """what was changed, for people"""
    fingerprint: str
    experiment: Experiment
    folder: Path
    changes: tuple[tuple[str, Any], ...] = ()
    options: tuple[str, ...] = ()
    """of `train`, that are not the experiment's"""

    @property
    def state(self) -> str:
        """finished, failed, running (under another command), unfinished (it goes on when it is started again) or
        waiting."""
        if is_locked(self.folder):
            return "running"
        if self.ended:
            return "finished"
        try:
            code = int((self.folder / "exit_code").read_text())
        except (OSError, ValueError):
            return "failed" if self.lost else "unfinished" if begun(self.folder) else "waiting"
        return "finished" if code == 0 else "unfinished" if code in GOES_ON else "failed"

    @property
    def lost(self) -> str | None:
        """Why it cannot go on, in one line, if its checkpoints are lost."""
        try:
            begun(self.folder)
        except ValueError as error:
            return str(error)
        return None

    @property
    def ended(self) -> dict[str, Any]:
        """What the run itself says in its folder, whoever started it; nothing before its end."""
        training = self.experiment.training
        with suppress(OSError, ValueError, TypeError):  # its checkpoint is damaged, or its metrics
            if (step := max(saved(self.folder), default=0)) and ended(self.folder, step, training):
                return summary(self.folder, step, read_record(self.folder, step).get(METRICS), training.best)
        return {}

    @property
    def result(self) -> dict[str, Any]:
        """What the run gave back; nothing if it has not."""
        try:
            found = json.loads((self.folder / "result.json").read_text().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            return self.ended
        return found if isinstance(found, dict) else self.ended


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the run's folder."""
    try:
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return False


GOES_ON = (REQUEUE, INTERRUPTED)
"""Exit codes of a run that was stopped in order."""


Configure = Callable[[Experiment], tuple[Experiment, list[str]]]
"""An experiment as the options of `train` change it, and the options that are not its own."""


def planned(
    name: str, folder: Path | None = None, configure: Configure | None = None, seeds: int | None = None
) -> tuple[Path, list[Planned]]:
    """The sweep's folder and the runs of the sweep called `name`, FILE.py:function or as `experiment.find` names them;
    one experiment is a sweep, too.

    Args:
        configure: applied to each experiment, before what the sweep changes in it.
        seeds: so many runs of each, `training.seed` 0, 1, ...

    Raises ValueError if it cannot be found, or two of its experiments are the same.
    """
    items = variants(called(name))
    if not items:
        raise ValueError(f"{name} returned no experiments")
    if seeds is not None:
        items = grid(items, {SEED: range(seeds)})
    configured: list[Planned] = []
    for variant in items:
        options: list[str] = []
        if configure is not None:
            experiment, options = configure(variant.experiment)
            variant = changed(Variant(experiment), dict(variant.changes))
        experiment = completed(variant.experiment)
        known = called_by(Variant(experiment, variant.changes))
        configured.append(Planned(known, fingerprint(experiment), experiment, Path(), variant.changes, tuple(options)))
    file, _, function = name.partition(":")
    origins = [Path(word).name for word in configured[0].options if not word.startswith("--")]
    folder = folder or Path("runs/sweeps") / "-".join(filter(None, (Path(file).stem, function, *origins)))
    plans: dict[Path, Planned] = {}
    for plan in configured:
        run = folder / f"{plan.name}-{plan.fingerprint}"
        if run in plans:
            raise ValueError(f"{name} returned {plan.name} ({plan.fingerprint}) twice: leave one out")
        plans[run] = plan._replace(folder=run)
    return folder, list(plans.values())


def called_by(variant: Variant) -> str:
    """The variant's readable name: the changed fields, each by as much of its end as tells it from the others."""
    if not variant.changes:
        return variant.experiment.name
    changes = dict(variant.changes)
    text = ",".join(f"{ending(field, changes)}={described(value)}" for field, value in changes.items())
    return text.encode()[:LONGEST].decode(errors="ignore").rstrip(",=.-")


def ending(field: str, fields: Iterable[str]) -> str:
    """The shortest end of the dotted field that no other has."""
    parts = field.split(".")
    for length in range(1, len(parts)):
        end = ".".join(parts[-length:])
        if sum(other == end or other.endswith(f".{end}") for other in fields) == 1:
            return end
    return field


def described(value: Any) -> str:
    """A value as a part of a folder's name."""
    if isinstance(value, tuple):
        return "+".join(map(described, value))
    text = type(value).__name__ if is_dataclass(value) else str(value).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.+-]+", "_", text) or "_"


def groups(plans: Sequence[Planned], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the finished runs reached that differ in their seed alone, the best by its mean first: {"name", "runs",
    "metric", "values": {name: {"mean", "deviation" (of the sample; 0 of one run), "min", "max"}}}, of each run's best
    evaluation by its `metric`."""
    together: dict[str, list[tuple[str, dict[str, float]]]] = {}
    for plan, record in builtins.zip(plans, found, strict=True):
        if record["state"] == "finished" and (values := record.get("best") or record.get("evaluation")):
            rest = tuple(change for change in plan.changes if change[0] != SEED)
            numbers = {name: value for name, value in values.items() if name != "step"}
            name = called_by(Variant(plan.experiment, rest))
            together.setdefault(name, []).append((plan.experiment.training.chooses, numbers))
    made = []
    for name, runs in together.items():
        metric = runs[0][0]
        columns = {field: [numbers[field] for _, numbers in runs if field in numbers] for field in runs[0][1]}
        values = {field: spread(column) for field, column in columns.items()}
        made.append({"name": name, "runs": len(runs), "metric": metric, "values": values})

    def rank(group: dict[str, Any]) -> float:
        means = {field: value["mean"] for field, value in group["values"].items()}
        return score(means, group["metric"]) if group["metric"] in means else math.inf

    return sorted(made, key=rank)


def spread(values: Sequence[float]) -> dict[str, float]:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return {"mean": fmean(values), "deviation": deviation, "min": min(values), "max": max(values)}


def records(plans: Sequence[Planned]) -> list[dict[str, Any]]:
    """{"name", "fingerprint", "state", "run"} of each run, and what it gave back, or the "error" that lost it."""
    found = []
    for plan in plans:
        state = plan.state
        error = {"error": plan.lost} if state == "failed" and plan.lost else {}
        about = {"name": plan.name, "fingerprint": plan.fingerprint, "state": state}
        found.append({**about, **plan.result, **error, "run": str(plan.folder)})
    return found
