"""Probes on frozen features: what they are given is what the features are, and what they learn is scored apart."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from ctx_jax.cli import main
from ctx_jax.runs import open_run
from ctx_jax.transfer.features import Choice
from ctx_jax.transfer.probes import BiLSTM, Tagger, of_words, training
from experiments.feature_choices import choices
from experiments.feature_choices import main as feature_choices
from tests.conftest import WORDS


def run(capsys, *arguments: str | Path) -> dict:
    main([str(argument) for argument in arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> list[Path]:
    """Three files: whether there are more words of the first half of the list than of the second."""
    chance, folder = random.Random(1), tmp_path_factory.mktemp("examples")
    paths = []
    for name in ("train", "validation", "test"):
        lines = [chance.choices(WORDS, k=5) for _ in range(40)]
        early = [sum(WORDS.index(word) < len(WORDS) // 2 for word in words) > 2 for words in lines]
        rows = [f"{' '.join(words)}\t{'early' if e else 'late'}\n" for words, e in zip(lines, early, strict=True)]
        paths.append(folder / f"{name}.tsv")
        paths[-1].write_text("".join(rows))
    return paths


def test_logistic_regression_is_scikit_learns_on_the_exported_features(run_of, examples, tmp_path, capsys):
    bert, (train, validation, test) = run_of("bert"), examples
    options = ["--layers", "-2", "-1", "--pooling", "max"]
    found = run(
        capsys, "probe", bert, "--text", train, "--validation", validation, "--test", test, "--columns", "text",
        "label", *options,
    )  # fmt: skip
    assert (found["layers"], found["pooling"], found["test"]["collapsed"]) == ([1, 2], "max", 0)
    x, y = {}, {}
    for path in examples:
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        (tmp_path / "texts").write_text("".join(text + "\n" for text, _ in lines))
        output = tmp_path / f"{path.stem}.npz"
        run(capsys, "features", bert, "--input", tmp_path / "texts", "--output", output, *options)
        x[path], y[path] = np.load(output)["features"], [label for _, label in lines]
    scale = StandardScaler().fit(x[train])
    model = LogisticRegression(C=found["strength"], max_iter=5000).fit(scale.transform(x[train]), y[train])
    for path, name in ((validation, "validation"), (test, "test")):
        assert model.score(scale.transform(x[path]), y[path]) == pytest.approx(found[name]["accuracy"])


def test_a_tagger_learns_tags_of_words(run_of, tmp_path, capsys):
    """Words of one half of the list are entities."""
    chance = random.Random(2)

    def write(name: str, count: int) -> Path:
        lines = []
        for _ in range(count):
            for word in chance.choices(WORDS, k=6):
                lines.append(f"{word}\t{'B-early' if WORDS.index(word) < 20 else 'O'}\n")
            lines.append("\n")
        (tmp_path / name).write_text("".join(lines))
        return tmp_path / name

    train, test = write("train.conll", 60), write("test.conll", 20)
    found = run(
        capsys, "probe", run_of("bert"), "--kind", "tagging", "--text", train, "--validation", test, "--test", test,
        "--layers", "0", "--tagger.width", "16", "--tagger.epochs", "6", "--tagger.rate", "1e-2", "--tagger.rows", "3",
        "--tagger.dropout", "0",
    )  # fmt: skip
    assert found["test"]["f1"] > 0.5 and found["test"] == found["validation"]
    assert (found["layers"], found["pooling"], set(found["test"])) == ([0], "word", {"f1", "precision", "recall"})


def test_words_without_a_vector_are_zeros(run_of):
    """The sixth word and those after it are cut off; a word of the middle that normalisation drops takes no other's."""
    bert = open_run(run_of("bert"))
    words = ("peace", "war", "the", "people", "of", "congress", "is")
    choice = Choice(pooling="word")
    whole, cut = (of_words(bert, choice, [words, words[:2]], length, 2) for length in (None, 8))
    tokens = [len(bert.tokenizer.encode(word).ids) for word in words]
    kept = int(np.searchsorted(np.cumsum(tokens), 6, side="right"))
    assert [x.shape for x in whole] == [(7, 16), (2, 16)] and whole[0].any(1).all()
    assert 0 < kept < 7 and cut[0][:kept].any(1).all() and not cut[0][kept + 1 :].any()
    np.testing.assert_allclose(cut[1], whole[1], atol=1e-5)
    spaced = of_words(bert, choice, [("peace", "\u200b \u3000", "war")], None, 1)[0]
    assert spaced.shape == (3, 16) and spaced[0].any() and spaced[2].any()


def test_a_tagger_reads_both_neighbours():
    """The tag is whether the first numbers of the words before and after it have the same sign."""
    chance = np.random.default_rng(0)
    data = []
    for size in (8, 7, 6, 5) * 40:
        x = chance.normal(size=(size, 2)).astype(np.float32)
        around = np.pad(x[:, 0], 1, constant_values=1)
        data.append((x, (around[:-2] * around[2:] > 0).astype(np.int64)))
    tagger = Tagger(width=16, epochs=25, rows=8, rate=1e-2, dropout=0.0)
    *_, (predict, params) = training(data[:120], tagger, 2, seed=0)
    right = [said == tags for said, (_, tags) in zip(predict(params, data[120:]), data[120:], strict=True)]
    assert np.concatenate(right).mean() > 0.85


def test_layers_are_weighted_as_they_help():
    """At first the mean of them is read; of two layers of which one tells the tag, that one comes to count."""
    chance = np.random.default_rng(0)
    x = chance.normal(size=(60, 6, 2, 3)).astype(np.float32)
    tags = (x[:, :, 1, 0] > 0).astype(np.int64)
    sizes = jnp.full(60, 6)
    tagger = Tagger(width=8, epochs=20, rows=8, rate=1e-2, dropout=0.0)
    both, mean = BiLSTM(tagger, 2, layers=2), BiLSTM(tagger, 2)
    params = both.init(jax.random.key(0), x.reshape(60, 6, 6), sizes, train=False)["params"]
    rest = {name: value for name, value in params.items() if name not in ("weights", "scale")}
    np.testing.assert_allclose(
        both.apply({"params": params}, x.reshape(60, 6, 6), sizes, train=False),
        mean.apply({"params": rest}, x.mean(2), sizes, train=False),
        atol=1e-6,
    )
    *_, (_, trained) = training(list(zip(x.reshape(60, 6, 6), tags, strict=True)), tagger, 2, 0, layers=2)
    assert jax.nn.softmax(trained["params"]["weights"])[1] > 0.6


def test_padding_and_batch_mates_change_no_prediction():
    chance = np.random.default_rng(0)
    data = [(chance.normal(size=(n, 4)).astype(np.float32), chance.integers(0, 3, n)) for n in (3, 8, 5)]
    tagger = Tagger(width=8, epochs=1, rows=2)
    predict, params = next(training(data, tagger, 3, seed=0))
    together = predict(params, data)
    assert [len(row) for row in together] == [3, 8, 5]
    for row, one in zip(together, data, strict=True):
        np.testing.assert_array_equal(predict(params, [one])[0], row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pooling", "word"], "--pooling word gives several vectors a text"),
        (["--kind", "tagging"], "unknown tag 'early'"),
        (["--kind", "tagging", "--tagger.weighted"], "weighted has one layer alone, (-1,): give several in --layers"),
        (["--tagger.epochs", "0"], "epochs 0: choose 1 or more"),
        (["--texts", "txt"], "columns ('text', 'label') have no 'txt'; did you mean 'text'?"),
        (
            ["--labels", "early", "lat"],
            "unknown label 'late'; did you mean 'lat'?; there are early, lat: mend it, or name all in --labels",
        ),
    ],
)
def test_bad_input_is_named(options, message, run_of, examples, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["probe", str(run_of("bert")), "--text", str(examples[0]), "--columns", "text", "label", *options])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_files_of_words_are_read_as_their_options_say(run_of, tmp_path, capsys):
    file, options = tmp_path / "a.conll", ["--kind", "tagging", "--tagger.epochs", "1", "--tagger.width", "4"]
    file.write_text("I-org peace NNP\nO war NN\n\n" * 20)
    with pytest.raises(SystemExit):
        main(["probe", str(run_of("bert")), "--text", str(file), *options, "--token-column", "1", "--tag-column", "0"])
    said = capsys.readouterr().err
    assert f"{file} line 1: 'I-org' follows 'O'" in said and "or set --scheme IOB1 if that is the file's" in said
    options += ["--token-column", "1", "--tag-column", "0", "--scheme", "IOB1"]
    found = run(capsys, "probe", run_of("bert"), "--text", file, *options)
    assert set(found["test"]) == {"f1", "precision", "recall"}
    file.write_text("peace O\n\n" * 20)
    with pytest.raises(SystemExit):
        main(["probe", str(run_of("bert")), "--text", str(file), "--kind", "tagging"])
    assert "has no entity" in capsys.readouterr().err


def test_the_choices_are_those_of_the_paper(run_of, tmp_path, capsys, monkeypatch):
    assert [options for _, options in choices(12).values()] == [
        ["--layers", "0"], ["--layers", "-2"], ["--layers", "-1"],
        ["--layers", "-4", "-3", "-2", "-1", "--tagger.weighted"], ["--layers", "-4", "-3", "-2", "-1"],
        ["--layers", *(str(layer) for layer in range(1, 13)), "--tagger.weighted"],
    ]  # fmt: skip
    file = tmp_path / "a.conll"
    file.write_text("war\tB-x\npeace\tO\n\n")
    words = ["--text", file, "--validation", file, "--test", file, "--tagger.epochs", "1", "--tagger.width", "2"]
    monkeypatch.setattr("sys.argv", ["feature_choices.py", str(run_of("bert")), *map(str, words), "--seeds", "2"])
    feature_choices()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [len(one["test"]) for one in results] == [2] * 6
    assert [one["layers"] for one in results] == [[0], [1], [2], [1, 2], [1, 2], [1, 2]]
    assert [one["combine"] for one in results][3:] == ["weighted", "concatenate", "weighted"]
