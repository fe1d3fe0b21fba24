"""Each optimizer against a plain numpy float64 computation of two steps; stacked layers against separate ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ctx_jax.training.optimizers import Adafactor, Adam, AdamW, BertAdam, Lamb, Sgd, decays, matrix_shape
from ctx_jax.training.schedules import InverseSquareRoot, WarmUp

RATE = 0.1
CONSTANT = WarmUp(rate=RATE, decay="constant")
SHAPES = {"kernel": (3, 4), "bias": (4,), "scale": (4,)}


def draw(seed, shapes=SHAPES):
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape) for name, shape in shapes.items()}


def run(config, params, *gradients):
    """Parameters after a step with each gradient, in fp32."""
    optimizer = config.build(100)

    def steps(params):
        state = optimizer.tx.init(params)
        for gradient in gradients:
            updates, state = optimizer.tx.update(jax.tree.map(jnp.float32, gradient), state, params)
            params = optax.apply_updates(params, updates)
        return params

    return jax.jit(steps)(jax.tree.map(jnp.float32, params))


def check(config, step):
    """`step(name, p, g, memory, t)` -> new p, in float64, for each parameter; `memory` is the parameter's own dict."""
    params, gradients = draw(0), [draw(1), draw(2)]
    found = run(config, params, *gradients)
    for name, p in params.items():
        memory = {}
        for t, gradient in enumerate(gradients):
            clip = getattr(config, "clip", None)
            norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
            g = gradient[name] * (min(1.0, clip / norm) if clip and not isinstance(config, Adafactor) else 1.0)
            p = step(name, p, g, memory, t + 1)
        np.testing.assert_allclose(found[name], p, rtol=2e-6, atol=2e-6)


def adam_direction(g, memory, t, epsilon, corrected=True, b1=0.9, b2=0.99):
    memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * g**2
    m, v = (memory["m"] / (1 - b1**t), memory["v"] / (1 - b2**t)) if corrected else (memory["m"], memory["v"])
    return m / (np.sqrt(v) + epsilon)


def test_adam_clips_the_global_norm():
    check(
        Adam(CONSTANT, b2=0.99, epsilon=1e-3, clip=0.25),
        lambda name, p, g, memory, t: p - RATE * adam_direction(g, memory, t, 1e-3),
    )


def test_adamw_decays_kernels_only():
    check(
        AdamW(CONSTANT, b2=0.99, epsilon=1e-3, clip=1.0, weight_decay=0.1),
        lambda name, p, g, memory, t: (
            p - RATE * (adam_direction(g, memory, t, 1e-3) + (0.1 * p if name == "kernel" else 0))
        ),
    )


def test_berts_adam_has_no_bias_correction():
    check(
        BertAdam(CONSTANT, b2=0.99, epsilon=1e-3, weight_decay=0.1),
        lambda name, p, g, memory, t: (
            p - RATE * (adam_direction(g, memory, t, 1e-3, corrected=False) + (0.1 * p if name == "kernel" else 0))
        ),
    )


def test_lamb_rescales_kernels_to_their_norm():
    def step(name, p, g, memory, t):
        direction = adam_direction(g, memory, t, 1e-3)
        if name == "kernel":
            direction = direction + 0.1 * p
            direction = direction * np.linalg.norm(p) / np.linalg.norm(direction)
        return p - RATE * direction

    check(Lamb(CONSTANT, b2=0.99, epsilon=1e-3, weight_decay=0.1), step)


def test_sgd_adds_the_decay_of_every_parameter_to_the_clipped_gradient():
    check(Sgd(CONSTANT, weight_decay=0.2, clip=0.5), lambda name, p, g, memory, t: p - RATE * (g + 0.2 * p))


def test_adafactor_by_algorithm_4():
    schedule = InverseSquareRoot(scale=1.0, hold=4)

    def rms(x):
        return np.sqrt((x**2).mean())

    def step(name, p, g, memory, t):
        decay, square = 1 - t**-0.8, g**2 + 1e-30
        if name == "kernel":
            memory["row"] = decay * memory.get("row", 0) + (1 - decay) * square.mean(1)
            memory["column"] = decay * memory.get("column", 0) + (1 - decay) * square.mean(0)
            second = np.outer(memory["row"], memory["column"]) / memory["row"].mean()
        else:
            memory["v"] = decay * memory.get("v", 0) + (1 - decay) * square
            second = memory["v"]
        update = g / np.sqrt(second)
        update = update / max(1.0, rms(update) / 0.5)
        return p - 0.5 * max(1e-3, rms(p)) * update  # 0.5 = 1 / sqrt(4)

    check(Adafactor(schedule, clip=0.5, factored_size=3), step)


@pytest.mark.parametrize("config", [Lamb(CONSTANT), Adafactor(CONSTANT, factored_size=3)], ids=["lamb", "adafactor"])
def test_stacked_layers_are_treated_one_by_one(config):
    layers = [draw(seed) for seed in (0, 1)]
    gradients = [[draw(10 * t + seed) for seed in (2, 3)] for t in range(2)]
    layers[1]["kernel"] *= 20.0  # layers of different norms

    def stacked(trees):
        return {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *trees)}

    def separate(trees):
        return {f"layer_{index}": tree for index, tree in enumerate(trees)}

    one = run(config, stacked(layers), *map(stacked, gradients))
    other = run(config, separate(layers), *map(separate, gradients))
    for index in range(2):
        jax.tree.map(
            lambda x, y, i=index: np.testing.assert_allclose(x[i], y, rtol=1e-5),
            one["layers"],
            other[f"layer_{index}"],
        )


def test_adafactor_sees_attention_kernels_as_matrices():
    assert matrix_shape((768, 12, 64), 128) == (768, 768)
    assert matrix_shape((12, 64, 512), 128) == (768, 512)
    assert matrix_shape((16, 4, 4), 128) == (16, 4, 4)
    shapes = {"kernel": (16, 4, 4)}
    params, gradient = draw(0, shapes), draw(1, shapes)
    whole = run(Adafactor(CONSTANT, factored_size=8), params, gradient)["kernel"]
    flat = jax.tree.map(lambda x: x.reshape(16, 16), (params, gradient))
    np.testing.assert_allclose(
        whole.reshape(16, 16), run(Adafactor(CONSTANT, factored_size=8), *flat)["kernel"], rtol=1e-6
    )


def test_adafactor_keeps_rows_and_columns_only():
    shapes = {"layers": {"kernel": jax.ShapeDtypeStruct((3, 256, 4, 64), jnp.float32)}}
    state = jax.eval_shape(Adafactor().build(10).tx.init, shapes)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 3 * (256 + 256 + 8)


def test_decay_mask_goes_by_name():
    params = {
        "embedding": 0,
        "layers": {"attention": {"kernel": 0, "content_bias": 0}, "norm": {"scale": 0, "bias": 0}},
        "scale": 0,
        "bias_table": 0,
    }
    assert decays(params) == {
        "embedding": True,
        "layers": {"attention": {"kernel": True, "content_bias": False}, "norm": {"scale": False, "bias": False}},
        "scale": False,
        "bias_table": True,
    }


def test_a_zero_parameter_is_not_stuck_under_lamb():
    params, gradient = {"kernel": np.zeros((2, 2))}, {"kernel": np.ones((2, 2))}
    moved = run(Lamb(CONSTANT, epsilon=0.0, clip=None, weight_decay=0.0), params, gradient)
    np.testing.assert_allclose(moved["kernel"], -RATE, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(b2=1.0), "b2 1.0"),
        (lambda: Adam(b1=-0.1), "b1 -0.1"),
        (lambda: BertAdam(weight_decay=-1.0), "weight_decay -1.0"),
        (lambda: Sgd(clip=0.0), "clip 0.0"),
        (lambda: Adafactor(clip=-1.0), "clip -1.0"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"layer_decay": 0.5}, (0.125, [0.25, 0.5], 1.0)),
        ({"frozen": 1}, (0.0, [0.0, 1.0], 1.0)),
        ({"frozen": 0, "layer_decay": 0.5}, (0.0, [0.25, 0.5], 1.0)),
        ({"frozen": 2}, (0.0, [0.0, 0.0], 1.0)),
    ],
)
def test_rates_by_depth(settings, rates):
    params = {
        "tokens": {"embedding": jnp.ones((3, 2))},
        "stack": {"layers": {"kernel": jnp.ones((2, 4, 2))}},
        "classifier": {"kernel": jnp.ones((2, 2))},
    }
    gradients = jax.tree.map(lambda x: 3.0 * x, params)
    plain, slower = (AdamW(schedule=WarmUp(rate=0.1), clip=None, **chosen).build(10).tx for chosen in ({}, settings))
    whole, _ = plain.update(gradients, plain.init(params), params)
    found, _ = slower.update(gradients, slower.init(params), params)
    part = jax.tree.map(lambda a, b: a / b, found, whole)
    np.testing.assert_allclose(part["tokens"]["embedding"], rates[0], rtol=1e-6)
    np.testing.assert_allclose(part["stack"]["layers"]["kernel"][:, 0, 0], rates[1], rtol=1e-6)
    np.testing.assert_allclose(part["classifier"]["kernel"], rates[2], rtol=1e-6)


def test_depths_that_are_none():
    with pytest.raises(ValueError, match=r"layer_decay 1.5: choose a part above 0 and up to 1"):
        AdamW(layer_decay=1.5)
    with pytest.raises(ValueError, match="frozen -1: choose 0 layers or more, or None"):
        AdamW(frozen=-1)
