"""Likelihoods against one row at a time in float64; what is made of them against numbers by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax import cli
from ctx_jax.evaluation import few_shot
from ctx_jax.evaluation.few_shot import Item, Likelihood, Row, Scorer, Shots, choosing, items, last_words
from ctx_jax.objectives.masked import Masked
from ctx_jax.training.metrics import Diverged
from ctx_jax.transfer.texts import own_options

WIDTH = 48
PAIRS = [
    ("", "the people"),
    ("the union of the people", " and the states"),
    ("the union of the people", " in peace"),
    ("the union of the peo", "ple"),
    ("law and order " * 8, "of the union"),
    ("", "the people"),
]


@pytest.fixture(scope="module", params=["gpt", "transformer_xl"])
def scorer(request, language_model) -> Scorer:
    return Scorer(language_model(request.param), length=12, batch_size=4)


@pytest.fixture(scope="module")
def log_probabilities(scorer: Scorer):
    """ids [n] -> log P of what comes after each, [n, V] float64, of one row that nothing was cut from."""
    model = scorer.run.model

    @jax.jit
    def logits(tokens, n):
        places = jnp.arange(WIDTH)[None]
        batch = {"tokens": tokens, "documents": (places < n).astype(jnp.int32), "positions": places}
        return model.apply(scorer.run.variables, model.apply(scorer.run.variables, batch).hidden, method="logits")

    def of(ids: list[int]) -> np.ndarray:
        found = np.asarray(logits(np.pad(ids, (0, WIDTH - len(ids)))[None], len(ids)), np.float64)[0, : len(ids)]
        return found - np.log(np.exp(found).sum(-1, keepdims=True))

    return of


def naive(log_probabilities, row: Row) -> Likelihood:
    found = log_probabilities(row.tokens)[len(row.tokens) - len(row.targets) :]
    total = sum(found[place, target] for place, target in enumerate(row.targets))
    return Likelihood(total, len(row.targets), found.argmax(-1).tolist() == row.targets)


def assert_alike(ours: list[Likelihood], theirs: list[Likelihood]) -> None:
    np.testing.assert_allclose([each.total for each in ours], [each.total for each in theirs], rtol=1e-5)
    assert [each[1:] for each in ours] == [each[1:] for each in theirs]


def test_likelihoods(scorer: Scorer, log_probabilities):
    rows, begin = [], scorer.run.tokenizer.vocabulary.begin
    for context, continuation in PAIRS:
        before, after = scorer.encode(context, continuation)
        assert before + after == scorer.run.tokenizer.encode(context + continuation).ids.tolist()
        rows.append(Row([begin, *before, *after][-13:-1], after))
    assert len(rows[4].tokens) == 12 and begin not in rows[4].tokens
    assert_alike(scorer(PAIRS), [naive(log_probabilities, row) for row in rows])
    assert scorer.cut == sum(
        len(before) + len(after) > 12 for before, after in (scorer.encode(*pair) for pair in PAIRS[:5])
    )
    best = int(log_probabilities(rows[1].tokens)[-1].argmax())
    (greedy,) = scorer.likelihoods([Row(rows[1].tokens, [best])])
    assert greedy.greedy and greedy.total > max(each.total for each in scorer(PAIRS))


def test_a_whole_text(scorer: Scorer, log_probabilities):
    text = "the union of the people and the states in peace"
    ids = scorer.run.tokenizer.encode(text).ids.tolist()
    assert len(ids) == 23
    begun = [scorer.run.tokenizer.vocabulary.begin, *ids]
    expected = [naive(log_probabilities, row) for row in (Row(begun[:12], ids[:12]), Row(begun[11:23], ids[12:]))]
    found = scorer.rolling(text)
    assert (found.tokens, found.greedy) == (23, False)
    assert found.total == pytest.approx(sum(each.total for each in expected), rel=1e-5)
    assert scorer.rolling("") == (0.0, 0, True)


def test_the_border_of_a_joined_token(scorer: Scorer):
    tokenizer = scorer.run.tokenizer
    pieces = [[tokenizer.piece(token) for token in part] for part in scorer.encode("of the congr", "ess in")]
    assert pieces == [["▁of", "▁the"], ["▁congress", "▁in"]]
    with pytest.raises(ValueError, match="'' after 'the people' has no token of its own"):
        scorer.encode("the people", "")
    with pytest.raises(ValueError, match=r"'people of .* tokens, more than the 12 read: shorten it"):
        scorer([("the", " people of the union" * 20)])


def test_a_run_that_gives_no_probability(language_model):
    run = language_model("gpt")
    for length, message in ((0, "choose 1 or more"), (257, "the model's 256 positions: choose 256 or less")):
        with pytest.raises(ValueError, match=f"--length {length} .*{message}"):
            Scorer(run, length)
    run.variables["params"]["final_norm"]["scale"][:] = math.nan
    with pytest.raises(Diverged, match="a log-likelihood is nan"):
        Scorer(run, 12)([("", "the people")])
    masked = object.__new__(type(run.experiment))
    vars(masked).update(vars(run.experiment), objective=Masked())
    with pytest.raises(ValueError, match="a run of Masked gives no text a probability"):
        Scorer(run._replace(experiment=masked))


def test_solved_items_before_the_prompt():
    solved = [Item(f"{n}:", (" a", " b"), n % 2) for n in range(6)]
    shots = Shots(2, seed=3, delimiter="|", description="letters")
    asked = [shots.prompt(solved[4], number, solved).split("|") for number in range(20)]
    assert all(blocks[0] == "letters" and blocks[3] == "4:" for blocks in asked)
    drawn = [tuple(blocks[1:3]) for blocks in asked]
    assert {block for pair in drawn for block in pair} == {"0: a", "1: b", "2: a", "3: b", "5: b"}  # and never itself
    assert all(first != second for first, second in drawn) and len(set(drawn)) > 5
    assert asked == [shots.prompt(solved[4], number, solved).split("|") for number in range(20)]
    assert drawn != [tuple(replace(shots, seed=4).prompt(solved[4], n, solved).split("|")[1:3]) for n in range(20)]
    assert Shots().prompt(solved[4], 0, ()) == "4:"
    with pytest.raises(ValueError, match="--shots 6 are more than the 5 other items"):
        Shots(6).prompt(solved[4], 0, solved)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("3", "line 2 is no object"),
        ('{"choices": ["a"], "answer": 0}', "line 2 has no text and no context"),
        ("[" * 9999, "line 2 is not JSON"),
        ('{"text": "a \\ud800 b"}', r"line 2 has half a surrogate pair .*: remove it"),
        ('{"text": "one"}', "line 2 has fewer than two words"),
        ('{"context": "a", "choices": [" "], "answer": 0}', "line 2 has choices"),
        ('{"context": "a", "choices": "b", "answer": 0}', "line 2 has choices 'b'"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "line 2 has answer 2: .* from 0 to 1"),
        ('{"context": "a", "choices": ["b"], "answer": true}', "line 2 has answer True"),
    ],
)
def test_lines_that_are_no_items(line: str, message: str, tmp_path: Path):
    file = tmp_path / "items.jsonl"
    file.write_text('{"text": "He said\\nyes. "}\n')
    assert items(str(file)) == [Item("He said", ("\nyes.",), 0)]
    file.write_text(f'{{"context": "", "choices": [" b"], "answer": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=f"items.jsonl {message}"):
        items(str(file))


def test_bytes_that_are_none(tmp_path: Path):
    file = tmp_path / "items.jsonl"
    file.write_bytes(b'{"text": "He said yes"}\n{"text": "in a caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"items.jsonl line 2 is not UTF-8: convert the file to UTF-8$"), own_options():
        items(str(file))


class Told:
    """A scorer that knows what it is to say."""

    cut, length = 0, 9

    def __init__(self, likelihoods: dict[tuple[str, str], tuple[float, int]]) -> None:
        self.likelihoods = likelihoods

    def __call__(self, texts):
        return [Likelihood(*self.likelihoods[text], self.likelihoods[text][0] > -1) for text in texts]


def test_four_ways_to_choose():
    """log P -4, -6, -5, -9.9 of 1, 2, 1, 4 tokens and 4, 5, 10, 8 bytes; by themselves -1, -2, -1.5, -9.5."""
    choices = (" abc", " abéf"[:4], " abcdefghi", "xabcdefg")
    asked = dict(zip(choices, ((-4.0, 1), (-6.0, 2), (-5.0, 1), (-9.9, 4)), strict=True))
    alone = dict(zip(choices, ((-1.0, 1), (-2.0, 2), (-1.5, 1), (-9.5, 4)), strict=True))
    likelihoods = {("Q", choice): asked[choice] for choice in choices}
    likelihoods |= {("Answer:" if choice[0] == " " else "Answer: ", choice): alone[choice] for choice in choices}
    ways = {}
    for answer in range(4):
        found = choosing(Told(likelihoods), [Item("Q", choices, answer)], ["Q"], "Answer: ")  # pyright: ignore
        assert found.pop("chance") == 0.25
        ways |= {name: answer for name, way in found.items() if way == {"accuracy": 1.0, "standard_error": 0.0}}
    assert ways == {"sum": 0, "token": 3, "byte": 2, "unconditional": 3}


def test_last_words():
    told = Told({("a", " b"): (-0.5, 1), ("c", " d"): (-1.5, 2), ("e", " f"): (-4.0, 1), ("g", " h"): (-6.0, 1)})
    questions = [Item(context, (word,), 0) for context, word in told.likelihoods]
    found = last_words(told, questions, [question.context for question in questions])  # pyright: ignore
    assert found == {"accuracy": 0.25, "standard_error": 0.25, "perplexity": pytest.approx(math.exp(3))}


def test_the_command(language_model, monkeypatch, capsys, tmp_path: Path):
    run = language_model("gpt")
    monkeypatch.setattr(few_shot, "open_run", lambda path, checkpoint: run)
    lines = [
        {"context": f"the {noun}", "choices": [" of the union", " peace", " and law"], "answer": n}
        for n, noun in enumerate(("people", "state", "nation"))
    ]
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["few-shot", "runs/x", "--input", str(file), "--batch-size", "4"]
    cli.main([*command, "--shots", "2", "--examples", str(file), "--delimiter", "\n"])
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["items"], result["shots"], result["cut"]) == (7, 3, 2, 0)
    scorer, solved = Scorer(run), items(str(file))
    right = []
    for number, question in enumerate(solved):
        prompt = Shots(2, delimiter="\n").prompt(question, number, solved)
        totals = [each.total / each.tokens for each in scorer([(prompt, choice) for choice in question.choices])]
        right.append(totals.index(max(totals)) == number)
    assert result["token"]["accuracy"] == pytest.approx(sum(right) / 3) and result["chance"] == pytest.approx(1 / 3)

    with file.open("a") as more:
        more.write('{"text": "the people of the union"}\n')
    for arguments, message in ((command, "has 1 items of one choice"), ([*command, "--shots", "1"], "from nowhere")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(arguments)
        assert message in capsys.readouterr().err
