"""Named tensors in a folder, as Hugging Face lays them out: safetensors or pickled state_dicts, in one file or several
with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ctx_jax.data import share
from ctx_jax.interop.pickles import Lazy, read_state_dict

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
"""The names of a folder's one file, in the order in which they are looked for; an index has ".index.json" more."""


def read_tensors(folder: Path) -> dict[str, Lazy]:
    """{name: tensor} of a folder; nothing but names and shapes is read yet.

    Raises FileNotFoundError if there is none of the files, ValueError if one of them cannot be read or the index and
    its files disagree.
    """
    for name in (SAFE, PICKLED):
        if (folder / name).is_file():
            return read_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return read_indexed(index)
    raise FileNotFoundError(
        f"no tensors in {folder}: it needs {SAFE} or {PICKLED}, or the index of several ({SAFE}.index.json)"
    )


def read_file(path: Path) -> dict[str, Lazy]:
    """{name: tensor} of one file."""
    if path.suffix != ".safetensors":
        return read_state_dict(path)
    try:
        file = safe_open(path, "numpy")
        names = file.keys()
        return {name: Lazy(tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name)) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file that can be read ({error}): fetch it again") from None


def read_indexed(index: Path) -> dict[str, Lazy]:
    """{name: tensor} of the files that an index names, each as the index says where it is."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
        if not all(isinstance(file, str) for file in files):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is no index: it needs a weight_map from tensors to files") from None
    for file in files:
        if Path(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is not a file beside it")
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"{index.parent / file} is missing, and {index.name} names it: fetch it too")
    found = {file: read_file(index.parent / file) for file in files}
    for name, file in places.items():
        if name not in found[file]:
            raise ValueError(f"{index.parent / file} lacks the tensor {name}, which {index.name} places there")
    extra = [name for file in files for name in found[file] if places.get(name) != file]
    if extra:
        raise ValueError(f"{index} does not place the tensors {', '.join(extra)}, which its files hold")
    return {name: found[file][name] for name, file in places.items()}


def write_tensors(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int) -> None:
    """Writes model.safetensors, or several files of at most `shard_bytes` (or one tensor) each, and their index."""
    shards: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        save_file(held, file := folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        share(file)
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(x.nbytes for x in held.values()) + tensor.nbytes > shard_bytes:
            flush()
        held[name] = np.ascontiguousarray(tensor)
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / SAFE)
        return
    places = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        places.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / f"{SAFE}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
