"""Checkpoints of a run: sharded, written in the background by orbax, restored straight onto the given shardings.

    RUN/checkpoints/STEP/{params, fixed, opt_state, memory, record}

Parts without arrays are left out; `record` is JSON: the resolved experiment and where its reader started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from ctx_jax.parallel.sharding import parameter_name
from ctx_jax.training.state import TrainState

FOLDER = "checkpoints"
PARTS = ("params", "fixed", "opt_state", "memory")


class Checkpoints:
    """The checkpoints of one run; to be closed (or used as a context), which waits for the last save."""

    def __init__(self, run: Path, keep: int | None = None) -> None:
        """
        Args:
            run: the run's folder.
            keep: how many of the newest checkpoints stay; None = all, for reading.
        """
        self.folder = run.absolute() / FOLDER
        handlers: dict[str, Any] = {part: ocp.PyTreeCheckpointHandler() for part in PARTS}
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=keep is not None, cleanup_tmp_directories=keep is not None
            ),
            item_handlers={**handlers, "record": ocp.JsonCheckpointHandler()},
        )

    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first; waits for one that is being written."""
        self._manager.wait_until_finished()
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The newest step that can be restored."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: TrainState, record: dict[str, Any]) -> None:
        """Copies the state to the host, and returns while it is being written: the state may then be donated.

        Raises RuntimeError if nothing is saved, as orbax does silently for a step that is not newer than the last.
        """
        parts = {part: ocp.args.PyTreeSave(tree) for part in PARTS if jax.tree.leaves(tree := getattr(state, part))}
        with jax.transfer_guard("allow"):
            saved = self._manager.save(step, args=ocp.args.Composite(**parts, record=ocp.args.JsonSave(record)))
        if not saved:
            raise RuntimeError(f"step {step} was not saved: {self.folder} already holds step {self.latest()}")

    def record(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays."""
        self._manager.wait_until_finished()
        with self._whole(step):
            return self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]

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
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _whole(self, step: int) -> Iterator[None]:
        """What orbax raises of a checkpoint that has lost files, or parts of them, becomes one line."""
        try:
            yield
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} is damaged ({type(error).__name__}): delete its folder, and the "
                "one before it counts"
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


def begun(run: Path) -> bool:
    """Whether a run has a checkpoint: without one there is nothing in its folder that could be lost."""
    with Checkpoints(run) as checkpoints:
        return checkpoints.latest() is not None


def find_checkpoint(path: Path) -> tuple[Path, int]:
    """The run and the step that `path` names: a run's folder (its newest step) or one of its `checkpoints/STEP`.

    Raises FileNotFoundError with one line if there is no checkpoint.
    """
    if path.parent.name == FOLDER and path.name.isdigit():
        run, step = path.parent.parent, int(path.name)
    else:
        run, step = path, None
    with Checkpoints(run) as checkpoints:
        steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        raise FileNotFoundError(f"{path} has no checkpoint: give a run's folder or its {FOLDER}/STEP")
    return run, steps[-1] if step is None else step


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """{path: shape} of the arrays of a tree."""
    return {parameter_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
