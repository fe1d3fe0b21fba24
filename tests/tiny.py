"""The experiments' own tiny(), made tinier: the real configs with less of everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ctx_jax.data.corpora import TextFiles
from ctx_jax.experiment import Experiment, find
from ctx_jax.training.loop import Training
from ctx_jax.training.schedules import WarmUp

STEPS = 3


def smaller(name: str, speeches: Path, folder: Path, **training: Any) -> Experiment:
    """The experiment's tiny() with one narrow layer, short windows and a little text, with dropout."""
    tiny = find(f"{name}:tiny")
    reader = replace(tiny.data.reader, length=32)
    data = replace(
        tiny.data,
        reader=reader,
        corpus=TextFiles(speeches),
        tokenizer=replace(tiny.data.tokenizer, vocabulary_size=340),
        batch_size=4,
        evaluation_batch_size=4,
        folder=folder,
    )
    sizes: dict[str, Any] = {"vocabulary_size": 340, "width": 16, "heads": 2, "feed_forward": 32, "layers": 2}
    if hasattr(tiny.model, "memory_length"):
        sizes["memory_length"] = 24
    objective = tiny.objective
    if name == "xlnet":
        sizes["reuse_length"] = 16
        objective = replace(objective, num_predict=5, perm_size=16)
    return replace(
        tiny,
        data=data,
        objective=objective,
        optimizer=replace(tiny.optimizer, schedule=WarmUp(rate=1e-2, warmup=1)),
        model=replace(tiny.model, dropout=0.2, attention_dropout=0.1, **sizes),
        training=Training(**{"steps": STEPS, "log_every": 1, **training}),
    )
