"""How the tensors of another implementation and our parameters correspond, said once and read in both directions.

A `Rule` names some of our parameters and one tensor of theirs; its `Form` says how one is made of the other. A name of
theirs with "{}" stands for one tensor per layer: our parameters have a leading layer axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from ctx_jax.interop.pickles import Lazy
from ctx_jax.layers.parameters import unboxed

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """One tensor of theirs from some arrays of ours, and back."""

    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray, Sequence[Shape]], list[np.ndarray]]


def single(join: Callable[[np.ndarray], np.ndarray], split: Callable[[np.ndarray, Shape], np.ndarray]) -> Form:
    """A form of one array."""
    return Form(lambda ours: join(ours[0]), lambda theirs, shapes: [split(theirs, shapes[0])])


SAME = single(lambda x: x, lambda x, shape: x)
FLAT = single(lambda x: x.reshape(-1), lambda x, shape: x.reshape(shape))
INTO = single(lambda x: x.reshape(x.shape[0], -1).T, lambda x, shape: x.T.reshape(shape))
"""PyTorch's Linear [outputs, inputs]; ours [inputs, ...outputs] (heads and channels)."""
BACK = single(lambda x: x.reshape(-1, x.shape[-1]).T, lambda x, shape: x.T.reshape(shape))
"""The same; ours [...inputs, outputs]."""
CONV_INTO = single(lambda x: x.reshape(x.shape[0], -1), lambda x, shape: x.reshape(shape))
"""GPT's Conv1D and TensorFlow's dense, [inputs, outputs]."""
CONV_BACK = single(lambda x: x.reshape(-1, x.shape[-1]), lambda x, shape: x.reshape(shape))
HEADS_LAST = single(lambda x: np.moveaxis(x, -1, 0), lambda x, shape: np.moveaxis(x, 0, -1))
"""XLNet's projection back [D, H, C]; ours [H, C, D]."""
BACKWARDS = single(lambda x: x[::-1], lambda x, shape: x[::-1])


def reshaped(*lead: int) -> Form:
    """Theirs has axes of one element in front."""
    return single(lambda x: x.reshape(*lead, *x.shape), lambda x, shape: x.reshape(shape))


def zeros(*shape: int) -> Form:
    """Theirs has a tensor that ours has not, and that adds nothing."""
    return Form(lambda ours: np.zeros(shape, np.float32), lambda theirs, shapes: [])


def table(*sizes: int) -> Form:
    """Rows of bands of that many ids, one array of ours each, padded to a multiple; theirs holds the ids alone."""

    def split(theirs: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        bands = np.split(theirs, np.cumsum(sizes)[:-1])
        return [
            np.pad(band, ((0, shape[0] - len(band)), *((0, 0),) * (band.ndim - 1)))
            for band, shape in zip(bands, shapes, strict=True)
        ]

    return Form(lambda ours: np.concatenate([x[:size] for x, size in zip(ours, sizes, strict=True)]), split)


def together(form: Form, axis: int) -> Form:
    """Several arrays of equal shape, each of that form, in one tensor along an axis: query, key and value."""

    def split(theirs: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        parts = np.split(theirs, len(shapes), axis)
        return [form.split(part, [shape])[0] for part, shape in zip(parts, shapes, strict=True)]

    return Form(lambda ours: np.concatenate([form.join([x]) for x in ours], axis), split)


@dataclass(frozen=True)
class Rule:
    """One tensor of theirs."""

    theirs: tuple[str, ...]
    """Its name and the names of tensors that are tied to it: what is written, and what may be there too."""
    ours: tuple[str, ...]
    """Paths of our parameters, as "stack/layers/attention/query/kernel"."""
    form: Form = SAME
    part: str | None = None
    """The part of the model to which it belongs, if that may be missing: a head, a pooler."""


def norm(theirs: str, ours: str, part: str | None = None) -> list[Rule]:
    """A LayerNorm."""
    return [
        Rule((f"{theirs}.weight",), (f"{ours}/scale",), part=part),
        Rule((f"{theirs}.bias",), (f"{ours}/bias",), part=part),
    ]


def linear(theirs: str, ours: str, form: Form = INTO, part: str | None = None) -> list[Rule]:
    """A linear map with a bias."""
    return [
        Rule((f"{theirs}.weight",), (f"{ours}/kernel",), form, part),
        Rule((f"{theirs}.bias",), (f"{ours}/bias",), FLAT, part),
    ]


def layer_norm(theirs: str, ours: str, part: str | None = None) -> list[Rule]:
    """A LayerNorm of TensorFlow."""
    return [
        Rule((f"{theirs}/gamma",), (f"{ours}/scale",), part=part),
        Rule((f"{theirs}/beta",), (f"{ours}/bias",), part=part),
    ]


def dense(theirs: str, ours: str, form: Form = CONV_INTO, part: str | None = None) -> list[Rule]:
    """A linear map with a bias of TensorFlow."""
    return [
        Rule((f"{theirs}/kernel",), (f"{ours}/kernel",), form, part),
        Rule((f"{theirs}/bias",), (f"{ours}/bias",), FLAT, part),
    ]


def parameter_shapes(config: Any) -> dict[str, Shape]:
    """{path: shape} of a model's parameters; nothing is computed."""
    model = config.build()
    batch = {name: jnp.zeros((1, 1), jnp.int32) for name in ("tokens", "positions")}
    batch["documents"] = jnp.ones((1, 1), jnp.int32)
    tree: Any = jax.eval_shape(lambda: unboxed(model.init(jax.random.key(0), batch, method="initialize")["params"]))
    flat: dict[str, Any] = flatten_dict(tree, sep="/")  # pyright: ignore[reportAssignmentType]
    return {path: leaf.shape for path, leaf in flat.items()}


def instances(rule: Rule, shapes: Mapping[str, Shape]) -> Iterator[tuple[tuple[str, ...], int | None, list[Shape]]]:
    """(their names, layer, our shapes) of each tensor that a rule stands for."""
    ours = [shapes[path] for path in rule.ours]
    if "{}" not in rule.theirs[0]:
        yield rule.theirs, None, ours
        return
    for layer in range(ours[0][0]):
        yield tuple(name.format(layer) for name in rule.theirs), layer, [shape[1:] for shape in ours]


def load(
    rules: Sequence[Rule], shapes: Mapping[str, Shape], tensors: Mapping[str, Lazy], where: str, config: str
) -> dict[str, np.ndarray]:
    """Our parameters from their tensors, in fp32; `where` and `config` name the folder and its configuration's file.

    Raises ValueError, naming every tensor that is missing and every one that no rule reads, every shape that differs,
    or tied tensors that are not equal.
    """
    expected: dict[str, Shape] = {}
    missing: list[str] = []
    for rule in rules:
        for names, _, ours in instances(rule, shapes):
            shape = rule.form.join([np.broadcast_to(np.float32(0), one) for one in ours]).shape
            present = [name for name in names if name in tensors]
            expected.update(dict.fromkeys(present, shape))
            if not present:
                missing.append(names[0])
    unused = [name for name in tensors if name not in expected]
    complaints = [f"{word} {', '.join(names)}" for word, names in (("missing", missing), ("unused", unused)) if names]
    if complaints:
        remedy = "; what this model has no place for can be left out by name (--leave-out)" if unused else ""
        raise ValueError(f"the tensors in {where} are not those of its {config}: {'; '.join(complaints)}{remedy}")
    wrong = [
        f"{name} has shape {tensors[name].shape} but {config} makes it {shape}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}")

    params: dict[str, np.ndarray] = {}
    for rule in rules:
        layers = []
        for names, _, ours in instances(rule, shapes):
            first, *tied = (name for name in names if name in tensors)
            value = floats(tensors[first], first, where)
            for name in tied:
                if not np.array_equal(value, floats(tensors[name], name, where)):
                    raise ValueError(f"{where}: {name} differs from {first}, and this model has one tensor for both")
            layers.append(rule.form.split(value, ours))
        stacked = "{}" in rule.theirs[0]
        for index, path in enumerate(rule.ours):
            value = np.stack([layer[index] for layer in layers]) if stacked else layers[0][index]
            params[path] = np.ascontiguousarray(value)
    return params


def floats(tensor: Lazy, name: str, where: str) -> np.ndarray:
    """A tensor's values in fp32; raises ValueError if they are no floating-point numbers."""
    value = tensor.read()
    if value.dtype.kind in "biu":
        raise ValueError(f"{where}: {name} is of type {value.dtype}: quantised weights cannot be read")
    value = value.astype(np.float32)
    if not np.isfinite(value).all():
        raise ValueError(f"{where}: {name} holds values that are not finite: fetch or save it again")
    return value


def save(rules: Iterable[Rule], params: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of each of their tensors; tied ones once."""
    for rule in rules:
        ours = [np.asarray(params[path], np.float32) for path in rule.ours]
        for names, layer, _ in instances(rule, {path: x.shape for path, x in zip(rule.ours, ours, strict=True)}):
            yield names[0], rule.form.join(ours if layer is None else [x[layer] for x in ours])
