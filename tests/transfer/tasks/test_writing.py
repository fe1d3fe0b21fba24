"""Articles from training to a field that is written, and to a detector."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from ctx_jax.cli import main
from ctx_jax.data.tokenizers import Encoding
from ctx_jax.runs import Trained, open_run
from ctx_jax.transfer.detection import ArticleTemplate
from tests.conftest import WORDS


def command(capsys, *arguments: str | Path) -> dict:
    main([str(argument) for argument in arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """A run on articles of two fields, which has hardly begun, and labelled articles."""
    folder, chance = tmp_path_factory.mktemp("articles"), random.Random(0)
    lines = []
    for number in range(40):
        text = " ".join(chance.choices(WORDS[:12], k=6))
        lines.append({"title": chance.choice(WORDS), "text": text, "label": ("human", "machine")[number // 2 % 2]})
    file = folder / "articles.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main([
        "train", "grover:tiny", "--text", str(file), "--data.corpus.fields", "title", "text", "--tokenizer", "words",
        "--run", str(folder / "run"), "--model.width", "32", "--model.layers", "1", "--model.heads", "2",
        "--data.reader.length", "16", "--data.batch-size", "8", "--training.steps", "6", "--data.folder", str(folder),
        "--optimizer.schedule.rate", "1e-2",
    ])  # fmt: skip
    return folder / "run", file


@partial(jax.jit, static_argnums=(0, 3))
def scores(model: Any, variables: Any, row: Any, head: str) -> jax.Array:
    return model.apply(variables, model.apply(variables, row).hidden, method=head)[0]


def last(run: Trained, ids: list[int], head: str) -> np.ndarray:
    """What a head says at the last of the tokens, which padding follows."""
    filled = [number < len(ids) for number in range(20)]
    row = {"tokens": [ids + [0] * (20 - len(ids))], "documents": [filled], "positions": [list(range(20))]}
    batch = {name: jnp.array(value, jnp.int32) for name, value in row.items()}
    return np.asarray(scores(run.model, run.variables, batch, head))[len(ids) - 1]


def test_a_field_is_what_follows_the_others_and_its_start(trained, tmp_path, capsys):
    """Greedy, token by token, by the whole network on the whole row."""
    folder, file = trained
    run, length = open_run(folder), 5
    size = run.experiment.model.vocabulary_size
    assert size == run.experiment.data.tokenizer.vocabulary_size + 4
    title, title_end, text, text_end = range(size - 4, size)
    encode, begin = (lambda words: run.tokenizer.encode(words).ids.tolist()), run.tokenizer.vocabulary.begin
    entries = [{"title": "peace"}, {"text": "the of to", "title": "war"}, {"text": "we in"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(entry) + "\n\n" for entry in entries))
    allowed = np.ones(size, bool)
    allowed[[i for i in run.tokenizer.vocabulary.special if i != run.tokenizer.vocabulary.end]] = False

    def greedy(ids: list[int], end: int) -> str:
        found: list[int] = []
        while len(found) < length:
            logits = last(run, ids + found, "logits")
            best = int(np.where(allowed, logits, -np.inf).argmax())
            if best == end or best >= run.tokenizer.vocabulary.size or best == run.tokenizer.vocabulary.end:
                break
            found.append(best)
        return run.tokenizer.decode(found).strip()

    for field, start, end in (("title", title, title_end), ("text", text, text_end)):
        other, marks = ("text", (text, text_end)) if field == "title" else ("title", (title, title_end))
        output = tmp_path / f"{field}.jsonl"
        command(
            capsys, "write", folder, "--field", field, "--input", tmp_path / "in.jsonl", "--output", output,
            "--temperature", "0", "--length", str(length), "--top-p", "1",
        )  # fmt: skip
        said = [json.loads(line) for line in output.read_text().splitlines()]
        assert [one["line"] for one in said] == [1, 3, 5]
        for entry, one in zip(entries, said, strict=True):
            given = [marks[0], *encode(entry[other]), marks[1]] if other in entry else []
            assert one[field] == greedy([begin, *given, start], end)
    scored = command(capsys, "evaluate", folder, "--text", file)
    assert "bits_per_byte" in scored


def test_a_detector_reads_the_fields_and_a_classification_token(trained, tmp_path, capsys):
    written, file = trained
    folder = tmp_path / "detector"
    result = command(
        capsys, "train", "grover:detector", "--from", written, "--text", file, "--run", folder,
        "--training.epochs", "1", "--data.reader.length", "16",
    )  # fmt: skip
    assert {"accuracy", "f1", "matthews"} < set(result["evaluation"])
    (tmp_path / "in.jsonl").write_text('{"title": "peace", "text": "the of"}\n{"text": "to and"}\n')
    said = command(capsys, "predict", folder, "--input", tmp_path / "in.jsonl")["predictions"]
    run = open_run(folder)
    assert run.experiment.data.corpus.texts == ("title", "text")
    v, first = run.tokenizer.vocabulary, run.experiment.model.vocabulary_size - 4
    peace, the_of, to_and = (run.tokenizer.encode(text).ids.tolist() for text in ("peace", "the of", "to and"))
    rows = (
        [v.begin, first, *peace, first + 1, first + 2, *the_of, first + 3, v.classification],
        [v.begin, first + 2, *to_and, first + 3, v.classification],
    )
    for ids, one in zip(rows, said, strict=True):
        found = softmax(last(run, ids, "classify"))
        np.testing.assert_allclose(list(one["probabilities"].values()), found, atol=1e-5)


def test_a_detectors_row():
    def encoding(count: int) -> Encoding:
        return Encoding("a " * count, np.arange(10, 10 + count, dtype=np.int32), np.arange(count) * 2)

    template = ArticleTemplate((2,), (4,), 0, first=60)
    row = template.row([encoding(1), encoding(0), encoding(3)], 20)
    assert row.tokens.tolist() == [2, 60, 10, 61, 64, 10, 11, 12, 65, 4] and not row.cut
    assert row.words.tolist() == [0, 0, 1, 0, 0, 2, 3, 4, 0, 0]
    row = template.row([encoding(1), encoding(0), encoding(3)], 9)
    assert row.tokens.tolist() == [2, 60, 10, 61, 64, 10, 11, 65, 4] and row.cut
    assert template.special(3) == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["write", "{run}", "--field", "titel", "--input", "{file}"], "no field of {run}; did you mean 'title'?"),
        (["write", "{run}", "--field", "title", "--input", "{file}", "--length", "15"], "choose from 1 to 14"),
        (["write", "{bert}", "--field", "title", "--input", "{file}"], "was not trained on articles"),
        (["train", "grover:detector", "--from", "{bert}", "--text", "{file}"], "was not trained on articles"),
    ],
)
def test_bad_input_is_named(words, message, trained, run_of, capsys):
    places = {"run": str(trained[0]), "file": str(trained[1]), "bert": str(run_of("gpt"))}
    with pytest.raises(SystemExit) as stop:
        main([word.format(**places) for word in words])
    assert stop.value.code == 2 and message.format(**places) in capsys.readouterr().err
