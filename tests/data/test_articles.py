"""Articles as fields: what is read, how fields are marked, dropped and ordered, and that nothing is lost."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctx_jax.contract import Vocabulary
from ctx_jax.data.articles import Articles, ArticleStore, Field, Fields, Markers, SotuArticles, shortened, titled

VOCABULARY = Vocabulary(size=60, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)
MARKERS = Markers(begin=2, end=3, first=60)


def field(*ids: int) -> Field:
    return Field(np.array(ids, np.int32), np.arange(len(ids)) % 2 == 0)


SHORT = [field(10), field(), field(20, 21, 22)]
LONG = [field(11), field(12, 13), field(*range(30, 55))]


def store() -> ArticleStore:
    return ArticleStore(VOCABULARY, MARKERS, [SHORT, LONG], np.array([9, 60]), "corpus", "train")


def test_fields_stand_between_their_own_marks():
    row = MARKERS.row(SHORT, [2, 1, 0])
    assert row.ids.tolist() == [2, 64, 20, 21, 22, 65, 60, 10, 61, 3]
    assert np.flatnonzero(row.begins).tolist() == [2, 4, 7]


def test_the_ordered_pass_predicts_each_token_once():
    made, reader = store(), Fields(8)
    assert made.windows(8).tolist() == [0, 2, 7]  # 10 tokens and 36, less one
    batches = [reader.batch(made, n, range(3), batch_size=3, seed=None) for n in range(reader.passes(made, 3))]
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    real = rows["documents"] > 0
    whole = [MARKERS.row(fields, range(3)).ids for fields in (SHORT, LONG)]
    assert rows["tokens"][real].tolist() == [i for ids in whole for i in ids[:-1].tolist()]
    assert rows["next_tokens"][real].tolist() == [i for ids in whole for i in ids[1:].tolist()]
    assert (rows["next_documents"] == rows["documents"]).all() and not rows["tokens"][~real].any()
    assert real.sum() == len(made.tokens) - 2  # what bits per byte ask for
    assert rows["example"].tolist() == list(range(9)) and not real[7:].any()
    assert rows["words"][0].tolist() == [0, 0, 1, 0, 0, 2, 2, 3] and rows["positions"][3].tolist() == list(range(8))


def visits(reader: Fields, count: int) -> list[dict[str, Any]]:
    made = store()
    return [reader.batch(made, n, range(4), batch_size=4, seed=3) for n in range(count)]


def test_training_reads_each_window_once_an_epoch_and_a_row_alone_is_the_same():
    reader = Fields(8)
    batches = visits(reader, 7)  # four epochs of seven
    seen = [(int(e), int(x)) for batch in batches for e, x in zip(batch["epoch"], batch["example"], strict=True)]
    assert sorted(seen) == list(itertools.product(range(4), range(7)))
    alone = reader.batch(store(), 5, [2], batch_size=4, seed=3)
    for name, value in alone.items():
        np.testing.assert_array_equal(value[0], batches[5][name][2], err_msg=name)


def test_fields_are_dropped_and_put_in_two_parts_as_published():
    """Of the short article (two fields, of which the last is the body) in whole rows."""
    made = ArticleStore(VOCABULARY, MARKERS, [SHORT] * 4, np.ones(4), "corpus", "train")
    reader, counts = Fields(16), {}
    for n in range(1000):
        batch = reader.batch(made, n, range(4), batch_size=4, seed=1)
        for tokens in batch["tokens"]:
            order = tuple(int(i) for i in tokens if i in (60, 64))
            counts[order] = counts.get(order, 0) + 1
    # alone 0.35; else both, in order unless the first alone is in the second part; else one of them, the body if none
    both, first = 0.65 * 0.9**2, 0.65 * 0.9 * 0.1
    expected = {(60, 64): both * 3 / 4, (64, 60): both / 4, (60,): first, (64,): 1 - both - first}
    assert counts.keys() == expected.keys()
    for order, p in expected.items():
        assert abs(counts[order] - 4000 * p) < 4.5 * (4000 * p * (1 - p)) ** 0.5, order


def test_a_window_is_a_stretch_of_the_article_and_the_first_its_beginning():
    for batch in visits(Fields(8, drop=0.0, alone=0.0), 35):
        for row in range(4):
            size = int((batch["documents"][row] > 0).sum())
            ids = [*batch["tokens"][row, :size].tolist(), int(batch["next_tokens"][row, size - 1])]
            fields = SHORT if batch["example"][row] < 2 else LONG
            orders = [MARKERS.row(fields, order).ids.tolist() for order in itertools.permutations(range(3))]
            starts = [n for whole in orders for n in range(len(whole)) if whole[n : n + len(ids)] == ids]
            assert starts and (len(ids) == 9 or fields is SHORT)
            if batch["example"][row] in (0, 2):
                assert 0 in starts


def test_excerpts_have_all_fields_and_follow_the_body():
    bodies = set()
    for batch in visits(Fields(16, drop=0.0, alone=0.0, excerpts=True), 40):
        for row, example in enumerate(batch["example"]):
            if example == 0:
                continue  # the short article
            ids = [*batch["tokens"][row].tolist(), int(batch["next_tokens"][row, -1])]
            assert ids[0] == 2 and ids[-1] == 3 and {60, 61, 62, 63, 64, 65, 11, 12, 13} <= set(ids)
            body = ids[ids.index(64) + 1 : ids.index(65)]
            assert body == list(range(body[0], body[0] + 6))  # 17 tokens, less two, six marks and three of other fields
            assert example > 1 or body[0] == 30
            bodies.add(body[0])
    assert len(bodies) > 10 and max(bodies) <= 49


def test_what_is_too_long_loses_its_bodys_end():
    assert [part.ids.tolist() for part in shortened(LONG, 14)] == [[11], [12, 13], [30, 31, 32, 33, 34]]
    assert [part.ids.tolist() for part in shortened(LONG, 8)] == [[11], [12], []]
    assert [part.ids.tolist() for part in shortened(SHORT, 8)] == [[10], [], [20, 21, 22]]


def write(file: Path, *entries: Any) -> Path:
    file.write_text("".join(f"{json.dumps(entry)}\n\n" for entry in entries))
    return file


def test_articles_of_a_users_own(tmp_path):
    entries = [{"text": f"body {n}\r\n", "authors": ["A", "B"], "date": n, "title": None} for n in range(20)]
    corpus = Articles(path=write(tmp_path / "a.jsonl", *entries), fields=("title", "date", "authors", "text"))
    splits = {split: list(corpus.articles(split)) for split in ("train", "validation", "test")}
    assert [len(articles) for articles in splits.values()] == [18, 1, 1]
    (last,) = splits["test"]
    assert last.texts == ("", "19", "A, B", "body 19") and last.line == 39
    assert [passage.text for passage in corpus.passages("test")] == ["19", "A, B", "body 19"]
    assert len({corpus.fingerprint(split) for split in splits}) == 3


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"title": "x"}, r"a\.jsonl line 1 has no 'text', which is the body"),
        ({"titel": "x"}, r"line 1 has none of the fields title, text.*there are: titel"),
        ({"text": True}, "'text' is no text but bool"),
        (
            {"text": "a \ud800"},
            r"a\.jsonl line 1: 'text' has half a surrogate pair .*: remove it, or set --data.corpus",
        ),
        ({"text": "a", "title": ["b", "\udc00"]}, r"a\.jsonl line 1: 'title' has half a surrogate pair"),
        ({"text": "only one"}, "the split test needs 20 articles, or a file of its own"),
    ],
)
def test_bad_articles_are_named(entry, message, tmp_path):
    corpus = Articles(path=write(tmp_path / "a.jsonl", entry), fields=("title", "text"))
    with pytest.raises(ValueError, match=message):
        list(corpus.articles("test"))
    with pytest.raises(ValueError, match=r"a.jsonl: the split train is empty"):
        list(replace(corpus, path=write(tmp_path / "a.jsonl")).articles("train"))


def test_what_is_no_character_is_named_or_replaced(tmp_path):
    file = tmp_path / "a.jsonl"
    corpus = Articles(path=file, fields=("title", "text"), whole=True)
    file.write_bytes(b'{"text": "a"}\n\n{"text": "caf\xe9 \\ud800", "title": "\\ud83d\\ude42", "more": "\\udc00"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl line 3 is not UTF-8: convert .*, or set --data.corpus.errors repl"):
        list(corpus.articles("train"))
    read = [article.texts for article in replace(corpus, errors="replace").articles("train")]
    assert read == [("", "a"), ("\U0001f642", "caf\ufffd \ufffd")]


def test_too_few_rows_and_bad_options():
    with pytest.raises(ValueError, match="7 rows of articles are too few for a batch of 8"):
        Fields(8).batch(store(), 0, [0], batch_size=8, seed=0)
    with pytest.raises(ValueError, match=r"drop 1\.5 is no probability"):
        Fields(8, drop=1.5)
    with pytest.raises(ValueError, match="name one or more, each once"):
        Articles(path="a.jsonl", fields=("a", "a"))


def test_speeches_are_articles():
    assert titled("https://host/documents/first-annual-address-congress-0") == "First annual address congress"
    articles = list(SotuArticles().articles("validation"))
    assert len(articles) == 12
    president, year, title, text = articles[0].texts
    assert (president, year) == ("Thomas Jefferson", "1801") or int(year) < 1810
    assert title and len(text) > 1000 and all(all(article.texts) for article in articles)
