"""Copies of recorded folders, changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.golden.compare import HERE

Changed = Callable[..., Path]


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """changed(name, config={...}, tensors=function): the folder with other fields (None: without) and tensors."""

    def make(
        name: str, config: dict[str, Any] | None = None, tensors: Callable[[dict[str, Any]], Any] | None = None
    ) -> Path:
        folder = tmp_path / name
        shutil.copytree(HERE / name, folder)
        values = {**json.loads((folder / "config.json").read_text()), **(config or {})}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
        if tensors is not None:
            held = load_file(folder / "model.safetensors")
            tensors(held)
            save_file(held, folder / "model.safetensors")
        return folder

    return make
