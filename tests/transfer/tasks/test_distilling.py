"""A run of distillation, from its teacher's folder to a student that is used alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.cli import main
from ctx_jax.experiment import load
from ctx_jax.objectives.distillation import TEACHER
from ctx_jax.runs import open_run
from ctx_jax.training.checkpoints import Checkpoints
from ctx_jax.training.state import TrainState, abstract_fixed, abstract_state


@pytest.fixture(scope="module")
def command(speeches: Path, run_of, tmp_path_factory) -> list[str]:
    run = tmp_path_factory.mktemp("distilled") / "run"
    return [
        "train", "bert:distil", "--from", str(run_of("bert")), "--text", str(speeches), "--run", str(run),
        "--training.steps", "4", "--training.checkpoint-every", "2", "--training.evaluate-every", "0",
        "--training.log-every", "1", "--training.evaluate-batches", "1", "--data.batch-size", "4",
        "--data.reader.length", "32", "--data.folder", str(run.parent),
    ]  # fmt: skip


def test_a_run_is_distilled_and_goes_on_to_the_same_bits(command, run_of, capsys):
    teacher, run = run_of("bert"), Path(command[command.index("--run") + 1])
    main(command)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"loss", "lm", "soft", "cosine", "nll"} <= set(result["evaluation"])
    config = load(run / "experiment.json").model
    assert (config.layers, config.segments, config.pooler, config.classes) == (1, 0, False, None)
    theirs = open_run(teacher).variables["params"]

    def saved(step: int) -> TrainState:
        made = load(run / "experiment.json")
        rows = dict.fromkeys(("tokens", "documents", "positions"), jax.ShapeDtypeStruct((4, 32), jnp.int32))
        mesh, optimizer = made.mesh.build(), made.optimizer.build(4)
        fixed = abstract_fixed(made.objective, rows, mesh)
        with Checkpoints(run) as checkpoints:
            state = checkpoints.restore(step, abstract_state(made.model.build(), optimizer, rows, mesh, fixed))
        return jax.device_get(state)

    first, last = saved(2), saved(4)
    for state in (first, last):
        jax.tree.map(np.testing.assert_array_equal, state.fixed[TEACHER], theirs)
    assert not jax.tree.all(jax.tree.map(np.array_equal, first.params, last.params))
    shutil.rmtree(run / "checkpoints/4")
    (run / "latest").write_text("2\n")
    main(command)
    jax.tree.map(np.testing.assert_array_equal, saved(4), last)

    capsys.readouterr()
    main(["evaluate", str(run), "--text", str(Path(command[command.index("--text") + 1]) / "00.txt")])
    scored = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert scored["loss"] == pytest.approx(2 * scored["nll"]) and "soft" not in scored


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "objective Distillation needs a teacher: name its run with --from"),
        ("gpt", "is a GptConfig: choose a run of BERT to distil"),
    ],
)
def test_a_teacher_is_needed(source, message, command, run_of, tmp_path, capsys):
    words = command[:2] + (["--from", str(run_of(source))] if source else []) + command[4:]
    words[words.index("--run") + 1] = str(tmp_path / "run")
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
