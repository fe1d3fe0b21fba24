"""Tables of choices, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from ctx_jax.data.examples import Examples
from ctx_jax.data.symbols import Bytes
from ctx_jax.evaluation.files import Encoder
from ctx_jax.evaluation.multiple_choice import MultipleChoice
from ctx_jax.models.bert import BertConfig
from ctx_jax.transfer.inputs import template

HEADER = "sent1,sent2,ending0,ending1,ending2,ending3,label\n"


def test_choices_begin_with_a_column_and_are_pairs(tmp_path):
    (tmp_path / "a.csv").write_text(HEADER + '"He sat, then",He,ran,"sat, too",is,x,2\nA,B,c,d,e,f,0\n')
    task = MultipleChoice(tmp_path / "a.csv", whole=True, begin="sent2")
    items = list(task.examples("train"))
    assert items[0].texts == ("He sat, then", "He ran", "He sat, too", "He is", "He x")
    assert [(item.answer, item.line) for item in items] == [(2, 2), (0, 3)]
    tokenizer = Bytes().train([], tmp_path / "t")
    encoder = Encoder(tokenizer, template(BertConfig(), tokenizer.vocabulary, head=True), Examples(24))
    store, predictions = task.encode(items, encoder)
    batch = Examples(24).batch(store, 0, range(3), batch_size=3, seed=None)
    assert batch["tokens"].shape == (3, 4, 24)
    assert (batch["labels"].tolist()[:2], batch["example"].tolist()) == ([0, 2], [1, 0, -1])
    letters = [bytes((row[row >= 7] - 7).astype(np.uint8)).decode() for row in batch["tokens"][0]]
    assert letters == ["AB c", "AB d", "AB e", "AB f"]
    assert batch["documents"][2].sum() == 0
    scores = np.array([[0, 0, 9, 0], [1, 0, 9, 0], [7, 7, 7, 7.0]])
    outputs = [{"example": batch["example"], "scores": scores}]
    assert store.measure(outputs) == {"accuracy": 0.5}
    said = predictions(outputs)
    assert [(one["line"], one["answer"], one["choice"]) for one in said] == [(2, 2, "He is"), (3, 2, "B e")]
    assert sum(said[0]["probabilities"]) == pytest.approx(1, abs=4e-6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,b,c,d,e,f,4", r"a.csv line 2: unknown label '4': give the number of the right choice, 0 to 3"),
        ("a,b,c,d,e,f,no", r"a.csv line 2: unknown label 'no'"),
        ("a,b,c,,e,f,1", r"a.csv line 2: the field 'ending1' is empty"),
        ("a,b,c,d", r"a.csv line 2 has 4 columns, not 7"),
    ],
)
def test_bad_lines_are_named(line, message, tmp_path):
    (tmp_path / "a.csv").write_text(HEADER + line + "\n")
    with pytest.raises(ValueError, match=message):
        list(MultipleChoice(tmp_path / "a.csv", whole=True).examples("train"))


def test_declarations_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="name the columns of two or more"):
        MultipleChoice("a.csv", choices=("one",))
    (tmp_path / "a.csv").write_text(HEADER + "a,b,c,d,e,f,1\n")
    with pytest.raises(
        ValueError, match=r"no column 'sent3'; did you mean 'sent\d'.*--data.corpus.text, --data.corpus.begin"
    ):
        list(MultipleChoice(tmp_path / "a.csv", whole=True, begin="sent3").examples("train"))
