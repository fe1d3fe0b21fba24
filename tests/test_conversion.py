"""convert: a run becomes a folder of theirs and a run again, with the same parameters, tokens and scores."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from ctx_jax import conversion, runs
from ctx_jax.data.readers import Blocks
from ctx_jax.data.subwords import ByteLevelBPE, WordPiece
from ctx_jax.data.symbols import Characters, Words
from ctx_jax.data.tokenizers import load_tokenizer
from ctx_jax.experiment import find, load
from ctx_jax.generation.sampling import Sampling
from ctx_jax.interop.tensors import read_tensors
from tests.golden.compare import HERE
from tests.tiny import smaller

KINDS = {"bert": "BertForPreTraining", "gpt": "GPT2LMHeadModel", "xlnet": "XLNetLMHeadModel"}
SIZES = {"bert": 150, "gpt": 300, "xlnet": 340}
PADDED = ("['tokens']['embedding']", "['head']['bias']", "['head_bias']")
LINE = "The congress of the union meets 12 times é.\nIt is so."


@pytest.fixture(scope="module")
def trained(speeches: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """trained(name): the folder of a run of two steps."""
    root = tmp_path_factory.mktemp("runs")
    tokenizers = {"bert": WordPiece(vocabulary_size=SIZES["bert"]), "gpt": ByteLevelBPE(vocabulary_size=SIZES["gpt"])}

    def make(name: str) -> Path:
        if not (root / name).exists():
            experiment = smaller(name, speeches, folder, steps=2)
            data = replace(experiment.data, tokenizer=tokenizers.get(name, experiment.data.tokenizer))
            size = data.tokenizer.vocabulary_size
            model = replace(experiment.model, dropout=0.1, attention_dropout=0.1, vocabulary_size=size)
            runs.train(replace(experiment, data=data, model=model), root / name)
        return root / name

    return make


def parameters(run: Path) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(runs.open_run(run).variables["params"])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("name", KINDS)
def test_there_and_back(trained, name: str, tmp_path: Path, speeches: Path):
    run = trained(name)
    exported = conversion.export_run(run, tmp_path / "theirs")
    assert exported == {
        "folder": str(tmp_path / "theirs"),
        "run": str(run),
        "step": 2,
        "kind": KINDS[name],
        "left_out": (),
        "tokenizer": True,
    }
    imported = conversion.import_run(tmp_path / "theirs", tmp_path / "ours")
    assert (imported["kind"], imported["vocabulary"]) == (KINDS[name], SIZES[name])
    before, after = parameters(run), parameters(tmp_path / "ours")
    assert before.keys() == after.keys()
    for path, array in before.items():
        kept = SIZES[name] if path in PADDED else None  # rows that stand for no token are not theirs
        np.testing.assert_array_equal(after[path][:kept], array[:kept], err_msg=path)
        assert kept is None or not after[path][kept:].any()
    assert imported["parameters"] == sum(
        array[: SIZES[name] if path in PADDED else None].size for path, array in before.items()
    )

    old, new = load(run / "experiment.json"), load(tmp_path / "ours/experiment.json")
    differing = {
        field: value for field, value in vars(new.model).items() if value != getattr(old.model, field, "absent")
    }
    assert differing == {}
    ids = [load_tokenizer(folder / "tokenizer").encode(LINE).ids.tolist() for folder in (run, tmp_path / "ours")]
    assert ids[0] == ids[1]
    text = str(speeches / "00.txt")
    reading: dict[str, Any] = {"text": text, "length": 32, "batch_size": 4}
    if name == "gpt":  # whose experiment joins documents, and reads as long as the model can
        scores = [runs.evaluate(folder, **reading)["nll"] for folder in (run, tmp_path / "ours")]
        assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_a_run_goes_on_from_an_imported_model(trained, tmp_path: Path, speeches: Path):
    conversion.export_run(trained("gpt"), tmp_path / "theirs")
    conversion.import_run(tmp_path / "theirs", tmp_path / "ours")
    generated = runs.generate(tmp_path / "ours", ("The union",), 4, Sampling(temperature=0.0), 0)
    assert generated["texts"] == runs.generate(trained("gpt"), ("The union",), 4, Sampling(temperature=0.0), 0)["texts"]
    assert generated["texts"][0].startswith("The union")

    experiment = load(tmp_path / "ours/experiment.json")
    old = load(trained("gpt") / "experiment.json")
    data = replace(experiment.data, corpus=old.data.corpus, folder=old.data.folder, batch_size=4, reader=Blocks(32))
    experiment = replace(experiment, data=data, training=replace(experiment.training, steps=2))
    with pytest.raises(ValueError, match="holds an imported model: train from it into another folder"):
        runs.train(experiment, tmp_path / "ours")
    with pytest.raises(ValueError, match="has no optimizer state, choose --from"):
        runs.train(experiment, tmp_path / "run", continue_from=tmp_path / "ours")
    with pytest.raises(ValueError, match="holds out no text: name what to score with --text"):
        runs.evaluate(tmp_path / "ours")
    result = runs.train(experiment, tmp_path / "run", start_from=tmp_path / "ours")
    assert result["step"] == 2
    moved = max(
        np.abs(array - parameters(tmp_path / "ours")[path]).max()
        for path, array in parameters(tmp_path / "run").items()
    )
    assert 0 < moved < 1e-5  # the first steps of a warm-up of 100 to 5e-5

    # Another experiment starts from it with its tokenizer, wherever that is named, and with no other.
    shutil.copytree(tmp_path / "ours/tokenizer", tmp_path / "copy")
    named = replace(data, tokenizer=replace(data.tokenizer, path=tmp_path / "copy"))
    runs.train(replace(experiment, data=named), tmp_path / "again", start_from=tmp_path / "ours")
    other = replace(data, tokenizer=ByteLevelBPE(vocabulary_size=290))
    with pytest.raises(ValueError, match="has another tokenizer"):
        runs.train(replace(experiment, data=other), tmp_path / "other", start_from=tmp_path / "ours")


def test_an_imported_model_is_used_where_it_is(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Moved, copied, or seen from another folder; a folder called checkpoints is like any other."""
    conversion.export_run(trained("gpt"), tmp_path / "checkpoints/theirs")
    assert not conversion.is_run(tmp_path / "checkpoints/theirs")
    monkeypatch.chdir(tmp_path)
    conversion.import_run(Path("checkpoints/theirs"), Path("ours"))
    (tmp_path / "ours").rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    experiment, old = find("../moved/experiment.json"), load(trained("gpt") / "experiment.json")
    data = replace(experiment.data, corpus=old.data.corpus, folder=old.data.folder, batch_size=4, reader=Blocks(32))
    experiment = replace(experiment, data=data, training=replace(experiment.training, steps=1))
    assert runs.train(experiment, Path("run"), start_from=Path("../moved"))["step"] == 1
    assert conversion.is_run(Path("../moved/checkpoints/0")) and conversion.is_run(Path("../moved"))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoints", "moved", "elsewhere"}  # no lock, nothing half-made


def test_what_theirs_keeps_comes_back(tmp_path: Path):
    """Where a row ends, dropout before a head, labels: of no use to our models, and not lost."""
    folder = bert_folder(tmp_path / "theirs", "bert_classification")
    values = json.loads((folder / "config.json").read_text())
    mine = {"pad_token_id": 3, "eos_token_id": None, "classifier_dropout": 0.3}
    (folder / "config.json").write_text(json.dumps({**values, **mine}))
    conversion.import_run(folder, tmp_path / "ours")
    conversion.export_run(tmp_path / "ours", tmp_path / "back")
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert {name: back[name] for name in mine} == mine
    assert back["id2label"] == values["id2label"]


def bert_folder(folder: Path, name: str = "bert_pretraining", words: int = 0) -> Path:
    """A recorded model of theirs, with a vocabulary of as many words as it has rows, or more."""
    shutil.copytree(HERE / name, folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"] + words
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
    pieces += [f"word{number}" for number in range(size - len(pieces))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    return folder


def test_heads_that_a_kind_lacks_are_initialised_and_said_to_be(tmp_path: Path, capsys):
    folder = bert_folder(tmp_path / "theirs")
    left = conversion.import_run(folder, tmp_path / "ours", leave_out=("cls",))
    assert left["kind"] == "BertModel"
    assert set(left["left_out"]) > {"cls.predictions.bias", "cls.seq_relationship.weight"}
    assert set(left["initialized"]) == {
        f"head/{name}" for name in ("bias", "dense/bias", "dense/kernel", "norm/bias", "norm/scale")
    }
    said = capsys.readouterr().err
    assert "initialized, for it has none of them: head/" in said
    assert "left out: cls.predictions" in said
    made = parameters(tmp_path / "ours")
    assert 0.01 < made["['head']['dense']['kernel']"].std() < 0.02
    again = conversion.import_run(folder, tmp_path / "again", leave_out=("cls",))
    assert again["initialized"] == left["initialized"]
    np.testing.assert_array_equal(
        parameters(tmp_path / "again")["['head']['dense']['kernel']"], made["['head']['dense']['kernel']"]
    )
    # What it was is what is written, without the head that was never trained.
    exported = conversion.export_run(tmp_path / "ours", tmp_path / "back")
    assert exported["kind"] == "BertModel"
    assert set(exported["left_out"]) == set(left["initialized"])
    theirs, ours = (read_tensors(each) for each in (folder, tmp_path / "back"))
    assert {f"bert.{name}" for name in ours} == {name for name in theirs if name.startswith("bert.")}
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor.read(), theirs[f"bert.{name}"].read(), err_msg=name)


def test_what_does_not_fit_is_one_line_and_leaves_nothing(trained, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nothing is no folder: name that of a run, or of a model"):
        conversion.import_run(tmp_path / "nothing", tmp_path / "ours")
    folder = bert_folder(tmp_path / "theirs", words=1)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    with pytest.raises(ValueError, match=f"has {size + 1} ids, the model in .* rows for {size}: name the folder"):
        conversion.import_run(folder, tmp_path / "ours")
    (folder / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer in .*theirs: it needs vocab\.txt"):
        conversion.import_run(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    bytes_of_run = trained("gpt") / "tokenizer"
    with pytest.raises(ValueError, match="leave the option out"):
        conversion.import_run(folder, tmp_path / "ours", tokenizer=bytes_of_run, lowercase=True)
    (tmp_path / "ours").mkdir()
    with pytest.raises(ValueError, match="is there already: choose another folder"):
        conversion.import_run(folder, tmp_path / "ours")
    with pytest.raises(ValueError, match="is there already: choose another folder"):
        conversion.export_run(trained("gpt"), tmp_path / "ours")
    with pytest.raises(ValueError, match="kind 'GPT2LMHead' is not known; did you mean 'GPT2LMHeadModel'"):
        conversion.export_run(trained("gpt"), tmp_path / "new", kind="GPT2LMHead")
    with pytest.raises(
        ValueError,
        match=r"BertModel' is made of a BertConfig, not of a GptConfig; it can be written as GPT2LMH.*--kind",
    ):
        conversion.export_run(trained("gpt"), tmp_path / "new", kind="BertModel")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_a_tokenizer_that_transformers_has_nothing_for_stays_behind(
    speeches: Path, folder: Path, tmp_path: Path, capsys
):
    experiment = smaller("gpt", speeches, folder, steps=1)
    data = replace(experiment.data, tokenizer=Characters(100))
    runs.train(replace(experiment, data=data), tmp_path / "run")
    exported = conversion.export_run(tmp_path / "run", tmp_path / "theirs")
    assert not exported["tokenizer"]
    assert "note: without its tokenizer" in capsys.readouterr().err
    tokenizer = tmp_path / "run/tokenizer"
    back = conversion.import_run(tmp_path / "theirs", tmp_path / "ours", tokenizer=tokenizer)
    assert back["vocabulary"] == load_tokenizer(tokenizer).vocabulary.size
    assert load_tokenizer(tmp_path / "ours/tokenizer").fingerprint == load_tokenizer(tokenizer).fingerprint


@pytest.fixture(scope="module")
def few_words(speeches: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer small enough for every recorded model."""
    folder = tmp_path_factory.mktemp("tokenizer") / "words"
    Words(vocabulary_size=20).train(iter([(speeches / "00.txt").read_text()]), folder)
    return folder


RECORDED = (
    "bert_pretraining gpt2_lm roberta_lm tensorflow/xlnet transformer_xl_original xlnet_causal_classification"
).split()


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_model_becomes_a_run_that_reads_text(name: str, few_words: Path, speeches: Path, tmp_path: Path):
    conversion.import_run(HERE / name, tmp_path / "run", tokenizer=few_words)
    text = tmp_path / "text"
    text.mkdir()
    for number in (0, 1):
        (text / f"{number}.txt").write_text((speeches / "00.txt").read_text()[300 * number :][:300])
    result = runs.evaluate(tmp_path / "run", text=str(text), batch_size=2)
    assert np.isfinite(result["nll"]) and result["nll"] > 0.5


def test_a_disk_without_room_is_told_before_it_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = bert_folder(tmp_path / "theirs")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"No space left on device for \d\d,\d\d\d bytes"):
        conversion.import_run(folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
