"""Learning rates as functions of the number of finished steps, so that the first step of a warm-up has rate 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

Decay = Literal["linear", "cosine", "inverse_square_root", "constant"]


@dataclass(frozen=True)
class WarmUp:
    """Linear warm-up from 0 to `rate`, then decay.

    linear: BERT (arXiv 1810.04805), XLNet; cosine: GPT, Transformer-XL; inverse_square_root: "Attention Is All You
    Need" (arXiv 1706.03762), equation 3: rate * sqrt(warmup / step), with rate = d^-0.5 * warmup^-0.5.

    Linear and cosine decay begin where the warm-up ends (the code of XLNet and RoBERTa, Transformer-XL's in TensorFlow)
    or, `from_start`, at step 0, and the warm-up stands in for their first steps (the code of BERT, ALBERT and GPT,
    Transformer-XL's in PyTorch): the rate then falls from `rate` to where the decay is by then.
    """

    rate: float = 1e-4
    """The rate at the end of the warm-up, from which the decay goes down."""
    warmup: int = 0
    """Steps of warm-up."""
    share: float = 0.0
    """Warm-up as a share of the run's steps, instead."""
    decay: Decay = "linear"
    """Shape of what follows the warm-up."""
    final: float = 0.0
    """Where linear and cosine decay end, as a fraction of `rate`."""
    steps: int | None = None
    """The step at which linear and cosine decay end; None = the run's last one."""
    from_start: bool = False
    """Whether linear and cosine decay count from step 0 (BERT) or from the end of the warm-up."""

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise ValueError(f"schedule rate {self.rate}: choose a number above 0")
        if self.warmup < 0:
            raise ValueError(f"schedule warmup {self.warmup}: choose 0 or more steps")
        if not 0 <= self.share < 1:
            raise ValueError(f"schedule share {self.share}: choose a share of the steps from 0 to below 1")
        if self.share and self.warmup:
            raise ValueError(f"schedule share {self.share} and warmup {self.warmup} say the same: choose one of them")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"schedule steps {self.steps}: choose 1 or more, or None for the run's last step")
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule final {self.final}: choose a fraction of the rate from 0 to 1")

    def build(self, steps: int) -> optax.Schedule:
        """The schedule of a run of `steps` steps."""
        warmup = self.warmup or math.ceil(self.share * steps)
        begin = 0 if self.from_start else warmup
        length = max((self.steps or steps) - begin, 1)
        match self.decay:
            case "linear":
                decay = optax.linear_schedule(self.rate, self.rate * self.final, length)
            case "cosine":
                decay = optax.cosine_decay_schedule(self.rate, length, alpha=self.final)
            case "inverse_square_root":
                origin = max(warmup, 1)
                decay = inverse_square_root(self.rate * math.sqrt(origin), origin, begin)
            case "constant":
                decay = optax.constant_schedule(self.rate)
        if warmup == 0:
            return decay

        def schedule(count: Any) -> jax.Array:  # optax.linear_schedule(0, rate, n) loses digits of the first steps
            return jnp.where(count < warmup, self.rate * count / warmup, decay(count - begin))

        return schedule


@dataclass(frozen=True)
class InverseSquareRoot:
    """T5's rate (arXiv 1910.10683, section 3.1.2): scale / sqrt(max(step, hold))."""

    scale: float = 1.0
    """Numerator; Adafactor multiplies it by the RMS of each parameter."""
    hold: int = 10_000
    """Steps at the first, constant rate."""

    def __post_init__(self) -> None:
        if self.hold < 1:
            raise ValueError(f"schedule hold {self.hold}: choose at least 1 step")

    def build(self, steps: int) -> optax.Schedule:
        """The schedule; it does not depend on the length of the run."""
        return inverse_square_root(self.scale, self.hold)


Schedule = WarmUp | InverseSquareRoot


def inverse_square_root(scale: float, hold: int, offset: int = 0) -> optax.Schedule:
    """scale / sqrt(max(count + offset, hold))."""

    def schedule(count: Any) -> jax.Array:
        return scale / jnp.sqrt(jnp.maximum(count + offset, hold))

    return schedule
