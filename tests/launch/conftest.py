"""Programs that are not here: a fake of each records how it was called and answers as it is told."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.local import FORWARDED

NASTY = ["train", "gpt:tiny", "--run", 'runs/a b\'; "rm -rf" x & $(date) `id` $HOME \\ *\n--nodes=9', "--x", ""]
"""Words that a shell would take apart."""

FAKE = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
stdin = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
with open({calls!r}, "a") as calls:
    calls.write(json.dumps({{"argv": [name, *sys.argv[1:]], "stdin": stdin}}) + "\\n")
{body}
"""


class Programs:
    """Fakes on PATH, and the calls that they got."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "calls"

    def add(self, name: str, body: str = "") -> None:
        """`body` is Python that sees `sys.argv`, and prints and exits as the program is to."""
        path = self.folder / name
        path.write_text(FAKE.format(python=sys.executable, calls=str(self.file), body=body))
        path.chmod(0o755)

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    @property
    def words(self) -> list[list[str]]:
        return [call["argv"] for call in self.calls]


@pytest.fixture(autouse=True)
def unignored() -> Iterator[None]:
    """Signals as a terminal's foreground has them: nohup and a script's background jobs begin with some ignored, and
    launchers run in this process leave handlers behind."""
    before = {number: signal.getsignal(number) for number in FORWARDED}
    for number in FORWARDED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Programs:
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Programs(folder)


@pytest.fixture
def program(tmp_path) -> Callable[[str], list[str]]:
    """Makes a command of a few lines of Python."""

    def make(text: str) -> list[str]:
        path = tmp_path / f"program{len(list(tmp_path.glob('program*.py')))}.py"
        path.write_text("import json, os, signal, sys, time\nfrom pathlib import Path\n" + text)
        return [sys.executable, str(path)]

    return make


@pytest.fixture
def nasty() -> list[str]:
    return NASTY
