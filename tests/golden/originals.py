"""The original code of google-research/bert and zihangdai/xlnet, imported from clones of it. Needs tensorflow and six.

It was written for TensorFlow 1; what later versions lack of that is put in its place here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import tensorflow  # pyright: ignore[reportMissingImports]

old: Any = tensorflow.compat.v1
old.disable_v2_behavior()


class Flags(SimpleNamespace):
    """`tf.flags`: what is defined has its default, and may be set."""

    def __init__(self) -> None:
        super().__init__(FLAGS=SimpleNamespace())

    def __getattr__(self, name: str) -> Callable[..., None]:
        def define(flag: str, default: Any, *_: Any, **__: Any) -> None:
            setattr(self.FLAGS, flag, default)

        if not name.startswith("DEFINE_"):
            raise AttributeError(name)
        return define


def layer_norm(inputs: Any, begin_norm_axis: int = -1, begin_params_axis: int = -1, scope: str | None = None) -> Any:
    """`tf.contrib.layers.layer_norm` over the last axis."""
    with old.variable_scope(scope, "LayerNorm"):
        width = inputs.shape[-1:]
        beta = old.get_variable("beta", width, initializer=old.zeros_initializer())
        gamma = old.get_variable("gamma", width, initializer=old.ones_initializer())
    mean, variance = old.nn.moments(inputs, [-1], keepdims=True)
    return old.nn.batch_normalization(inputs, mean, variance, beta, gamma, 1e-12)


def dense(
    inputs: Any, units: int, activation: Any = None, kernel_initializer: Any = None, name: str | None = None
) -> Any:
    """`tf.layers.dense` over the last axis."""
    with old.variable_scope(name, "dense"):
        kernel = old.get_variable("kernel", [int(inputs.shape[-1]), units], initializer=kernel_initializer)
        bias = old.get_variable("bias", [units], initializer=old.zeros_initializer())
    outputs = old.tensordot(inputs, kernel, 1) + bias
    return outputs if activation is None else activation(outputs)


def dropout(inputs: Any, *_: Any, training: bool, **__: Any) -> Any:
    """`tf.layers.dropout`; nothing is recorded with dropout."""
    if training:
        raise ValueError("the original asked for dropout, with which nothing is recorded: call it without training")
    return inputs


def shape(x: Any) -> Any:
    """`tf.shape`, as numbers where they are known: the original asserts of them."""
    return np.array(x.shape.as_list()) if x.shape.is_fully_defined() else old.shape(x)


class TensorFlow1(ModuleType):
    """The module that the original code sees as `tensorflow`."""

    def __init__(self) -> None:
        super().__init__("tensorflow")
        self.contrib = SimpleNamespace(layers=SimpleNamespace(layer_norm=layer_norm))
        self.layers = SimpleNamespace(dense=dense, dropout=dropout)
        self.flags = Flags()
        self.logging = SimpleNamespace(info=lambda *_: None)
        self.shape = shape

    def __getattr__(self, name: str) -> Any:
        return getattr(old, name)


def load(folder: Path, *names: str) -> list[Any]:
    """Modules of a clone, each with a TensorFlow of its own flags."""
    seen = {"tensorflow": TensorFlow1(), "sentencepiece": ModuleType("sentencepiece")}
    before = {name: sys.modules.get(name) for name in seen}
    known = set(sys.modules)
    sys.modules.update(seen)
    sys.path.insert(0, str(folder))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]  # both clones have a module `modeling`
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
