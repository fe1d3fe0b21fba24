"""The grid over which BERT was fine-tuned (Devlin et al. 2018, appendix A.3): batches of 16 and 32, rates 5e-5, 3e-5
and 2e-5, 2, 3 and 4 epochs: 18 runs. The best is chosen by the task's metric on the development set.

    python -m ctx_jax sweep experiments/sweeps/finetuning.py:bert -- --from RUN --text examples.tsv

With --seeds 5 before the -- each is run five times, and the best is chosen by the mean.

The functions that begin with `decay` cross two rates with layer-wise decay: each layer's rate is 1, 0.9 or 0.8 of that
of the layer above it (discriminative fine-tuning: Howard and Ruder 2018, section 3.2).
"""

from __future__ import annotations

from ctx_jax.experiment import Experiment, find
from launch import sweep

SIZES = {"data.batch_size": (16, 32), "training.epochs": (2.0, 3.0, 4.0)}
RATES = (5e-5, 3e-5, 2e-5)


def _grid(experiment: Experiment, rates: tuple[float, ...]) -> list[sweep.Variant]:
    return sweep.grid(experiment, {"optimizer.schedule.rate": rates, **SIZES})


def _decayed(experiment: Experiment, rates: tuple[float, ...]) -> list[sweep.Variant]:
    return sweep.grid(experiment, {"optimizer.schedule.rate": rates, "optimizer.layer_decay": (1.0, 0.9, 0.8)})


def bert() -> list[sweep.Variant]:
    """A text, or two, and a class."""
    return _grid(find("finetune:classification"), RATES)


def bert_regression() -> list[sweep.Variant]:
    """Two texts and a number, as in STS-B."""
    return _grid(find("finetune:regression"), RATES)


def tiny() -> list[sweep.Variant]:
    """The same for the tiny models of these experiments, which want larger rates."""
    return _grid(find("finetune:classification"), (3e-3, 1e-3, 3e-4))


def rte() -> list[sweep.Variant]:
    """A task of GLUE; those that its paper calls small want several seeds."""
    return _grid(find("glue:rte"), RATES)


def decay() -> list[sweep.Variant]:
    """A text, or two, and a class."""
    return _decayed(find("finetune:classification"), (5e-5, 1e-4))


def decay_regression() -> list[sweep.Variant]:
    """Two texts and a number."""
    return _decayed(find("finetune:regression"), (5e-5, 1e-4))


def decay_tagging() -> list[sweep.Variant]:
    """A tag for each word."""
    return _decayed(find("finetune:tagging"), (1e-4, 2e-4))
