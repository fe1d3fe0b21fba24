"""What one model type of another implementation consists of: its config, its classes, the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctx_jax.interop.fields import Fields
from ctx_jax.interop.layout import Rule
from ctx_jax.interop.pickles import Lazy
from ctx_jax.interop.tensors import read_tensors

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's names of the activations that our models have."""
OPTIMIZER = r"global_step|.*/adam_[mv]"
"""Names of TensorFlow's variables that are no parameters (`Family.buffers`)."""
Parts = frozenset[str]


@dataclass(frozen=True)
class Family:
    """A model type, as config.json names it."""

    model_type: str
    prefix: str
    """Before the body's names where there is a head; the bare model's have none."""
    config: type
    """Our config's class."""
    kinds: Mapping[str, Parts]
    """Their classes, and the parts that each has beside the body; the bare model has no prefix, and is named last."""
    marks: Mapping[str, tuple[str, ...]]
    """How a part is known: each of these begins the name of some tensor ("{}": the prefix, if there is one)."""
    read: Callable[[Fields, Parts], Any]
    """Our config."""
    rules: Callable[[Any, Parts], Sequence[Rule]]
    """The tensors of our config with these parts, heads' names as they are, the body's after "{prefix}"."""
    write: Callable[[Any, Parts], dict[str, Any]] | None = None
    """Their config.json, without model_type and architectures; None = cannot be exported. Raises ValueError where
    theirs cannot express ours."""
    ignored: str = ""
    """Fields of config.json that may have any value, because they do not change what is computed."""
    buffers: str = r"(?!)"
    """Regular expression of whole names, after the prefix, that are no parameters."""
    simplify: Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]] = field(default=lambda c, p: (c, p))
    """What a config and parameters that were read come down to."""

    config_file: str = "config.json"
    """The file in a folder that has the fields."""
    read_tensors: Callable[[Path], dict[str, Lazy]] = read_tensors
    """{name: tensor} of a folder."""

    @property
    def bare(self) -> str:
        """The class without heads."""
        return list(self.kinds)[-1]

    def parts(self, names: Iterable[str], base: str) -> Parts:
        """The parts of which tensors are there."""
        names = tuple(names)
        return frozenset(
            part
            for part, starts in self.marks.items()
            if all(any(name.startswith(start.format(base)) for name in names) for start in starts)
        )

    def kind(self, parts: Parts, named: Sequence[str]) -> str:
        """The class that has most of the parts and no other; of equal ones that which config.json names."""
        fitting = [kind for kind, own in self.kinds.items() if own <= parts]
        most = max((len(self.kinds[kind]) for kind in fitting), default=0)
        best = [kind for kind in fitting if len(self.kinds[kind]) == most]
        return next((kind for kind in named if kind in best), best[0] if best else self.bare)

    def prefixed(self, rules: Iterable[Rule], base: str) -> list[Rule]:
        """The rules with the body's prefix, or without."""
        return [
            Rule(tuple(name.replace("{prefix}", base) for name in rule.theirs), rule.ours, rule.form, rule.part)
            for rule in rules
        ]


def labels(classes: int) -> dict[str, Any]:
    """The names of that many labels, for config.json."""
    names = {str(index): f"LABEL_{index}" for index in range(classes)}
    return {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}


def needs(config: Any, model: str, **fields: Any) -> None:
    """Raises ValueError if a field of the config has another value than the one that their model implements."""
    for name, wanted in fields.items():
        if getattr(config, name) != wanted:
            raise ValueError(f"{name} {getattr(config, name)!r} cannot be exported: {model} has {wanted!r}")
