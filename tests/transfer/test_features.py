"""Features as a user gets them, against one text at a time without padding, in float64."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from ctx_jax import cli
from ctx_jax.runs import Trained, open_run
from ctx_jax.transfer import features as frozen
from ctx_jax.transfer.features import Choice, Pooling, combined, extract, features, numbered, pooled
from ctx_jax.transfer.inputs import template
from tests.transfer.conftest import MODELS

TEXTS = ["", "the people of the union", "peace", "the union of the people"]
RunOf = Callable[[str], Path]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    return tmp_path / "texts.txt"


def command(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `features ...`."""
    code: Any = 0
    try:
        cli.main(["features", *arguments.split()])
    except SystemExit as exit:
        code = exit.code
    return code, *capsys.readouterr()


def alone(run: Trained, apply: Callable[..., Any], text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """All layers [L + 1, n, D] of one text without padding, written out anew, which of its tokens begin words [n],
    and its pooled vector."""
    encoding, v = run.tokenizer.encode(text), run.tokenizer.vocabulary
    ids, begins = encoding.ids.tolist(), encoding.word_starts().tolist()
    segments = [0] * len(ids)
    match type(run.model).__name__:
        case "Bert":
            ids, begins, segments = [v.classification, *ids, v.separator], [False, *begins, None], [0, *segments, 0]
        case "XLNet":
            ids, begins, segments = [*ids, v.separator, v.classification], [*begins, None, None], [*segments, 0, 2]
        case _:
            ids, begins, segments = [v.begin, *ids], [False, *begins], [0, *segments]
    row = {"tokens": ids, "documents": [1] * len(ids), "positions": list(range(len(ids))), "segments": segments}
    batch = {name: jnp.array([value]) for name, value in row.items()}
    output = apply(run.variables, batch)
    layers = np.asarray(output.layers[0], np.float64)
    layers[-1] = output.hidden[0]
    return layers, np.array(begins), None if output.pooled is None else np.asarray(output.pooled[0])


def words_of(tokens: np.ndarray, begins: np.ndarray) -> list[np.ndarray]:
    """The mean of each word's tokens; None in `begins` is a special token after the text."""
    words: list[list[np.ndarray]] = []
    for token, begin in zip(tokens, begins, strict=True):
        if begin is None:
            break
        if begin:
            words.append([])
        if words:
            words[-1].append(token)
    return [np.mean(word, axis=0) for word in words]


@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_of_each_text_alone(name: str, run_of: RunOf, lines: Path, tmp_path: Path):
    run = open_run(run_of(name))
    apply = jax.jit(partial(run.model.apply, collect=("layers",)))
    expected = [alone(run, apply, text) for text in TEXTS]
    cases: dict[Choice, list[np.ndarray]] = {
        Choice(layers=(2, 0, -2)): [layers[[2, 0, 1]].mean(1).ravel() for layers, _, _ in expected],
        Choice(layers=(0, -1), combine="mean", pooling="none"): [
            token for layers, _, _ in expected for token in (layers[0] + layers[2]) / 2
        ],
        Choice(pooling="word"): [word for layers, begins, _ in expected for word in words_of(layers[-1], begins)],
    }
    if name in ("bert", "xlnet"):
        cases[Choice(pooling="pooled")] = [vector for _, _, vector in expected if vector is not None]
    for number, (choice, vectors) in enumerate(cases.items()):
        output = tmp_path / f"{number}.npz"
        result = extract(run_of(name), str(lines), output, choice, batch_size=3)
        found = np.load(output)
        np.testing.assert_allclose(found["features"], np.stack(vectors), rtol=2e-5, atol=2e-5, err_msg=str(choice))
        assert result["features"] == [len(vectors), vectors[0].size]
        assert (result["texts"], result["cut"]) == (4, 0)
        counts = {
            "none": [len(layers[0]) for layers, _, _ in expected],
            "word": [len(text.split()) for text in TEXTS],
        }.get(choice.pooling)
        assert set(found.files) == ({"features"} if counts is None else {"features", "offsets"})
        if counts is not None:
            assert found["offsets"].tolist() == [0, *np.cumsum(counts)]


@pytest.mark.parametrize("name", MODELS)
def test_a_text_has_the_same_bits_in_any_company(name: str, run_of: RunOf):
    run = open_run(run_of(name))
    shape = template(run.experiment.model, run.tokenizer.vocabulary)
    rows = [shape.row([run.tokenizer.encode(text)], 48) for text in TEXTS]
    step = jax.jit(partial(features, run.model, Choice(layers=(0, -1))))
    together = step(run.variables, shape.batch(rows, 4, 48))
    for place, others in ((0, []), (2, [rows[1]] * 2)):
        for row, vector in zip(rows, together, strict=True):
            found = step(run.variables, shape.batch([*others, row], 4, 48))[place]
            np.testing.assert_array_equal(found, vector)


def test_the_last_layer_of_gpt2_is_what_its_head_reads(run_of: RunOf):
    run = open_run(run_of("gpt"))
    shape = template(run.experiment.model, run.tokenizer.vocabulary)
    batch = shape.batch([shape.row([run.tokenizer.encode(TEXTS[1])], 32)], 1, 32)
    output = run.model.apply(run.variables, batch, collect=("layers",))
    found = features(run.model, Choice(pooling="none"), run.variables, batch)
    np.testing.assert_allclose(found, output.hidden, rtol=1e-5, atol=1e-6)
    assert np.abs(found - output.layers[:, -1]).max() > 0.1


HIDDEN = jnp.array([[[1.0, -8.0], [3.0, 2.0], [5.0, -1.0], [99.0, 99.0]], [[99, 99], [99, 99], [-2, 4], [-4, 8]]])
REAL = jnp.array([[True, True, True, False], [False, False, True, True]])
WORDS = jnp.array([[1, 1, 2, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", [[3, -7 / 3], [-3, 6]]),
        ("first", [[1, -8], [-2, 4]]),
        ("last", [[5, -1], [-4, 8]]),
        ("max", [[5, 2], [-2, 8]]),
        ("word", [[[2, -3], [5, -1], [0, 0], [0, 0]], [[-4, 8], [0, 0], [0, 0], [0, 0]]]),
        ("none", HIDDEN),
    ],
)
def test_poolings_by_hand(how: Pooling, expected: Any):
    np.testing.assert_allclose(pooled(HIDDEN, REAL, WORDS, how), expected, rtol=1e-6)


def test_combinations_by_hand():
    layers = [jnp.array([[[1.0, 2.0]]]), jnp.array([[[10.0, 20.0]]])]
    assert combined(layers, "concatenate").tolist() == [[[1, 2, 10, 20]]]
    assert combined(layers, "sum").tolist() == [[[11, 22]]]
    assert combined(layers, "mean").tolist() == [[[5.5, 11]]]
    assert combined(layers[:1], "concatenate").tolist() == layers[0].tolist()


def test_layers_count_from_either_end():
    assert numbered(Choice(layers=(0, -1, 2, -13, -4)), 12) == (0, 12, 2, 0, 9)
    assert numbered(Choice(layers=(12,), pooling="pooled"), 12) == (12,)
    for layer in (13, -14):
        with pytest.raises(ValueError, match=f"--layers {layer}: the model has 12 layers"):
            numbered(Choice(layers=(layer,)), 12)
    with pytest.raises(ValueError, match="the pooler reads the last layer alone"):
        numbered(Choice(layers=(-2,), pooling="pooled"), 12)


def test_the_command(run_of: RunOf, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, output = run_of("bert"), tmp_path / "new/vectors.safetensors"
    arguments = f"{run} --input {lines} --output {output} --layers -2 -1 --combine sum --length 6 --batch-size 2"
    code, out, err = command(arguments, capsys)
    cut = sum(len(open_run(run).tokenizer.encode(text).ids) > 4 for text in TEXTS)
    assert code == 0 and cut in (1, 2)
    assert json.loads(out) == {
        "run": str(run),
        "step": 0,
        "output": str(output),
        "texts": 4,
        "features": [4, 16],
        "cut": cut,
        "length": 6,
        "layers": [1, 2],
        "combine": "sum",
        "pooling": "mean",
    }
    assert f"note: {cut} of 4 texts are longer than 6 tokens (--length) and were cut" in err
    assert "features: 4 texts" in err
    assert load_file(output)["features"].shape == (4, 16)
    assert command(arguments, capsys)[::2] == (2, f"error: {output} is there already: choose another --output\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{gpt} --output a.npz", "--input"),
        ("{gpt} --input {lines}", "--output"),
        (
            "{gpt} --input {lines} --output a.csv",
            "--output a.csv is of no known kind: end its name in .npz or .safeten",
        ),
        ("{gpt} --input {lines} --output gs://a/b.npz", "--output gs://a/b.npz is remote"),
        ("{gpt} --input {lines} --output {empty}/a.npz", "empty.txt/a.npz: Not a directory"),
        ("{gpt} --input none.txt --output a.npz", "no text in none.txt"),
        ("{gpt} --input {empty} --output a.npz", "there is no text in"),
        ("{gpt} --input {lines} --output a.npz --layers 3", "--layers 3: the model has 2 layers; choose from 0"),
        ("{gpt} --input {lines} --output a.npz --layers", "--layers"),
        ("{gpt} --input {lines} --output a.npz --pooling pooled", "this Gpt has no pooler, choose mean, first or last"),
        ("{gpt} --input {lines} --output a.npz --pooling cls", "--pooling"),
        ("{gpt} --input {lines} --output a.npz --lenght 9", "did you mean '--length'?"),
        ("{gpt} --input {lines} --output a.npz --batch-size 0", "--batch-size 0 is not a number of texts"),
        ("{gpt} --input {lines} --output a.npz --length 1", "--length 1 leaves no room"),
        ("{gpt} --input {lines} --output a.npz --length 9999", "--length 9999 is longer than the model's"),
        ("{gpt} --input {lines} --output a.npz --field text", "line 2 is not JSON"),
        ("no-such-run --input {lines} --output a.npz", "no-such-run has no checkpoint"),
        ("--input {lines} --output a.npz", "features needs RUN"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: str,
    message: str,
    run_of: RunOf,
    lines: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    places = {"gpt": run_of("gpt"), "lines": lines, "empty": tmp_path / "empty.txt"}
    code, out, err = command(arguments.format(**places), capsys)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ") and message in err.splitlines()[-1]
    assert list((tmp_path / "here").iterdir()) == []


def test_a_run_without_its_tokenizer(run_of: RunOf, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(run_of("gpt"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run/tokenizer")
    code, _, err = command(f"{tmp_path}/run --input {lines} --output {tmp_path}/a.npz", capsys)
    lost = f"{tmp_path}/run has lost its tokenizer, which its embeddings need: restore {tmp_path}/run/tokenizer"
    assert (code, err) == (2, f"error: {lost}\n")


@pytest.mark.parametrize("pooling", get_args(Pooling)[-2:])
def test_what_fails_or_is_interrupted_on_the_way_leaves_nothing(
    pooling: Pooling, run_of: RunOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "here").mkdir()
    (tmp_path / "bad.txt").write_bytes(b"peace\n" * 20 + b"\xff\n")
    arguments = f"{run_of('gpt')} --input {tmp_path}/bad.txt --output {tmp_path}/here/a.npz --pooling {pooling}"
    written: list[int] = []
    write = frozen.Vectors.write

    def counted(self: Any, place: int, vectors: np.ndarray) -> None:
        written.append(place)
        write(self, place, vectors)

    monkeypatch.setattr(frozen.Vectors, "write", counted)
    code, _, err = command(f"{arguments} --batch-size 4", capsys)
    assert code == 2 and 0 < len(written) < 20
    assert err.endswith("bad.txt line 21 is not UTF-8: convert the file to UTF-8, or set --errors replace\n")
    assert list((tmp_path / "here").iterdir()) == []

    def interrupted(self: Any, place: int, vectors: np.ndarray) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(frozen.Vectors, "write", interrupted)
    code, _, err = command(f"{arguments} --batch-size 4 --errors replace", capsys)
    assert (code, err) == (130, "error: interrupted: nothing was written, the same command begins anew\n")
    assert list((tmp_path / "here").iterdir()) == []
