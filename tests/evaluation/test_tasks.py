"""What files of examples hold, what is wrong with them, and metrics by hand."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from ctx_jax.evaluation.tasks import Task, measure


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def read(task: Task, split="train") -> list[tuple[tuple[str, ...], str]]:
    return [(example.texts, example.label) for example in task.examples(split)]


def test_tables_and_objects_say_the_same(tmp_path):
    rows = [('A "b" c', "good"), ("d, e", "bad")]
    tsv = write(tmp_path / "a.tsv", "label\ttext\n" + "".join(f"{label}\t{text}\n" for text, label in rows))
    csv = write(tmp_path / "a.csv", 'label,text\r\ngood,"A ""b"" c"\r\n\r\nbad,"d, e"\r\n')
    jsonl = write(
        tmp_path / "a.jsonl", '{"label": "good", "text": "A \\"b\\" c"}\n\n{"text": "d, e", "label": "bad"}\n'
    )
    packed = tmp_path / "b.tsv.gz"
    packed.write_bytes(gzip.compress(tsv.read_bytes()))
    for path in (tsv, csv, jsonl, packed):
        assert read(Task(path, whole=True)) == [((text,), label) for text, label in rows], path
    assert Task(csv, whole=True).with_labels().labels == ("bad", "good")
    bare = write(tmp_path / "bare.tsv", "\n".join(f"{label}\t{text}\tmore" for text, label in rows))
    assert read(Task(bare, whole=True, columns=("label", "text"))) == read(Task(tsv, whole=True))


def test_labels_that_are_numbers_are_sorted_as_numbers(tmp_path):
    path = write(tmp_path / "a.tsv", "text\tlabel\n" + "".join(f"x\t{n}\n" for n in (10, 2, 1)))
    task = Task(path, whole=True).with_labels()
    assert task.labels == ("1", "2", "10")
    assert task.targets(list(task.examples("train"))).tolist() == [2, 1, 0]
    path = write(tmp_path / "b.tsv", "text\tlabel\n" + "".join(f"x\t{n}\n" for n in "2 1 0001 01 00001 001".split()))
    assert Task(path, whole=True).with_labels().labels == ("00001", "0001", "001", "01", "1", "2")


def test_two_of_twenty_are_held_out(tmp_path):
    """In each twenty one at a drawn place, so that classes that take turns are in every split."""
    path = write(tmp_path / "a.tsv", "text\tlabel\n" + "".join(f"{n}\t{'xy'[n % 2]}\n" for n in range(200)))
    numbers = {
        split: [int(texts[0]) for texts, _ in read(Task(path), split)] for split in ("train", "validation", "test")
    }
    for split in ("validation", "test"):
        assert [number // 20 for number in numbers[split]] == list(range(10))
        assert {label for _, label in read(Task(path), split)} == {"x", "y"}
    assert (numbers["validation"][:2], numbers["test"][:2]) == ([14, 25], [4, 35])
    assert sorted(number for split in numbers.values() for number in split) == list(range(200))
    other = write(tmp_path / "b.tsv", "text\tlabel\nother\tx\n")
    assert read(Task(path, validation=other), "validation") == [(("other",), "x")]
    assert len(read(Task(path, validation=other))) == 190
    with pytest.raises(ValueError, match=r"b.tsv: the split test needs 20 examples, or a file of its own"):
        read(Task(other), "test")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "text\tlabel\na\tx\n \ty\n", r"a.tsv line 3: the field 'text' is empty"),
        ("a.tsv", "text\tlabel\na\t\n", r"a.tsv line 2: the field 'label' is empty"),
        ("a.tsv", "text\tlabel\na\n", r"a.tsv line 2 has 1 columns, not 2 \(text, label\)"),
        (
            "a.tsv",
            "txt\tlabel\na\tx\n",
            r"a.tsv line 2 has no column 'text'; did you mean 'txt'\? \(there are: txt, label",
        ),
        ("a.csv", 'text,label\n"a,x\n', r"a.csv line 2 is not CSV: unexpected end of data: begin and end a field that"),
        ("a.csv", 'text,label\n"a "b"",x\n', r"a.csv line 2 is not CSV: .* expected .*write those inside it twice$"),
        ("a.tsv", "text\tlabel\na\tb\tx\n", r"a.tsv line 2 has 3 columns, not 2 \(text, label\): mend it, or name"),
        ("a.tsv", "text\ttext\tlabel\na\tb\tx\n", r"a.tsv line 1 names 2 columns 'text': rename all but one"),
        ("a.tsv", "", r"a.tsv: the split train is empty"),
        ("a.tsv", "text\tlabel\n", r"a.tsv: the split train is empty"),
        (
            "a.jsonl",
            '{"text": "a"}\n',
            r"a.jsonl line 1 has no column 'label'.*: rename one, or name another with --data.corpus.texts or",
        ),
        ("a.jsonl", '{"text": null, "label": 1}\n', r"a.jsonl line 1: the field 'text' is empty"),
        (
            "a.jsonl",
            '{"text": ["a"], "label": 1}\n',
            r"a.jsonl line 1: the field 'text' is a list: give a text or a number",
        ),
        ("a.jsonl", '\n{"text": "a",\n', r"a.jsonl line 2 is not JSON"),
        (
            "a.jsonl",
            '\n{"text": "a \\ud800", "label": 1}\n',
            r"a.jsonl line 2: the field 'text' has half a surrogate pair .*: remove it, or set --data.corpus.errors",
        ),
        ("a.jsonl", '{"text": "a", "label": "\\udc00"}\n', r"line 1: the field 'label' has half a surrogate pair"),
        ("a.jsonl", "[1]\n", r"a.jsonl line 1 is no object"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_bad_lines_are_named(tmp_path, name, text, message, whole):
    with pytest.raises(ValueError, match=message):
        read(Task(write(tmp_path / name, text), whole=whole))


def test_half_a_surrogate_pair_can_be_replaced_and_counts_where_it_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a \\ud800\\ud83d\\ude42", "label": "x", "more": "\\udc00"}\n')
    assert read(Task(path, whole=True, errors="replace")) == [(("a \ufffd\U0001f642",), "x")]
    path = write(tmp_path / "b.jsonl", '{"text": "a \\ud83d\\ude42", "label": "x", "more": "\\udc00"}\n')
    assert read(Task(path, whole=True)) == [(("a \U0001f642",), "x")]


def test_a_field_of_csv_may_be_long(tmp_path):
    text = 'a "long" one, ' * 20_000
    path = write(tmp_path / "a.csv", 'text,label\n"{}",x\nb,y\n'.format(text.replace('"', '""')))
    assert read(Task(path, whole=True)) == [((text,), "x"), (("b",), "y")]


def test_lines_of_white_space_and_empty_fields_behind_the_last_are_left_out(tmp_path):
    path = write(tmp_path / "a.tsv", " \ntext\tlabel\n\t \na\tx\t\t\n  \nb\ty\n")
    assert read(Task(path, whole=True)) == [(("a",), "x"), (("b",), "y")]


def test_what_a_run_reads_is_not_named_by_options(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"txt": "a"}\n')
    with pytest.raises(
        ValueError, match=r"line 1 has no column 'text'; did you mean 'txt'\? \(there are: txt\): rename one$"
    ):
        list(Task(path, whole=True).inputs(path))
    path = write(tmp_path / "a.tsv", "text\na\tb\n")
    with pytest.raises(ValueError, match=r"a.tsv line 2 has 2 columns, not 1 \(text\): mend it$"):
        list(Task(path, whole=True).inputs(path))


def test_bytes_and_labels_that_are_none(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"text\tlabel\na\tx\nb\xff\tx\n")
    with pytest.raises(ValueError, match=r"a.tsv line 3 is not UTF-8: .* or set --data.corpus.errors replace"):
        read(Task(tmp_path / "a.tsv", whole=True))
    assert read(Task(tmp_path / "a.tsv", whole=True, errors="replace"))[1] == (("b\ufffd",), "x")
    path = write(tmp_path / "b.tsv", "text\tlabel\na\tgood\nb\tgod\n")
    task = Task(path, whole=True, labels=("bad", "good"))
    with pytest.raises(
        ValueError, match=r"b.tsv line 3: unknown label 'god'; did you mean 'good'\?; there are bad, good"
    ):
        task.targets(list(task.examples("train")))
    with pytest.raises(ValueError, match=r"b.tsv line 2: the label 'good' is no number"):
        Task(path, whole=True, kind="regression").with_labels()


def test_numbers_are_scaled_by_those_of_training(tmp_path):
    path = write(tmp_path / "a.tsv", "text\tlabel\na\t1\nb\t2\nc\t3\nd\t6\n")
    other = write(tmp_path / "b.tsv", "text\tlabel\na\t-1\nb\t10\n")
    task = Task(path, validation=other, test=other, kind="regression").with_labels()
    assert task.scale == pytest.approx((3.0, math.sqrt(3.5)))
    np.testing.assert_allclose(task.targets(list(task.examples("validation"))) * math.sqrt(3.5), [-4, 7], rtol=1e-6)
    assert task.with_labels() is task
    path = write(tmp_path / "c.tsv", "text\tlabel\na\t1\nb\t1.0\n")
    with pytest.raises(ValueError, match=r"c.tsv has one label alone, 1.0: give examples of different numbers"):
        Task(path, whole=True, kind="regression").with_labels()


def test_declarations_that_cannot_be():
    with pytest.raises(ValueError, match="metric 'pearson' is none of classification: choose accuracy or f1"):
        Task("a.tsv", metric="pearson")
    with pytest.raises(ValueError, match=r"columns \('texts', 'label'\) have no 'text'; did you mean 'texts'"):
        Task("a.tsv", columns=("texts", "label"))
    with pytest.raises(ValueError, match="name the column of a text, or the two of a pair"):
        Task("a.tsv", texts=("a", "b", "c"))


def outputs(predicted: list[int], classes: int) -> list[dict[str, np.ndarray]]:
    """In two batches, from the last example to the first, with a row of padding."""
    order = np.arange(len(predicted))[::-1]
    scores = np.eye(classes)[np.array(predicted)[order]]
    return [
        {"example": order[:2], "scores": scores[:2]},
        {"example": np.append(order[2:], -1), "scores": np.append(scores[2:], [[9.0] * classes], 0)},
    ]


def test_metrics_of_classes(capsys):
    task = Task("a.tsv", labels=("no", "yes"))
    # 2 true positives, 1 false positive, 1 false negative, 1 true negative
    found = measure(task, np.array([1, 1, 0, 1, 0]), outputs([1, 1, 1, 0, 0], 2))
    assert found == pytest.approx({"accuracy": 0.6, "f1": 4 / 6, "matthews": (2 - 1) / 6, "collapsed": 0})
    found = measure(task, np.array([1, 1, 0, 1, 0]), outputs([0, 0, 0, 0, 0], 2))
    assert found == {"accuracy": 0.4, "f1": 0.0, "matthews": 0.0, "collapsed": 1}
    assert "has collapsed: all of 5 examples are predicted 'no'" in capsys.readouterr().err
    found = measure(task, np.array([1, 1, 1, 1, 1]), outputs([1, 1, 1, 1, 1], 2))
    assert found == {"accuracy": 1.0, "f1": 1.0, "matthews": 0.0, "collapsed": 0}
    assert measure(task, np.array([0, 0, 0]), outputs([0, 0, 0], 2))["matthews"] == 0.0
    assert measure(task, np.array([1, 1, 1]), outputs([1, 0, 0], 2))["matthews"] == 0.0
    three = Task("a.tsv", labels=("a", "b", "c"))
    assert measure(three, np.array([0, 1, 1]), outputs([0, 1, 0], 3))["f1"] == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)


def test_metrics_of_numbers():
    task = Task("a.tsv", kind="regression")
    gold = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    batch = {"example": np.array([3, 0, 1, 2, -1]), "scores": np.array([[9.0], [0.0], [2.0], [1.0], [5.0]])}
    pearson = np.corrcoef([0, 2, 1, 9], gold)[0, 1]
    assert measure(task, gold, [batch]) == pytest.approx({"pearson": pearson, "spearman": 1 - 6 * 2 / 60})
    flat = {"example": np.arange(4), "scores": np.ones((4, 1))}
    assert measure(task, gold, [flat]) == {"pearson": 0.0, "spearman": 0.0}
    assert not any(map(math.isnan, measure(task, gold, [flat]).values()))
