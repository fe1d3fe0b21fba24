"""The models: one paper, or close family of papers, a file; its config and its module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ctx_jax.layers.feedforward import ACTIVATIONS


def validate(config: Any) -> None:
    """Checks what the configs of several models have in common; raises ValueError with one line."""

    def given(*names: str) -> list[tuple[str, Any]]:
        return [(name, getattr(config, name)) for name in names if getattr(config, name, None) is not None]

    for name, value in given("position_offset", "segments"):
        if value < 0:
            raise ValueError(f"{name} {value} is negative: choose 0 or more")
    sizes = ("vocabulary_size", "vocabulary_multiple", "width", "layers", "heads", "feed_forward", "max_length")
    for name, value in given(*sizes, "classes", "token_classes", "band"):
        if value < 1:
            raise ValueError(f"{name} {value} is not a size: choose 1 or more")
    for name, value in given("epsilon"):
        if not value > 0:
            raise ValueError(f"{name} {value} may divide by zero: choose a number above 0")
    for name, value in given("dropout", "attention_dropout"):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} {value} is not a rate: choose at least 0 and less than 1")
    if config.width % config.heads:
        raise ValueError(
            f"heads {config.heads} does not divide width {config.width}: choose a divisor of {config.width}"
        )
    choices = (("activation", tuple(ACTIVATIONS)), ("dtype", ("float32", "bfloat16")))
    for name, allowed in choices:
        for _, value in given(name):
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is not known: choose one of {', '.join(allowed)}")


def check_length(length: int, max_length: int) -> None:
    """Raises ValueError if a sequence has more tokens than the model has positions."""
    if length > max_length:
        raise ValueError(
            f"sequence of {length} tokens exceeds max_length {max_length}: shorten it or choose max_length {length}"
        )


def all_layers(embedding: jax.Array, outputs: dict[str, Any]) -> jax.Array | None:
    """`ModelOutput.layers`: the embedding [B, T, D] before the layers' outputs [B, L, T, D], if they were collected."""
    if "layers" not in outputs:
        return None
    return jnp.concatenate([embedding[:, None], outputs["layers"]], axis=1)
