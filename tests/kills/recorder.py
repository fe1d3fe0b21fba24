"""`ctx_jax train` that writes down what each step is given: python -m tests.kills.recorder RECORD train ...

A line for each step and process: {"step", "rows": {row: hash of its batch}, "documents" and "memory": {row: hash}}.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ctx_jax.cli import main
from ctx_jax.training import loop


def row_hashes(tree: Any) -> dict[int, str]:
    """The hash of each row that this process holds of the arrays in a tree."""
    digests: dict[int, Any] = {}
    for leaf in jax.tree.leaves(tree):
        rows: dict[int, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            first = shard.index[0].start or 0
            rows.update(enumerate(np.asarray(shard.data), first))
        for row, value in rows.items():
            digests.setdefault(row, hashlib.sha256()).update(np.ascontiguousarray(value).tobytes())
    return {row: digest.hexdigest() for row, digest in digests.items()}


def recording(make: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`make_train_step`, whose steps write down what they are given."""

    @wraps(make)
    def made(*arguments: Any, **options: Any) -> Any:
        step = make(*arguments, **options)
        file = (folder / f"{jax.process_index()}.jsonl").open("a")

        def recorded(state: Any, batch: Any) -> Any:
            with jax.transfer_guard("allow"):
                line = {
                    "step": int(state.step.addressable_data(0)),
                    "rows": row_hashes(batch),
                    "memory": row_hashes(state.memory),
                    "documents": row_hashes(getattr(state.memory, "documents", None)),
                }
            file.write(json.dumps(line) + "\n")
            file.flush()
            return step(state, batch)

        return recorded

    return made


if __name__ == "__main__":
    records = Path(sys.argv[1])
    records.mkdir(parents=True, exist_ok=True)
    loop.make_train_step = recording(loop.make_train_step, records)
    main(sys.argv[2:])
