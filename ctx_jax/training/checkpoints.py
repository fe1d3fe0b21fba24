"""Checkpoints of a run: sharded, written in the background by orbax, verified, restored onto the given shardings.

    RUN/checkpoints/STEP/{params, fixed, opt_state, memory, record, checksums.sha256}      RUN/latest

Parts without arrays are left out; `record` is JSON: the step, the resolved experiment, where its reader started,
whether the step was evaluated, and the metrics till then. A step gets its name when all of its files are written and
hashed; `latest` says which was the last that did. The newest steps that are not whole any more, or another run's, are
moved to RUN/damaged, and the one before them counts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from ctx_jax.data import settle, write_durably
from ctx_jax.identity import differences
from ctx_jax.parallel.hosts import gather
from ctx_jax.parallel.sharding import parameter_name
from ctx_jax.progress import tell
from ctx_jax.serialization import from_json
from ctx_jax.training import checksums
from ctx_jax.training.metrics import is_line, read_metrics
from ctx_jax.training.retention import Retention, lowest, scores
from ctx_jax.training.state import TrainState

FOLDER, DAMAGED, LATEST = "checkpoints", "damaged", "latest"
PARTS = ("params", "fixed", "opt_state", "memory")
RECORD, FILE = "record", "metadata"
METRICS = "metrics"
"""Where a record holds the last line of each kind of `Metrics`."""

logging.getLogger("absl").setLevel(logging.CRITICAL)  # what orbax logs as an error, with its stack, it raises, too

STEP = re.compile("0|[1-9][0-9]*")
"""The name of a step's folder."""

WHOLE = 2**31 - 1
"""Stands for the number of a damaged file where there is none."""


class Sealed(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A step that is being written: it gets its checksums under a temporary name, then its own."""

    async def finalize(self) -> None:
        """Called in the background by one process, when all have written; for the parts of a step, too."""
        if self.get_final().parent.name != FOLDER:
            return await super().finalize()
        written = ocp.path.atomicity.AtomicRenameTemporaryPath(
            self.get(),
            self.get().with_name(self.get().name + ".written"),
            checkpoint_metadata_store=self._checkpoint_metadata_store,
        )
        await written.finalize()
        checksums.write(Path(written.get_final()))
        os.rename(written.get_final(), self.get_final())
        folder = Path(self.get_final()).parent
        settle(folder)
        write_durably(folder.parent / LATEST, f"{self.get_final().name}\n")
        return None


class Checkpoints:
    """The checkpoints of one run; to be closed (or used as a context), which waits for the last save."""

    def __init__(self, run: Path, keep: int | None = None, keep_every: int = 0) -> None:
        """
        Args:
            run: the run's folder.
            keep: how many of the newest checkpoints stay; None = all, for reading.
            keep_every: steps that are a multiple of this stay for good; 0 = none.
        """
        self.run, self.folder = run, run.absolute() / FOLDER
        self.writes = keep is not None
        self.retention = Retention(keep, keep_every)
        handlers: dict[str, Any] = {part: ocp.PyTreeCheckpointHandler() for part in PARTS}
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self.retention,
                create=self.writes,
                cleanup_tmp_directories=self.writes,
                temporary_path_class=Sealed,
            ),
            item_handlers={**handlers, RECORD: ocp.JsonCheckpointHandler(FILE)},
        )

    def steps(self) -> list[int]:
        """The steps that are there, oldest first; waits for one that is being written."""
        self._manager.wait_until_finished()
        return saved(self.run)

    def latest(self) -> int | None:
        """The newest step."""
        return max(self.steps(), default=None)

    def newest_whole(self) -> int | None:
        """The newest step that is this run's and of which every file is what was written; None if there is no step.
        Those after it are told of, and set aside if this is to write.

        Raises ValueError, and moves nothing, if there are steps but none is whole.
        """
        steps = self.steps()
        if len(set(gather(max(steps, default=0)))) > 1:
            raise ValueError(f"the hosts do not see the same checkpoints in {self.folder}: choose a folder they share")
        problems: dict[int, str] = {}
        for step in reversed(steps):
            if (problem := self.problem(step)) is None:
                break
            problems[step] = problem
        else:
            if not steps:
                return None
            raise ValueError(
                f"{problems[steps[-1]]}, and no other checkpoint of {self.run} can be used: nothing is changed; put "
                "back a copy of one, or begin a new run with another --run"
            )
        for newer, problem in problems.items():
            place = f"; it is moved to {self._set_aside(newer)}" if self.writes else ""
            tell(f"note: {problem}{place}: step {step} is used")
        if (last := latest_saved(self.run)) is not None and last > steps[-1]:
            tell(f"note: step {last} was saved, but is no longer in {self.run / FOLDER}: step {step} is used")
        return step

    def problem(self, step: int) -> str | None:
        """What is wrong with a step, in one line; None if nothing is. The hosts share the reading of its files."""
        folder = self.folder / str(step)
        found = checksums.damage(folder, jax.process_index(), jax.process_count())
        first = min(gather(WHOLE if found is None else found[0]))
        name = f"checkpoint {self.run / FOLDER / str(step)}"
        if first == WHOLE:
            stranger = self._stranger(step)
            return stranger and f"{name} {stranger}"
        if found is None or found[0] != first:
            found = checksums.damage(folder, first, WHOLE)
        return f"{name} is damaged: {found[1] if found else 'it has changed'}"

    def _stranger(self, step: int) -> str | None:
        """Why a step that is whole is not this one of this run, if it is not: it was copied, or renamed."""
        record, own = self.record(step), self.run / "experiment.json"
        if (held := record.get("step", step)) != step:
            return f"holds step {held}"
        if not own.is_file():
            return None
        ours = from_json(json.loads(own.read_text()), str(own))
        try:
            changed = differences(ours, from_json(record["experiment"]))
        except (ValueError, KeyError, TypeError) as error:
            return f"is of an experiment that cannot be read ({error})"
        return f"is of another experiment ({'; '.join(changed[:3])})" if changed else None

    def _set_aside(self, step: int) -> Path:
        """Moves a step out of the way, under a name that is not taken; returns its new place."""
        folder = self.run / DAMAGED
        taken = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        names = (f"{step}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, len(taken) + 3))))
        place = folder / next(name for name in names if name not in taken)
        gather(step)  # every host has looked
        if jax.process_index() == 0:
            folder.mkdir(exist_ok=True)
            shutil.move(self.folder / str(step), place)  # the checkpoints may be a link to another disk
        gather(step)  # and none goes on before it is moved
        self._manager.reload()
        return place

    def save(self, step: int, state: TrainState, record: dict[str, Any]) -> None:
        """Copies the state to the host, and returns while it is being written: the state may then be donated.

        Args:
            record: JSON, to which the step is added.

        Raises RuntimeError if nothing is saved, as orbax does silently for a step that is not newer than the last.
        """
        parts = {part: ocp.args.PyTreeSave(tree) for part in PARTS if jax.tree.leaves(tree := getattr(state, part))}
        with jax.transfer_guard("allow"), self._written():
            about = ocp.args.JsonSave({"step": step, **record})
            saved = self._manager.save(step, args=ocp.args.Composite(**parts, record=about))
        if not saved:
            raise RuntimeError(f"step {step} was not saved: {self.folder} already holds step {self.latest()}")

    def wait(self) -> None:
        """Until what was saved is on disk. Raises OSError if that could not be written."""
        with self._written():
            self._manager.wait_until_finished()

    def record(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays."""
        self._manager.wait_until_finished()
        with self._whole(step):
            return read_record(self.run, step)

    def evaluations(self) -> list[dict[str, Any]]:
        """The last line of evaluation that each step knows of; a step whose record is damaged knows of none."""
        lines = []
        for step in self.steps():
            with suppress(ValueError):
                lines.append(self.record(step).get(METRICS, {}).get("evaluation"))
        return [line for line in lines if is_line(line)]

    def restore(self, step: int, abstract: TrainState, parts: Sequence[str] = PARTS) -> TrainState:
        """The state of a step, bit for bit, each device reading its own part.

        Args:
            abstract: shapes with shardings (`state.abstract_state`), on any mesh.
            parts: what is restored; the rest stays abstract.

        Raises ValueError, naming the first array that differs, if the checkpoint is of another model or optimizer.
        """
        wanted = {part: tree for part in parts if jax.tree.leaves(tree := getattr(abstract, part))}
        for part, tree in wanted.items():
            ours, theirs = shapes(tree), self._shapes(step, part)
            for name in sorted(ours.keys() | theirs.keys()):
                if ours.get(name) != theirs.get(name):
                    raise ValueError(
                        f"checkpoint {self.folder / str(step)}: {part} {name} has shape {theirs.get(name)}, this "
                        f"experiment's has {ours.get(name)}: choose the experiment that it was trained with"
                    )
        restored = self._restore(step, wanted)
        step_array = jax.device_put(np.int32(step), abstract.step.sharding)
        return abstract._replace(step=step_array, **{part: restored[part] for part in wanted})

    def restore_params(self, step: int, abstract: Any) -> Any:
        """The parameters alone, for evaluation; arguments and errors as `restore`."""
        state = TrainState(jax.ShapeDtypeStruct((), np.int32), abstract, {}, None, None)
        return self.restore(step, state, ("params",)).params

    def restore_matching(self, step: int, params: Any) -> tuple[Any, list[str]]:
        """Replaces those parameters that the checkpoint has by the same name and shape (fine-tuning).

        Args:
            params: arrays, whose shardings the restored ones get.

        Returns the parameters, and the names of those that stayed as they are.
        """
        theirs, ours = self._shapes(step, "params"), dict[Any, Any](flatten_dict(params))
        matching = {path: leaf for path, leaf in ours.items() if theirs.get("/".join(path)) == leaf.shape}
        abstract = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for path, leaf in matching.items()
        }
        restored = self._restore(step, {"params": unflatten_dict(abstract)}, partial=True)["params"] if matching else {}
        rest = ["/".join(path) for path in ours if path not in matching]
        return unflatten_dict({**ours, **flatten_dict(restored)}), rest

    def close(self) -> None:
        """Waits for what is being written."""
        with self._written():
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _written(self) -> Iterator[None]:
        """What fails in the background names the folder, in one line."""
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None and error.errno != errno.ENOSPC:
                raise
            if "No space left" not in str(error):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder)) from error

    @contextmanager
    def _whole(self, step: int) -> Iterator[None]:
        """What orbax raises of a checkpoint that has lost files, or parts of them, becomes one line."""
        try:
            yield
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} is damaged ({type(error).__name__}): move its folder away, and "
                "the one before it counts"
            ) from error

    def _shapes(self, step: int, part: str) -> dict[str, tuple[int, ...]]:
        self._manager.wait_until_finished()
        with self._whole(step):
            metadata = self._manager.item_metadata(step)[part]
            return {} if metadata is None else shapes(metadata.tree)

    def _restore(self, step: int, wanted: dict[str, Any], partial: bool = False) -> dict[str, Any]:
        arguments = {
            part: ocp.args.PyTreeRestore(
                tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=partial
            )
            for part, tree in wanted.items()
        }
        with self._whole(step):
            return dict(self._manager.restore(step, args=ocp.args.Composite(**arguments)).items())


def saved(run: Path) -> list[int]:
    """The steps in a run's folder, oldest first. Raises ValueError if something else has the place of their folder."""
    folder = run / FOLDER
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"{folder} is no folder, nor a link to one that is there: put that back, or move it away")
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if STEP.fullmatch(name))


def read_record(run: Path, step: int) -> dict[str, Any]:
    """What was saved beside a step's arrays. Raises OSError, ValueError or TypeError if it is damaged."""
    return dict(json.loads((run / FOLDER / str(step) / RECORD / FILE).read_text()))


def latest_saved(run: Path) -> int | None:
    """The last step that was saved, whether it is still there or not; None if there is none, or it is not known."""
    try:
        text = (run / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if STEP.fullmatch(text) else None


def begun(run: Path) -> bool:
    """Whether a run has a checkpoint, from which it would go on. Raises ValueError if it had some, and has none."""
    steps = saved(run)
    if not steps and (step := latest_saved(run)) is not None:
        raise ValueError(
            f"{run} was saved at step {step}, but no checkpoint is left in {run / FOLDER}: put it back, or begin anew, "
            f"with another --run or after moving {run} away"
        )
    return bool(steps)


def named(path: Path) -> tuple[Path, int | None]:
    """The run and the step that `path` names: a run's folder (None: its newest step) or one of its `checkpoints/STEP`.

    Raises FileNotFoundError with one line if there is no checkpoint.
    """
    run, step = path, None
    if path.parent.name == FOLDER and STEP.fullmatch(path.name):
        run, step = path.parent.parent, int(path.name)
    steps = saved(run)
    if not steps or (step is not None and step not in steps):
        raise FileNotFoundError(f"{path} has no checkpoint: give a run's folder or its {FOLDER}/STEP")
    return run, step


def find_checkpoint(path: Path, choice: str = "last", metric: str = "loss") -> tuple[Path, int]:
    """The run that `path` names, and a step of it whose files are what was written.

    Args:
        path: as for `named`, which may choose the step.
        choice: "last" (the newest that is whole), "best" (the lowest `metric` of those that were evaluated) or a step.

    Raises FileNotFoundError if there is no such checkpoint, ValueError if it is damaged, or all are.
    """
    run, step = named(path)
    steps = saved(run)
    known = ", ".join(map(str, steps))
    if step is not None and choice not in ("last", str(step)):
        raise ValueError(f"--checkpoint {choice}: {path} is a checkpoint already, leave the option out")
    if choice not in ("last", "best"):
        if not choice.isdecimal() or int(choice) not in steps:
            raise ValueError(
                f"--checkpoint {choice}: {run} has no such checkpoint: choose best, last or one of {known}"
            )
        step = int(choice)
    with Checkpoints(run) as checkpoints:
        if choice == "best":
            step = lowest(scores((*read_metrics(run), *checkpoints.evaluations()), metric), steps)
            if step is None:
                raise ValueError(
                    f"--checkpoint best: {run} has no checkpoint of a step that was evaluated for {metric!r}: choose "
                    f"last or one of {known}"
                )
        if step is None:
            step = checkpoints.newest_whole()
            assert step is not None
        elif problem := checkpoints.problem(step):
            raise ValueError(f"{problem}: choose another step of {known}")
    return run, step


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """{path: shape} of the arrays of a tree."""
    return {parameter_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
