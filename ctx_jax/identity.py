"""What of an experiment decides what its run computes: by it runs are named, and told from others.

It knows no type, so that whoever keeps something of a run can ask whether it is that run's.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ctx_jax.serialization import from_json, leaves, to_json

NOT_IDENTITY = re.compile(
    r"name|mesh(\..*)?|data\.(folder|local_folder|workers)"
    r"|training\.(evaluate_every|evaluate_batches|checkpoint_every|log_every|keep|keep_every|best|patience|timeout)"
)
"""Fields that do not change what a run computes: left out of the fingerprint."""

PLACE = re.compile(r"data\.corpus\.(.*\.)?(path|validation|test|data_dir)|data\.tokenizer\.path")
"""Fields that say where something is."""


def identity(experiment: Any) -> dict[str, Any]:
    """The fields that decide what the run computes, as its file gives them back. Mesh, cadences and folders are left
    out; of a text's or tokenizer's place, all but its name, since the run folder says what it holds."""
    return {
        name: Path(value).name if PLACE.fullmatch(name) and isinstance(value, str) else value
        for name, value in leaves(from_json(to_json(experiment)))
        if not NOT_IDENTITY.fullmatch(name)
    }


def fingerprint(experiment: Any) -> str:
    """Eight hex digits of the identity."""
    fields = [(name, repr(value)) for name, value in identity(experiment).items()]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:8]


def differences(a: Any, b: Any) -> list[str]:
    """ "field: value in a -> value in b" for every field that belongs to the identity and differs."""
    left, right = identity(a), identity(b)
    return [
        f"{name}: {left.get(name, 'absent')} -> {right.get(name, 'absent')}"
        for name in {**left, **right}
        if repr(left.get(name)) != repr(right.get(name))
    ]
