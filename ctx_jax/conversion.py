"""Folders of other implementations become run folders, and run folders become theirs (`interop`).

A run folder that was made so has one checkpoint, step 0, of parameters alone, the tokenizer, an experiment that fits
the model, and imported.json: what it was made of.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ctx_jax.contract import Reader
from ctx_jax.data import building, write_durably
from ctx_jax.data.pairs import Pairs, Sentences
from ctx_jax.data.readers import Blocks, Lanes
from ctx_jax.data.tokenizers import CONFIG, Pretrained, Tokenizer, load_tokenizer
from ctx_jax.experiment import Data, Experiment, save
from ctx_jax.interop import KINDS, Imported, export_folder, import_folder, kinds_of
from ctx_jax.interop.backends import write_backend
from ctx_jax.interop.layout import parameter_shapes
from ctx_jax.interop.tokenizers import import_tokenizer, read_json
from ctx_jax.layers.parameters import unboxed
from ctx_jax.models.bert import BertConfig
from ctx_jax.models.gpt import GptConfig
from ctx_jax.models.xlnet import XLNetConfig
from ctx_jax.objectives.causal import Causal
from ctx_jax.objectives.masked import Masked
from ctx_jax.objectives.permutation import Permutation
from ctx_jax.objectives.segment import Segment
from ctx_jax.progress import tell
from ctx_jax.runs import open_run
from ctx_jax.serialization import nearest, to_json
from ctx_jax.text import IMPORTED, TOKENIZER
from ctx_jax.training.checkpoints import FOLDER, Checkpoints, named
from ctx_jax.training.loop import EVALUATED, READER, Training
from ctx_jax.training.optimizers import AdamW
from ctx_jax.training.schedules import WarmUp
from ctx_jax.training.state import TrainState
from ctx_jax.transfer.inputs import LENGTH


def is_run(path: Path) -> bool:
    """Whether a path is a run's folder or one of its checkpoints."""
    run = path.parent.parent if path.parent.name == FOLDER else path
    return (run / "experiment.json").is_file()


def import_run(
    source: Path,
    run: Path,
    *,
    leave_out: Sequence[str] = (),
    tokenizer: Path | None = None,
    lowercase: bool | None = None,
) -> dict[str, Any]:
    """Makes a run folder of a model of another implementation and its tokenizer.

    Heads that its kind does not have are initialised, and said to be.

    Args:
        leave_out: tensors or modules that are to be ignored, as `interop.import_folder`.
        tokenizer: the folder of its tokenizer, theirs or one of ours; None = `source`.
        lowercase: as `interop.tokenizers.import_tokenizer`.

    Returns {"run", "source", "kind", "parameters", "vocabulary", "initialized", "left_out"}.

    Raises ValueError or FileNotFoundError with one line for what cannot be read whole, and if `run` is there already.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is no folder: name that of a run, or of a model that others published")
    imported = import_folder(source, leave_out)
    with building(run) as partial:
        if partial is None:
            raise ValueError(f"{run} is there already: choose another folder")
        size = bring_tokenizer(tokenizer or source, partial / TOKENIZER, lowercase).vocabulary.size
        if size > imported.config.vocabulary_size:
            raise ValueError(
                f"the tokenizer in {tokenizer or source} has {size} ids, the model in {source} rows for "
                f"{imported.config.vocabulary_size}: name the folder of its own tokenizer (--tokenizer)"
            )
        experiment = experiment_of(imported, Pretrained(run / TOKENIZER, size), run.name)
        save(experiment, partial / "experiment.json")
        params = completed(imported)
        check_room(partial, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
        with Checkpoints(partial, keep=1) as checkpoints:
            state = TrainState(np.int32(0), params, {}, None, None)
            checkpoints.save(0, state, {"experiment": to_json(experiment), READER: 0, EVALUATED: True})
        about = {
            "source": source.resolve().name,
            "kind": imported.kind,
            "labels": imported.labels,
            "initialized": imported.absent,
            "left_out": imported.left_out,
            "kept": imported.kept,
        }
        write_durably(partial / IMPORTED, json.dumps(about, indent=1) + "\n")
    shapes = parameter_shapes(replace(imported.config, vocabulary_multiple=1))
    count = sum(math.prod(shape) for path, shape in shapes.items() if path not in imported.absent)
    tell(f"{run}: {imported.kind} of {source}, {count:,} parameters, {size:,} ids")
    for verb, names in (("initialized, for it has none of them", imported.absent), ("left out", imported.left_out)):
        if names:
            tell(f"note: {verb}: {', '.join(names)}")
    return {"run": str(run), "parameters": count, "vocabulary": size, **about, "source": str(source)}


def check_room(folder: Path, size: int) -> None:
    """Raises OSError if the disk cannot hold so many bytes; they hardly compress, and are written in the background."""
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {size:,} bytes", str(folder.parent))


def bring_tokenizer(source: Path, folder: Path, lowercase: bool | None) -> Tokenizer:
    """Puts a tokenizer, theirs or one of ours, into a folder."""
    if "type" not in read_json(source / CONFIG, {}):
        try:
            return import_tokenizer(source, folder, lowercase)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}, or the name of its folder: --tokenizer") from None
    if lowercase is not None:
        raise ValueError(f"--lowercase: {source} is a tokenizer of ours, which knows that: leave the option out")
    shutil.copytree(source, folder)
    return load_tokenizer(folder)


def experiment_of(imported: Imported, tokenizer: Pretrained, name: str) -> Experiment:
    """An experiment that goes on pretraining a model as it was begun, on the text that it is given."""
    config = imported.config
    reader, objective = task_of(config, "pair" in KINDS[imported.kind].kinds[imported.kind])
    return Experiment(
        name=name,
        data=Data(reader=reader, tokenizer=tokenizer, evaluation_batch_size=8),
        model=config,
        objective=objective,
        optimizer=AdamW(schedule=WarmUp(rate=5e-5, warmup=100)),
        training=Training(evaluate_every=200, checkpoint_every=200),
    )


def task_of(config: Any, pairs: bool) -> tuple[Reader, Any]:
    """How a model reads and what it predicts; `pairs`: it has a head for the next sentence."""
    length = getattr(config, "max_length", LENGTH)
    if isinstance(config, BertConfig):
        predictions = max(1, round(0.15 * length))
        if pairs and config.segments:
            return Pairs(length), Masked(max_predictions=predictions, relation=1.0)
        return Sentences(length), Masked(max_predictions=predictions)
    if isinstance(config, GptConfig):
        return Blocks(length, join_documents=True), Causal()
    if isinstance(config, XLNetConfig) and not config.causal:
        if not config.memory_length:
            return Blocks(length, join_documents=True), Permutation(num_predict=length // 6, perm_size=length)
        kept = config.reuse_length or length
        reader = Lanes(2 * kept if config.reuse_length else kept, join_documents=True, stride=kept)
        return reader, Permutation(num_predict=reader.length // 6, perm_size=kept)
    if not config.memory_length:
        return Blocks(length, join_documents=True), Causal()
    kept = config.reuse_length or min(length, config.memory_length)
    return Lanes(kept, join_documents=True), Segment()


def completed(imported: Imported) -> dict[str, Any]:
    """The parameters with those that are absent initialised; the same ones each time."""
    if not imported.absent:
        return imported.params
    model = imported.config.build()
    batch = {name: jnp.ones((1, 1), jnp.int32) for name in ("tokens", "documents")}
    batch["positions"] = jnp.zeros((1, 1), jnp.int32)

    def absent() -> dict[tuple[str, ...], jax.Array]:
        params: Any = unboxed(model.init(jax.random.key(0), batch, method="initialize")["params"])
        return {
            path: leaf
            for path, leaf in dict[Any, Any](flatten_dict(params)).items()
            if "/".join(path) in imported.absent
        }

    return unflatten_dict({**flatten_dict(imported.params), **jax.jit(absent)()})


def export_run(
    path: Path, folder: Path, *, kind: str | None = None, shard_bytes: int = 5 * 10**9, checkpoint: str = "last"
) -> dict[str, Any]:
    """Writes a checkpoint of a run as transformers loads it, with its tokenizer.

    Args:
        kind: their class; None = the one that the run was imported as, else the one that holds most of the model.

    Returns {"folder", "run", "step", "kind", "left_out", "tokenizer"}.

    Raises ValueError if `folder` is there already, or if that class cannot hold the model.
    """
    trained = open_run(path, checkpoint)
    config, tokenizer = trained.experiment.model, trained.tokenizer
    origin = named(path)[0] / IMPORTED
    about = json.loads(origin.read_text()) if origin.is_file() else {}
    kinds = kinds_of(config)
    if not kinds:
        raise ValueError(f"a {type(config).__name__} with these fields cannot be exported: transformers has none")
    kind = str(kind or about.get("kind") or kinds[0])
    if kind not in KINDS:
        raise ValueError(f"--kind {kind!r} is not known{nearest(kind, list(kinds))}; there are {', '.join(kinds)}")
    same = kind == about.get("kind")
    given: dict[str, Any] = {"labels": about.get("labels"), "kept": about.get("kept")} if same else {}
    if lacking := has_nothing_for(tokenizer):
        tell(f"note: without its tokenizer: {lacking}")
    try:
        left_out = export_folder(
            config,
            trained.variables["params"],
            folder,
            kind,
            vocabulary=tokenizer.vocabulary,
            tokenizer=None if lacking else tokenizer,
            shard_bytes=shard_bytes,
            **given,
        )
    except ValueError as error:
        others = "" if kind in kinds else f"; it can be written as {', '.join(kinds)} (--kind)"
        raise ValueError(f"{error}{others}") from None
    tell(f"{folder}: {kind} of {path}, step {trained.step}")
    if left_out:
        tell(f"note: left out, for {kind} has none of them: {', '.join(left_out)}")
    result = {"folder": str(folder), "run": str(path), "step": trained.step, "kind": kind, "left_out": left_out}
    return {**result, "tokenizer": not lacking}


def has_nothing_for(tokenizer: Tokenizer) -> str:
    """Why transformers has no such tokenizer; empty if it has."""
    try:
        write_backend(tokenizer)
    except ValueError as error:
        return str(error)
    return ""
