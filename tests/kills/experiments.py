"""What is killed: the four experiments' tiny(), made tinier, on the text and in the folder that are named in
the environment."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ctx_jax.experiment import Experiment
from ctx_jax.training.schedules import WarmUp
from tests.tiny import smaller


def made(name: str) -> Experiment:
    experiment = smaller(name, Path(os.environ["TEXT"]), Path(os.environ["DATA"]), steps=60, checkpoint_every=5)
    data = replace(experiment.data, batch_size=16, evaluation_batch_size=16, workers=1)
    # Few steps at a low rate: what is compared on several meshes is rounding, which training amplifies.
    optimizer = replace(experiment.optimizer, schedule=WarmUp(rate=float(os.environ.get("RATE", "1e-2")), warmup=1))
    return replace(experiment, data=data, optimizer=optimizer)


def gpt() -> Experiment:
    return made("gpt")


def bert() -> Experiment:
    return made("bert")


def transformer_xl() -> Experiment:
    return made("transformer_xl")


def xlnet() -> Experiment:
    return made("xlnet")
