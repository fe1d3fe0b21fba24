from __future__ import annotations

from pathlib import Path

import jax
import pytest

from ctx_jax.compilation import keep_compiled, processor


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What `jax_compilation_cache_dir` becomes where it was `before`."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def call(value: str | None) -> str:
        jax.config.update("jax_compilation_cache_dir", value)
        keep_compiled()
        return jax.config.jax_compilation_cache_dir

    yield call
    jax.config.update("jax_compilation_cache_dir", before)


def test_programs_are_kept_for_each_kind_of_processor(chosen, tmp_path: Path, monkeypatch):
    assert chosen(None) == str(tmp_path / "ctx_jax" / "compiled" / processor())
    assert processor() == processor()
    monkeypatch.setattr("platform.machine", lambda: "other")
    assert processor().startswith("other-")


def test_a_folder_that_was_chosen_stays(chosen):
    assert chosen("/elsewhere") == "/elsewhere"
