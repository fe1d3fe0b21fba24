"""What one model type of another implementation consists of: its config, its classes, the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctx_jax.interop.fields import Fields
from ctx_jax.interop.layout import Rule, linear
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
    rivals: tuple[str, ...] = ()
    """Parts whose tensors share names: if one of them is marked, what is there is told by the class that config.json
    names, or else the first that is marked."""
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

    def parts(self, names: Iterable[str], base: str, named: Sequence[str]) -> Parts:
        """The parts of which tensors are there; `named` are the classes that config.json names."""
        names = tuple(names)
        found = frozenset(
            part
            for part, starts in self.marks.items()
            if all(any(name.startswith(start.format(base)) for name in names) for start in starts)
        )
        rivals = [part for part in self.rivals if part in found]
        if not rivals:
            return found
        told = [self.kinds[kind] for kind in named if kind in self.kinds and self.kinds[kind].intersection(self.rivals)]
        return found.difference(rivals).union(told[0] if told else rivals[:1])

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


def token_heads() -> list[Rule]:
    """A head at every token: of labels, or of the start and the end of an answer."""
    return [
        *linear("classifier", "token_classifier", part="token"),
        *linear("qa_outputs", "token_classifier", part="answer"),
    ]


def task_heads(fields: Fields, parts: Parts) -> dict[str, Any]:
    """The task heads that are parts, as fields of our config."""
    return {
        "classes": fields.classes() if "sequence" in parts else None,
        "token_classes": fields.classes() if "token" in parts else 2 if "answer" in parts else None,
    }


def label_names(config: Any, parts: Parts, names: Sequence[str] | None) -> dict[str, Any]:
    """The names of the labels of a task head, for config.json; nothing for other heads.

    Raises ValueError if there are not as many as the head has.
    """
    if not parts & {"sequence", "token"}:
        return {}
    count = config.classes if "sequence" in parts else config.token_classes
    names = [f"LABEL_{index}" for index in range(count)] if names is None else names
    if len(names) != count:
        raise ValueError(f"{len(names)} labels cannot be exported: the head has {count}, name each of them")
    by_id = {str(index): name for index, name in enumerate(names)}
    return {"id2label": by_id, "label2id": {name: index for index, name in enumerate(names)}}


def needs_heads(config: Any, parts: Parts) -> None:
    """Raises ValueError if the config lacks one of the task heads that are parts."""
    for part, name, task in (
        ("sequence", "classes", "sequence classification"),
        ("token", "token_classes", "token classification"),
    ):
        if part in parts and getattr(config, name) is None:
            raise ValueError(f"{name} None cannot be exported: a model for {task} needs {name}")
    if "answer" in parts:
        needs(config, "a model for question answering", token_classes=2)


def needs(config: Any, model: str, **fields: Any) -> None:
    """Raises ValueError if a field of the config has another value than the one that their model implements."""
    for name, wanted in fields.items():
        if getattr(config, name) != wanted:
            raise ValueError(f"{name} {getattr(config, name)!r} cannot be exported: {model} has {wanted!r}")
