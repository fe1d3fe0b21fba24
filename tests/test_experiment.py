"""An experiment as a value: found by name, written and read again, told apart, refused where it is wrong."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ctx_jax.data.corpora import Mixture, Sotu, TextFiles
from ctx_jax.experiment import Experiment, _module, find, load, options, save
from ctx_jax.identity import differences, fingerprint
from ctx_jax.parallel.mesh import Mesh
from ctx_jax.serialization import from_json, to_json

FILES = ("bert", "gpt", "transformer_xl", "xlnet")
NAMES = [
    f"{file}:{name}"
    for file in FILES
    for name, function in inspect.getmembers(_module(file, file), inspect.isfunction)
    if not name.startswith("_") and function.__module__ == f"experiments.{file}"
]


def edited(path: str, value: Any) -> Any:
    """The JSON of gpt:tiny with the field at the dotted path replaced, or left out where the value is `...`."""
    whole = json.loads(json.dumps(to_json(find("gpt:tiny"))))
    *parents, last = path.split(".")
    place = whole
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return whole


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_survives_its_file(name: str, tmp_path: Path):
    experiment = find(name)
    save(experiment, tmp_path / "experiment.json")
    assert load(tmp_path / "experiment.json") == experiment
    assert fingerprint(load(tmp_path / "experiment.json")) == fingerprint(experiment)
    assert not (tmp_path / "experiment.json.partial").exists()


def test_the_experiments_are_different_runs():
    assert len(NAMES) > 10
    assert len({fingerprint(find(name)) for name in NAMES}) == len(NAMES)


def test_the_fingerprint_is_of_what_is_computed():
    tiny = find("gpt:tiny")
    training = replace(tiny.training, log_every=7, checkpoint_every=3, evaluate_every=5, keep=9)
    data = replace(tiny.data, folder=Path("elsewhere"))
    same = replace(tiny, name="other", mesh=Mesh(fsdp=8), training=training, data=data)
    assert fingerprint(same) == fingerprint(tiny)
    assert differences(tiny, same) == []

    other = replace(tiny, training=replace(tiny.training, seed=1), model=replace(tiny.model, dropout=0.5))
    assert fingerprint(other) != fingerprint(tiny)
    assert differences(tiny, other) == ["model.dropout: 0.0 -> 0.5", "training.seed: 0 -> 1"]


def test_what_a_file_gives_back_is_the_same_experiment(tmp_path: Path):
    """Ints where floats are meant, paths and tuples of dataclasses included."""
    tiny = find("gpt:tiny")
    mixed = Mixture((Sotu(), TextFiles("there/text")), (1, 2))
    written = replace(
        tiny, data=replace(tiny.data, corpus=mixed), optimizer=replace(tiny.optimizer, clip=1, weight_decay=0)
    )
    save(written, tmp_path / "experiment.json")
    read = load(tmp_path / "experiment.json")
    assert differences(written, read) == []
    assert fingerprint(written) == fingerprint(read)
    assert differences(written, replace(read, data=replace(read.data, corpus=replace(mixed, weights=(1, 3))))) == [
        "data.corpus.weights: (1.0, 2.0) -> (1.0, 3.0)"
    ]


def test_where_a_text_is_does_not_matter():
    """Its name does, lest two texts share a run's folder; what is in it, the run folder says."""
    tiny = find("gpt:tiny")

    def at(path: str) -> Experiment:
        return replace(tiny, data=replace(tiny.data, corpus=TextFiles(path)))

    assert fingerprint(at("here/books")) == fingerprint(at("/there/books"))
    assert differences(at("here/books"), at("books")) == []
    assert fingerprint(at("books")) != fingerprint(at("letters"))


def test_another_type_differs_in_itself_and_in_its_fields():
    tiny = find("gpt:tiny")
    local = replace(tiny, data=replace(tiny.data, corpus=TextFiles(Path("text"))))
    found = differences(tiny, local)
    assert found[0] == "data.corpus: Sotu -> TextFiles"
    assert "data.corpus.path: absent -> text" in found


def test_options_name_every_field_and_the_opposite_of_flags():
    names = options(find("gpt:tiny"))
    assert {"--training.steps", "--data.reader.join-documents", "--data.reader.no-join-documents"} <= set(names)
    assert "--no-name" not in names


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.type", "ctx_jax.models.gpt:Gtp", "it.model: type 'ctx_jax.models.gpt:Gtp' is not a dataclass"),
        ("model.type", "os:system", "it.model: type 'os:system' is not a dataclass"),
        ("model.type", ..., "it.model: type None is not a dataclass"),
        ("model.widht", 3, "it.model: GptConfig has no field 'widht'; did you mean 'width'?"),
        ("model.width", "128", "it.model.width: '128' is not of type int"),
        ("model.width", True, "it.model.width: True is not of type int"),
        ("model.width", [128], "it.model.width: (128,) is not of type int"),
        ("model.heads", 3, "it.model: heads 3 does not divide width 128"),
        ("model.attention_pattern", ["dense", 3], "it.model.attention_pattern[1]: 3 is not of type 'dense' or 'local'"),
        ("training.steps", 0, "it.training: training steps 0: choose 1 or more"),
        ("training.steps", 2**31, "it.training: training steps 2147483648: choose 2147483647 or less"),
        ("training.seed", 2**32, "it.training: training seed 4294967296: choose 4294967295 or less"),
        ("training", to_json(Mesh()), "it.training: Mesh(data=-1, fsdp=1, tensor=1, slices=1) is not of type Training"),
        ("model", None, "it: model None has no vocabulary_size: use one of models/"),
        ("optimizer", to_json(Mesh(fsdp=2))["fsdp"], "it: optimizer 2 has no build: use one of training/optimizers.py"),
        ("objective", "causal", "it: objective 'causal' has no requirements: use one of objectives/"),
        ("data.reader", 1, "it: data.reader 1 has no passes: use one of data/readers.py"),
        ("data.evaluation_reader", 1, "it.data: data.evaluation_reader 1 is no reader"),
        ("data.tokenizer", None, "it: data.tokenizer None has no train: use one of data/tokenizers.py"),
        ("data.corpus", to_json(Mesh()), "has no passages: use one of data/corpora.py"),
        ("data.tokenizer.training_characters", -1, "training_characters -1 hold no text"),
        ("optimizer.weight_decay", float("inf"), "it: optimizer.weight_decay inf is not a number"),
        ("optimizer.epsilon", -1.0, "it.optimizer: epsilon -1.0: choose 0 or more"),
        ("optimizer.frozen", 3, "it: optimizer.frozen 3 is more than the model's 2 layers: choose 2 or fewer"),
        ("optimizer.schedule.steps", 0, "it.optimizer.schedule: schedule steps 0: choose 1 or more"),
        ("name", "", "it: name '' cannot name a folder"),
        ("name", "../mine", "it: name '../mine' cannot name a folder"),
        ("name", ..., "it: Experiment needs the field 'name'"),
    ],
)
def test_a_file_edited_by_hand_is_refused_with_its_place(path: str, value: Any, message: str):
    with pytest.raises(ValueError) as error:
        from_json(edited(path, value), "it")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_ints_are_floats_and_strings_paths_where_only_those_fit():
    assert from_json(edited("optimizer.clip", 1), "it") == find("gpt:tiny")
    assert from_json(edited("data.local_folder", "there"), "it").data.local_folder == Path("there")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a readable experiment file (Expecting value"),
        ('{"type": "ctx_jax.exp', "not a readable experiment file (Unterminated string"),
        ("[]", "holds no experiment but a tuple"),
        (json.dumps(to_json(Mesh())), "holds no experiment but a Mesh"),
    ],
)
def test_a_file_that_is_no_experiment(text: str, message: str, tmp_path: Path):
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(ValueError) as error:
        load(tmp_path / "experiment.json")
    assert str(error.value).startswith(f"{tmp_path / 'experiment.json'}: {message}")


SOURCE = """\
from ctx_jax.experiment import find
def mine():
    return find("gpt:tiny")
def nothing():
    pass
def needs(size):
    return size
def fails():
    return {}["absent"]
def wrong():
    raise ValueError("too small: choose more")
def exits():
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "returned NoneType: it must return an Experiment"),
        ("needs", "failed, mine.py: TypeError: needs() missing 1 required positional argument: 'size'"),
        ("fails", "failed, mine.py line 9: KeyError: 'absent'"),
        ("wrong", "failed, mine.py line 11: too small: choose more"),
        ("exits", "failed, mine.py line 13: SystemExit: 3"),
        ("mien", "unknown experiment 'mine.py:mien'; did you mean 'mine'?"),
        ("need", "there are: mine.py:mine, mine.py:nothing, mine.py:fails, mine.py:wrong, mine.py:exits"),
    ],
)
def test_an_experiment_of_ones_own_says_in_which_line_it_fails(
    function: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)
    assert isinstance(find("mine.py:mine"), Experiment)
    with pytest.raises(ValueError) as error:
        find(f"mine.py:{function}")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ndef f(:\n", "failed, bad.py line 2: SyntaxError: "),
        ("\nimport no_such_module\n", "failed, bad.py line 2: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_file_that_cannot_be_run_says_in_which_line(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text(source)
    with pytest.raises(ValueError) as error:
        find("bad.py:f")
    assert message in str(error.value)


def test_scripts_and_functions_that_want_something_are_no_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"there are: bert, finetune, glue, gpt, grover, transformer_xl, xlnet$"):
        find("nothing:tiny")
    with pytest.raises(ValueError, match="experiment 'quickstart' names no function; there are: none in its file"):
        find("quickstart")
    with pytest.raises(
        ValueError, match="experiment 'trec' names no function; there are: trec:bert, trec:gpt, trec:xlnet"
    ):
        find("trec")
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE[: SOURCE.index("def nothing")] + "def needs(size):\n    return size\n")
    assert find("mine.py") == find("gpt:tiny")


def test_the_current_folders_experiments_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("experiments").mkdir()
    Path("experiments/mine.py").write_text(SOURCE)
    assert find("mine:mine") == find("gpt:tiny")
