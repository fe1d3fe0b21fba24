"""Optimizers as configuration, built from optax.

Weight decay falls on every parameter whose name is neither "scale" nor ends in "bias" (LayerNorm and biases are
spared). A parameter under "layers" holds one slice per layer; LAMB and Adafactor treat each slice as a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ctx_jax.training.schedules import InverseSquareRoot, Schedule, WarmUp


class Optimizer(NamedTuple):
    """An optimizer that is ready to run."""

    tx: optax.GradientTransformation
    learning_rate: optax.Schedule
    observe: Callable[[Any, float], Any] = lambda opt_state, loss: opt_state
    """(opt_state, validation loss) -> opt_state: called after each evaluation (NT-ASGD waits for it)."""
    eval_params: Callable[[Any, Any], Any] = lambda params, opt_state: params
    """(params, opt_state) -> the parameters that are evaluated (NT-ASGD's average)."""


class OptimizerConfig(Protocol):
    """What the configurations of this module have in common."""

    def build(self, steps: int) -> Optimizer:
        """The optimizer of a run of `steps` steps."""
        ...


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2014, arXiv 1412.6980), algorithm 1; the defaults are Transformer-XL's (arXiv 1901.02860)."""

    schedule: Schedule = field(default_factory=lambda: WarmUp(rate=2.5e-4, decay="cosine"))
    """Learning rate by step."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    clip: float | None = 0.25
    """Largest global norm of the gradient; None = no clipping."""

    def __post_init__(self) -> None:
        check(self)

    def transforms(self) -> tuple[optax.GradientTransformation, ...]:
        """From the clipped gradient to the direction of the step."""
        return (optax.scale_by_adam(self.b1, self.b2, self.epsilon),)

    def build(self, steps: int) -> Optimizer:
        return assemble(self.schedule.build(steps), self.clip, *self.transforms())


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv 1711.05101), algorithm 2, whose decay is
    multiplied by the learning rate."""

    schedule: Schedule = field(default_factory=lambda: WarmUp(rate=2.5e-4, warmup=2000, decay="cosine"))
    """Learning rate by step."""
    clip: float | None = 1.0
    """Largest global norm of the gradient; None = no clipping."""
    weight_decay: float = 0.01
    """Decay of all but LayerNorm and biases."""
    layer_decay: float = 1.0
    """Each layer's learning rate is this part of that of the layer above, the embeddings' of the lowest layer's; the
    heads have the whole (fine-tuning: Clark et al. 2020, arXiv 2003.10555, appendix B: 0.8)."""
    frozen: int | None = None
    """The embeddings and so many of the lowest layers are not trained (0 = the embeddings alone); None = all are."""

    def build(self, steps: int) -> Optimizer:
        even = self.layer_decay == 1.0 and self.frozen is None
        depth = () if even else (scale_by_depth(self.layer_decay, self.frozen),)
        return assemble(self.schedule.build(steps), self.clip, *self.transforms(), *depth)

    def transforms(self) -> tuple[optax.GradientTransformation, ...]:
        return (*super().transforms(), optax.add_decayed_weights(self.weight_decay, mask=decays))


@dataclass(frozen=True)
class BertAdam(AdamW):
    """AdamW without bias correction, as in the code of BERT (Devlin et al. 2018, arXiv 1810.04805, appendix A.2) and
    XLNet: p -= rate * (m / (sqrt(v) + epsilon) + weight_decay * p)."""

    schedule: Schedule = field(default_factory=lambda: WarmUp(rate=1e-4, warmup=10_000, from_start=True))
    """Learning rate by step."""
    epsilon: float = 1e-6
    """Added to the root of the second moment."""

    def transforms(self) -> tuple[optax.GradientTransformation, ...]:
        adam = scale_by_uncorrected_adam(self.b1, self.b2, self.epsilon)
        return (adam, optax.add_decayed_weights(self.weight_decay, mask=decays))


@dataclass(frozen=True)
class Lamb(AdamW):
    """LAMB (You et al. 2019, arXiv 1904.00962), algorithm 2: AdamW's step, rescaled in each layer to the norm of the
    layer's weights. LayerNorm and biases are neither decayed nor rescaled, as in the code of google-research/albert,
    which leaves out the algorithm's bias correction; here it stays."""

    schedule: Schedule = field(default_factory=lambda: WarmUp(rate=1e-3, warmup=3125, from_start=True))
    """Learning rate by step."""
    epsilon: float = 1e-6
    """Added to the root of the second moment."""

    def transforms(self) -> tuple[optax.GradientTransformation, ...]:
        return (*super().transforms(), optax.masked(per_layer(optax.scale_by_trust_ratio()), decays))


@dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), algorithm 4, without momentum, as T5 uses it: the update is
    clipped to RMS `clip` and multiplied by the RMS of the parameter. Fine-tuning has a constant rate of 1e-3.

    A kernel of more than two axes is factored as the matrix whose sides are nearest in size: [D, H, C] as D x HC.
    """

    schedule: Schedule = field(default_factory=InverseSquareRoot)
    """Learning rate by step, relative to the RMS of each parameter."""
    exponent: float = 0.8
    """The second moment decays by 1 - (t + 1)^-exponent."""
    clip: float = 1.0
    """Largest RMS of the update of one tensor."""
    smallest_scale: float = 1e-3
    """Lower bound of a parameter's RMS."""
    factored_size: int = 128
    """Matrices with a shorter side keep their whole second moment."""

    def __post_init__(self) -> None:
        check(self)

    def build(self, steps: int) -> Optimizer:
        each = optax.chain(
            scale_by_factored_rms(self.exponent, self.factored_size),
            optax.clip_by_block_rms(self.clip),
            optax.scale_by_param_block_rms(self.smallest_scale),
        )
        return assemble(self.schedule.build(steps), None, per_layer(each))


@dataclass(frozen=True)
class Sgd:
    """Plain stochastic gradient descent; decay is added to the (clipped) gradient of every parameter."""

    schedule: Schedule = field(default_factory=lambda: WarmUp(rate=1.0, decay="constant"))
    """Learning rate by step."""
    weight_decay: float = 0.0
    """Decay of all parameters."""
    clip: float | None = None
    """Largest global norm of the gradient; None = no clipping."""

    def __post_init__(self) -> None:
        check(self)

    def build(self, steps: int) -> Optimizer:
        return assemble(self.schedule.build(steps), self.clip, optax.add_decayed_weights(self.weight_decay))


def check(config: Any) -> None:
    """Raises ValueError for a field outside its range."""
    for name in ("b1", "b2"):
        if not 0 <= getattr(config, name, 0.0) < 1:
            raise ValueError(f"{name} {getattr(config, name)}: choose a number from 0 to below 1")
    for name in ("weight_decay", "epsilon"):
        if not getattr(config, name, 0.0) >= 0:
            raise ValueError(f"{name} {getattr(config, name)}: choose 0 or more")
    if not 0 < getattr(config, "layer_decay", 1.0) <= 1:
        raise ValueError(f"layer_decay {config.layer_decay}: choose a part above 0 and up to 1")
    if (getattr(config, "frozen", None) or 0) < 0:
        raise ValueError(f"frozen {config.frozen}: choose 0 layers or more, or None")
    if config.clip is not None and not config.clip > 0:
        raise ValueError(f"clip {config.clip}: choose a norm above 0")


def assemble(schedule: optax.Schedule, clip: float | None, *transforms: optax.GradientTransformation) -> Optimizer:
    """Clipping, then the transforms, then the learning rate."""
    clipping = () if clip is None else (optax.clip_by_global_norm(clip),)
    return Optimizer(optax.chain(*clipping, *transforms, optax.scale_by_learning_rate(schedule)), schedule)


def decays(params: Any) -> Any:
    """The mask of the parameters that weight decay falls on."""

    def by_name(path: Any, leaf: Any) -> bool:
        return path[-1].key != "scale" and not path[-1].key.endswith("bias")

    return jax.tree_util.tree_map_with_path(by_name, params)


ABOVE = ("classifier", "token_classifier", "pooler", "head", "head_bias", "final_norm")
"""Modules that read what the layers made; all but these and the layers' lies below them."""


def scale_by_depth(decay: float, frozen: int | None) -> optax.GradientTransformation:
    """Multiplies the update of layer l of L (from 1; 0 = the embeddings, L + 1 = the heads) by decay^(L + 1 - l), or by
    0 up to layer `frozen`."""

    def stacked(path: Any) -> bool:
        return any(key.key == "layers" for key in path)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        count = max((leaf.shape[0] for path, leaf in leaves if stacked(path)), default=0)
        depths = np.arange(count + 2)
        rates = np.where(depths > (-1 if frozen is None else frozen), decay ** (count + 1.0 - depths), 0.0)
        rates[-1] = 1.0

        def scaled(path: Any, leaf: jax.Array) -> jax.Array:
            if stacked(path):
                return leaf * jnp.asarray(rates[1:-1], leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))
            return leaf * float(rates[-1] if path[0].key in ABOVE else rates[0])

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` on every parameter alone, and on each layer's slice of a stacked one alone. Its state is the parameters'
    tree of the states of `tx`."""

    def over_layers(path: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(function) if any(key.key == "layers" for key in path) else function

    def init(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, leaf: over_layers(path, tx.init)(leaf), params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        results = jax.tree_util.tree_map_with_path(
            lambda path, *leaves: over_layers(path, tx.update)(*leaves), updates, state, params
        )
        return (
            jax.tree.map(lambda _, result: result[0], updates, results),
            jax.tree.map(lambda _, result: result[1], updates, results),
        )

    return optax.GradientTransformation(init, update)


class Moments(NamedTuple):
    """First and second moments of the gradient."""

    mu: Any
    nu: Any


def scale_by_uncorrected_adam(b1: float, b2: float, epsilon: float) -> optax.GradientTransformation:
    """m / (sqrt(v) + epsilon) with the moments as they are, not divided by 1 - b^t."""

    def init(params: Any) -> Moments:
        return Moments(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Moments]:
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu), Moments(mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_factored_rms(exponent: float, factored_size: int) -> optax.GradientTransformation:
    """optax's, for one parameter, seen as a matrix where it has more axes."""
    tx = optax.scale_by_factored_rms(decay_rate=exponent, min_dim_size_to_factor=factored_size)

    def as_matrix(x: jax.Array) -> jax.Array:
        return x.reshape(matrix_shape(x.shape, factored_size))

    def init(params: Any) -> Any:
        return tx.init(as_matrix(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scaled, state = tx.update(as_matrix(updates), state, as_matrix(params))
        return scaled.reshape(updates.shape), state  # pyright: ignore[reportAttributeAccessIssue]

    return optax.GradientTransformation(init, update)


def matrix_shape(shape: tuple[int, ...], factored_size: int) -> tuple[int, ...]:
    """The matrix as which a kernel is factored; its own shape where it is not (moments then keep its sharding)."""
    if len(shape) <= 2:
        return shape
    sides = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    nearest = max(sides, key=min)
    return nearest if min(nearest) >= factored_size else shape
