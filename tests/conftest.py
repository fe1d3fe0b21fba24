"""What every test shares: CPU devices, one compilation of equal programs, and a small text."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import ClassVar

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # most of a test is compilation

from jaxlib.version import __version_info__ as JAXLIB

if JAXLIB < (0, 11):  # where XLA can still do without them, they take half of the time of a compilation
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

import jax
import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings

# The same examples every time; `pytest --hypothesis-profile default` searches for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

WORDS = (
    "the of to and in a that for be is our we by it this have as with which will on are not their from has an been "
    "congress government state union people country year peace war nation public law citizens power duty treasury"
).split()


LONGEST = ("test_cli.py", "test_loop.py", "test_transformer_xl.py", "test_stopping.py", "test_runs.py", "test_flash.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that two processes that share the files end together."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Programs that come again (a resumed run's, another run's of the same experiment) are compiled once."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="session")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 documents of about 60 sentences each, in words that sometimes follow each other."""
    folder = tmp_path_factory.mktemp("speeches")
    chance = random.Random(0)
    for number in range(40):
        sentences = []
        for _ in range(60):
            first = chance.randrange(len(WORDS))
            words = [
                WORDS[(first + step * chance.choice((1, 1, 5))) % len(WORDS)] for step in range(chance.randint(4, 12))
            ]
            sentences.append(" ".join(words).capitalize() + ".")
        (folder / f"{number:02}.txt").write_text(" ".join(sentences) + "\n")
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of tokenizers and token stores for all runs."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def bucket(monkeypatch):
    """A gs:// that is a dictionary in memory; `written` tells the order of its files."""

    class Bucket(MemoryFileSystem):
        protocol = ("gs",)
        store: ClassVar = {}
        pseudo_dirs: ClassVar = [""]
        written: ClassVar = []

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + path.removeprefix("gs://").strip("/")

        def open(self, path, mode="rb", **options):
            if "w" in mode:
                self.written.append(path.rpartition("/")[2])
            return super().open(path, mode, **options)

    files = Bucket(skip_instance_cache=True)
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: files)
    return files
