"""Models of other implementations: folders as Hugging Face lays them out, read into our configs and parameters, and
written from them; and TensorFlow's checkpoints of BERT and XLNet, as their authors published them, read.

    imported = import_folder(Path("bert-base-uncased"))
    imported.config.build().apply({"params": imported.params}, batch)
    export_folder(imported.config, imported.params, Path("mine"), imported.kind)

Nothing is loaded or written in part without being told: every tensor that is unused or missing is an error, unless it
is left out by name, and so is every field of config.json that our models cannot honour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict, unflatten_dict

from ctx_jax.contract import Vocabulary
from ctx_jax.data import building
from ctx_jax.data.tokenizers import Tokenizer
from ctx_jax.interop.bert import BERT, BERT_CHECKPOINT, DISTILBERT, ROBERTA
from ctx_jax.interop.family import Family, label_names
from ctx_jax.interop.fields import Fields, read_fields
from ctx_jax.interop.gpt import GPT, GPT2
from ctx_jax.interop.layout import Rule, load, parameter_shapes, save
from ctx_jax.interop.tensors import write_tensors
from ctx_jax.interop.tokenizers import export_tokenizer
from ctx_jax.interop.transformer_xl import TRANSFORMER_XL
from ctx_jax.interop.xlnet import XLNET, XLNET_CHECKPOINT

FAMILIES = (BERT, ROBERTA, DISTILBERT, GPT, GPT2, XLNET, TRANSFORMER_XL)
KINDS: dict[str, Family] = {kind: family for family in FAMILIES for kind in family.kinds}
"""Their classes by name."""
CHECKPOINTS = (BERT_CHECKPOINT, XLNET_CHECKPOINT)
"""TensorFlow's, each known by its configuration's file; their kinds are Hugging Face's."""


KEPT = """pad_token_id bos_token_id eos_token_id classifier_dropout seq_classif_dropout qa_dropout summary_first_dropout
summary_last_dropout"""
"""Fields that our models have nothing for, and theirs use: where a row ends, the dropout before a head."""


class Imported(NamedTuple):
    """A model of another implementation."""

    config: Any
    """Ours."""
    params: dict[str, Any]
    """Our tree of parameters, numpy arrays in fp32: all that the folder has. What it lacks is named in `absent`."""
    kind: str
    """The class that the tensors make, as "BertForPreTraining"."""
    left_out: tuple[str, ...]
    """Their tensors that were left out by name."""
    absent: tuple[str, ...]
    """Our parameters, as "head/dense/kernel", of heads that this kind does not have: to be initialised before use."""
    labels: tuple[str, ...] | None
    """The names of the labels of a head for sequence or token classification, by their ids, if config.json has them."""
    kept: dict[str, Any]
    """Those of the fields `KEPT` that config.json has, to be written again."""


def import_folder(folder: Path, leave_out: Sequence[str] = ()) -> Imported:
    """Reads config.json (of a TensorFlow checkpoint bert_config.json or xlnet_config.json) and the tensors of a folder.

    The heads are those of which there are tensors, whatever class config.json names; only where two heads' tensors have
    the same names it decides. `leave_out` names tensors, or modules with all their tensors ("answer_class",
    "cls/squad"), that our model has no place for and that are to be ignored.

    Raises FileNotFoundError for missing files and ValueError, with one line, for tensors that are missing, unused,
    misshapen or untied, for a field of config.json that our models cannot honour, and for pickles that hold more than
    tensors.
    """
    folder = Path(folder)
    family, fields = recognise(folder)
    tensors = {renamed(name): tensor for name, tensor in family.read_tensors(folder).items()}
    left_out = tuple(name for name in tensors if any(belongs(name, module) for module in leave_out))
    for module in leave_out:
        if not any(belongs(name, module) for name in left_out):
            raise ValueError(f"--leave-out {module!r} names no tensor in {folder}: leave the name away")
    base = family.prefix if any(name.startswith(family.prefix) for name in tensors) else ""
    buffer = re.compile(f"{re.escape(base)}({family.buffers})")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out and not buffer.fullmatch(name)}
    named = fields.names("architectures")
    parts = family.parts(tensors, base, named)
    try:
        config = family.read(fields, parts)
    except ValueError as error:  # our config's own checks do not know the file
        raise ValueError(f"{fields.where}: {str(error).removeprefix(f'{fields.where}: ')}") from None
    fields.finish(family.ignored.split())
    if config.layers > len(tensors):
        raise ValueError(
            f"{fields.where} has {config.layers:,} layers, and there are {len(tensors):,} tensors: mend it"
        )
    rules = rules_of(family, config, parts, base)
    shapes = parameter_shapes(config)
    params = load(rules, shapes, tensors, str(folder), family.config_file)
    absent = tuple(path for path in shapes if path not in params)
    config, params = family.simplify(config, params)
    kind = family.kind(parts, named)
    labels = fields.labels() if parts & {"sequence", "token"} else None
    kept = {name: fields.raw(name) for name in KEPT.split() if name in fields}
    return Imported(config, unflatten_dict(params, sep="/"), kind, left_out, absent, labels, kept)


def export_folder(
    config: Any,
    params: Any,
    folder: Path,
    kind: str,
    *,
    vocabulary: Vocabulary | None = None,
    labels: Sequence[str] | None = None,
    kept: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    shard_bytes: int = 5 * 10**9,
) -> tuple[str, ...]:
    """Writes a new folder with config.json and the tensors of one of their classes, which transformers loads.

    `kind` is a name in `KINDS`; heads that this class does not have are left out, and the names of those parameters
    returned. `vocabulary` gives config.json the ids of special tokens, `labels` the names by id of the labels of a head
    for sequence or token classification (LABEL_0, ... without), `kept` the fields that an import kept. `tokenizer` is
    written too. Files hold at most `shard_bytes` of tensors.

    Nothing is left behind if writing fails. Raises ValueError if the folder exists, or if that class cannot hold this
    model.
    """
    folder = Path(folder)
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not known: choose one of {', '.join(KINDS)}")
    family = KINDS[kind]
    if family.write is None:
        raise ValueError(f"kind {kind!r} can be read, but not written")
    if not isinstance(config, family.config):
        raise ValueError(f"kind {kind!r} is made of a {family.config.__name__}, not of a {type(config).__name__}")
    if shard_bytes < 1:
        raise ValueError(f"--shard-bytes {shard_bytes} holds nothing: choose 1 or more")
    parts = family.kinds[kind]
    values = {"architectures": [kind], "model_type": family.model_type, **family.write(config, parts)}
    values |= special_ids(values, vocabulary) | label_names(config, parts, labels) | dict(kept or {})
    rules = rules_of(family, config, parts, "" if kind == family.bare else family.prefix)
    ours = flatten_dict(params, sep="/")
    lacking = [path for rule in rules for path in rule.ours if path not in ours]
    if lacking:
        raise ValueError(f"kind {kind!r} needs parameters that this model lacks: {', '.join(lacking)}")
    with building(folder) as partial:
        if partial is None:
            raise ValueError(f"{folder} is there already: choose another folder")
        write_tensors(partial, save(rules, ours), shard_bytes)
        text = json.dumps({**values, "torch_dtype": "float32"}, indent=2, sort_keys=True)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        if tokenizer is not None:
            export_tokenizer(tokenizer, partial)
    written = {path for rule in rules for path in rule.ours}
    return tuple(path for path in ours if path not in written)


def kinds_of(config: Any) -> tuple[str, ...]:
    """The classes that can hold a model of this config, those first that hold most of it; of equal ones those with a
    head for a task."""

    def holds(kind: str) -> bool:
        family = KINDS[kind]
        if family.write is None or not isinstance(config, family.config):
            return False
        try:
            family.write(config, family.kinds[kind])
        except ValueError:
            return False
        return True

    parts = {kind: KINDS[kind].kinds[kind] for kind in KINDS if holds(kind)}
    return tuple(sorted(parts, key=lambda kind: (-len(parts[kind]), "lm" in parts[kind])))


def rules_of(family: Family, config: Any, parts: frozenset[str], base: str) -> list[Rule]:
    """The rules of the parts that are there, with the body's prefix."""
    rules = [rule for rule in family.rules(config, parts) if rule.part is None or rule.part in parts]
    paths = [path for rule in rules for path in rule.ours]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ValueError(
            f"two heads of {', '.join(sorted(parts))} would be {twice[0]}: leave one out by name (--leave-out)"
        )
    return family.prefixed(rules, base)


def recognise(folder: Path) -> tuple[Family, Fields]:
    """What kind of model a folder holds, and the fields of its configuration."""
    if not (folder / "config.json").is_file():
        for family in CHECKPOINTS:
            if (folder / family.config_file).is_file():
                return family, read_fields(folder / family.config_file)
    fields = read_fields(folder / "config.json")
    for family in FAMILIES:
        if family.model_type == fields.raw("model_type"):
            return family, fields
    raise fields.refuse("model_type", f"is one of {', '.join(family.model_type for family in FAMILIES)}")


def belongs(name: str, module: str) -> bool:
    """Whether a tensor has that name or is inside the module of that name."""
    return name == module or name.startswith((f"{module}.", f"{module}/"))


def renamed(name: str) -> str:
    """The first BERTs call a LayerNorm's parameters as in TensorFlow."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def special_ids(values: dict[str, Any], vocabulary: Vocabulary | None) -> dict[str, Any]:
    """The ids of special tokens for config.json; none where they are not known, for a class's defaults may not fit.

    Raises ValueError if a class that derives positions from the padding id is given another one.
    """
    given = values.get("pad_token_id")
    if vocabulary is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": given}
    if given is not None and given != vocabulary.pad:
        raise ValueError(
            f"padding id {vocabulary.pad} does not fit position_offset {given + 1}: RoBERTa's positions start after it"
        )
    return {"bos_token_id": vocabulary.begin, "eos_token_id": vocabulary.end, "pad_token_id": vocabulary.pad}
