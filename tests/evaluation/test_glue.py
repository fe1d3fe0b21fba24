"""GLUE's tables as they are published, the same from TFDS, and IMDb's folders: one declaration reads them alike."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctx_jax.data.tfds import load_library, quiet
from ctx_jax.evaluation.glue import TASKS, Glue
from ctx_jax.experiment import find
from ctx_jax.options import with_text

MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
)
HEADERS = {
    # the columns of train.tsv and of test.tsv, None = no header
    "cola": (None, "index\tsentence"),
    "sst2": ("sentence\tlabel", "index\tsentence"),
    "mrpc": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "index\t#1 ID\t#2 ID\t#1 String\t#2 String"),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2",
    ),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "id\tquestion1\tquestion2"),
    "mnli": (f"{MNLI}\tsentence1\tsentence2\tlabel1\tgold_label", f"{MNLI}\tsentence1\tsentence2"),
    "mnli_mismatched": (f"{MNLI}\tsentence1\tsentence2\tlabel1\tgold_label", f"{MNLI}\tsentence1\tsentence2"),
    "qnli": ("index\tquestion\tsentence\tlabel", "index\tquestion\tsentence"),
    "rte": ("index\tsentence1\tsentence2\tlabel", "index\tsentence1\tsentence2"),
    "wnli": ("index\tsentence1\tsentence2\tlabel", "index\tsentence1\tsentence2"),
}
TEXTS = ('He said "no', "It isn't so.")
"""With an open quotation mark, which is a character like any other."""


def line(columns: list[str], about: Any, label: str, index: int) -> str:
    values = dict.fromkeys(columns, "x") | dict(zip(about.texts, TEXTS, strict=False))
    return "\t".join((values | {about.label: label, about.index: str(index)})[column] for column in columns) + "\n"


def published(folder: Path, name: str) -> Path:
    """The tables of a task, of two examples each; the test's are not in order."""
    about, (train, test) = TASKS[name], HEADERS[name]
    labels = about.labels[:2] or ("2.5", "5.000")
    columns = ["source", "label", "mark", "sentence"] if train is None else train.split("\t")
    for split in ("train", "validation"):
        lines = [line(columns, about, label, number) for number, label in enumerate(labels)]
        (folder / f"{about.files[split]}.tsv").write_text("".join([*([train + "\n"] if train else []), *lines]))
    lines = [line(test.split("\t"), about, "", number) for number in (1, 0)]
    (folder / f"{about.files['test']}.tsv").write_text(test + "\n" + "".join(lines))
    return folder


@pytest.mark.parametrize("name", HEADERS)
def test_tables_as_they_are_published(name, tmp_path):
    task, about = Glue(published(tmp_path, name), name=name), TASKS[name]
    labels = list(about.labels[:2] or ("2.5", "5.000"))
    for split in ("train", "validation"):
        found = list(task.examples(split))
        assert [example.texts for example in found] == [TEXTS[: len(about.texts)]] * 2
        assert [example.label for example in found] == labels
    assert found[1].where == f"{tmp_path / (about.files['validation'] + '.tsv')} line {2 if name == 'cola' else 3}"
    assert task.unlabelled() == [(number, TEXTS[: len(about.texts)]) for number in (0, 1)]
    with pytest.raises(ValueError, match=f"the test labels of {name} are not published"):
        list(task.examples("test"))
    if about.labels:
        assert task.with_labels().labels == about.labels and task.targets(found).tolist() == [0, 1]
    else:
        assert task.with_labels().scale == (3.75, 1.25)
    (tmp_path / f"{about.files['train']}.tsv").rename(tmp_path / "x")
    (tmp_path / f"{about.files['train']}.tsv.gz").write_bytes(gzip.compress((tmp_path / "x").read_bytes()))
    assert [example.label for example in task.examples("train")] == labels


def test_every_task_is_an_experiment_and_has_its_paper_metric():
    metrics = {}
    for name in TASKS:
        experiment = find(f"glue:{name}")
        assert experiment.data.corpus.name == name
        metrics[name] = experiment.data.corpus.chooses
    assert metrics.pop("cola") == "matthews" and metrics.pop("stsb") == "spearman"
    assert metrics.pop("mrpc") == metrics.pop("qqp") == "f1"
    assert set(metrics.values()) == {"accuracy"}
    data, rest = with_text(find("glue:rte").data, ["--text", "tfds:glue/rte"])
    assert (data.corpus.data_set, data.corpus.texts, rest) == ("glue/rte", ("sentence1", "sentence2"), [])


def test_lines_of_qqp_that_lack_something_are_left_out_and_others_named(tmp_path, capsys):
    published(tmp_path, "qqp")
    with (tmp_path / "train.tsv").open("a") as file:
        file.write("3\tx\tx\tonly one\n4\tx\tx\t\tempty\t1\n5\tx\tx\ta\tb\t1\n")
    found = list(Glue(tmp_path, name="qqp").examples("train"))
    assert [example.texts for example in found][2:] == [("a", "b")]
    assert "2 lines of" in capsys.readouterr().err
    published(tmp_path, "rte")
    with (tmp_path / "train.tsv").open("a") as file:
        file.write("3\tonly one\n")
    with pytest.raises(ValueError, match=r"train.tsv line 4 lacks one of sentence1, sentence2, label: mend it"):
        list(Glue(tmp_path, name="rte").examples("train"))
    with pytest.raises(ValueError, match=r"has no column 'gold_label' \(there are: index, sentence1"):
        (tmp_path / "train.tsv").rename(tmp_path / "dev_matched.tsv")
        list(Glue(tmp_path, name="mnli").examples("validation"))


def test_an_index_that_is_no_number_is_named(tmp_path):
    published(tmp_path, "rte")
    (tmp_path / "test.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\nx1\ta\tb\n")
    with pytest.raises(ValueError, match=r"test.tsv line 3: index 'x1' is no number: mend it"):
        Glue(tmp_path, name="rte").unlabelled()


FEATURES = {
    "rte": (("sentence1", "sentence2"), ["entailment", "not_entailment"]),
    "cola": (("sentence",), ["unacceptable", "acceptable"]),
    "stsb": (("sentence1", "sentence2"), None),
}


def prepared(folder: Path, name: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    """A data set of TFDS with GLUE's features."""
    tfds = load_library()
    texts, labels = FEATURES[name]

    class Builder(tfds.core.ShardBasedBuilder, skip_registration=True):  # pyright: ignore
        VERSION = tfds.core.Version("2.0.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name)]  # noqa: RUF012

        def _info(self) -> Any:
            label = tfds.features.Scalar(dtype=np.float32) if labels is None else tfds.features.ClassLabel(names=labels)
            features = {text: tfds.features.Text() for text in texts}
            features |= {"label": label, "idx": tfds.features.Scalar(dtype=np.int32)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _shard_iterators_per_split(self, dl_manager: Any) -> dict[str, list[Any]]:
            def shard(split: str) -> Iterator[tuple[int, dict[str, Any]]]:
                return lambda: enumerate(rows[split])  # pyright: ignore[reportReturnType]

            return {split: [shard(split)] for split in rows}

    Builder.name = "glue"
    with quiet():
        Builder(config=name, data_dir=str(folder), file_format="array_record").download_and_prepare()


@pytest.mark.parametrize(("name", "labels"), [("rte", [0, 1]), ("cola", [1, 0]), ("stsb", [2.5, 5.0])])
def test_tfds_says_what_the_tables_say(name, labels, tmp_path):
    texts = FEATURES[name][0]

    def row(label: Any, idx: int, more: str = "") -> dict[str, Any]:
        return {text: TEXTS[number] + more for number, text in enumerate(texts)} | {"label": label, "idx": idx}

    none = -1 if FEATURES[name][1] else 0.0
    rows = {split: [row(label, idx) for idx, label in enumerate(labels)] for split in ("train", "validation")}
    prepared(tmp_path, name, {**rows, "test": [row(none, 1, "!"), row(none, 0)]})
    task = Glue(f"tfds:glue/{name}", name=name, data_dir=tmp_path)
    assert task.data_set == f"glue/{name}"
    for split in ("train", "validation"):
        found = list(task.examples(split))
        assert [example.texts for example in found] == [TEXTS[: len(texts)]] * 2
        written = [TASKS[name].labels[int(label)] for label in labels] if TASKS[name].labels else ["2.5", "5.0"]
        assert [example.label for example in found] == written
    assert found[1].where == f"tfds:glue/{name} validation record 1"
    assert [one.number for one in task.unlabelled()] == [0, 1]  # in the leaderboard's order
    assert task.unlabelled()[1].texts == tuple(text + "!" for text in TEXTS[: len(texts)])
    assert task.fingerprint("validation") != task.fingerprint("test")
    with pytest.raises(ValueError, match=f"no feature 'premise'.*there are: .*{texts[0]}"):
        list(Glue(f"tfds:glue/{name}", name="mnli", data_dir=tmp_path).examples("train"))


def test_imdb_as_it_is_published(tmp_path):
    for part, count in (("train", 20), ("test", 1)):
        for label in ("neg", "pos"):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                (tmp_path / part / label / f"{number:02}_1.txt").write_text(f"{part} {label} {number}<br />")
    task = Glue(tmp_path, name="imdb")
    train, validation, test = (list(task.examples(split)) for split in ("train", "validation", "test"))
    assert [example.texts[0] for example in validation] == ["train neg 14<br />", "train pos 5<br />"]
    assert [(example.texts[0], example.label) for example in test] == [
        ("test neg 0<br />", "neg"), ("test pos 0<br />", "pos"),
    ]  # fmt: skip
    assert len(train) == 38 and task.with_labels().labels == ("neg", "pos")
    assert task.fingerprint("train") != task.fingerprint("test")
    (tmp_path / "train/neg/03_1.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"neg/03_1.txt is not UTF-8: convert the file to UTF-8, or set"):
        list(task.examples("train"))
    with pytest.raises(FileNotFoundError, match=r"neg has no texts: give the folder of imdb as it is published"):
        list(Glue(tmp_path / "train", name="imdb").examples("train"))


def test_what_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="task 'colla' is not known; did you mean 'cola'"):
        Glue("x", name="colla")
    with pytest.raises(ValueError, match=r"texts \('premise',\) is not rte's, .*: leave it out"):
        Glue("x", name="rte", texts=("premise",))
    with pytest.raises(FileNotFoundError, match=r"has no train.tsv: give the folder of rte as GLUE publishes"):
        list(Glue(tmp_path, name="rte").examples("train"))
    with pytest.raises(ValueError, match="metric 'pearson' is none of classification"):
        Glue("x", name="rte", metric="pearson")
