"""The learning rate and the seed of a very small GPT: four runs of a few seconds each on two cores.

python -m ctx_jax sweep experiments/sweeps/rates.py --jobs 2
"""

from __future__ import annotations

from dataclasses import replace

from ctx_jax.experiment import find
from launch import sweep


def rates() -> list[sweep.Variant]:
    tiny = find("gpt:tiny")
    small = replace(
        tiny,
        name="gpt-rates",
        data=replace(tiny.data, reader=replace(tiny.data.reader, length=64)),
        model=replace(tiny.model, width=32, heads=2, feed_forward=64, layers=1),
        training=replace(tiny.training, steps=40, evaluate_every=0, evaluate_batches=2, checkpoint_every=0),
    )
    return sweep.grid(small, {"optimizer.schedule.rate": (1e-3, 1e-2), "training.seed": (0, 1)})
