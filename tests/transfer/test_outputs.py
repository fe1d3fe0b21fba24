"""Where a result is to be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctx_jax import cli


@pytest.mark.parametrize("command", ["predict", "write --field title"])
@pytest.mark.parametrize(("output", "reason"), [("file/a.jsonl", ": Not a directory"), ("here", " is a folder: name")])
def test_what_cannot_be_written_is_known_before_a_run_is_opened(
    command: str, output: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    name, *options = command.split()
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "no-such-run", "--input", "in.jsonl", "--output", str(tmp_path / output), *options])
    assert caught.value.code == 2
    assert f"error: {tmp_path}/{output}{reason}" in capsys.readouterr().err
    assert list((tmp_path / "here").iterdir()) == []
