"""lm-evaluation-harness itself, offline, on tasks written here: make check-harness."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ctx_jax import cli
from ctx_jax.evaluation.few_shot import Scorer
from ctx_jax.runs import Trained

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {file}, test: {file}}}}}
training_split: train
fewshot_split: train
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
metadata: {{version: 1.0}}
"""
CHOOSE = """
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLL = """
metric_list: [{metric: byte_perplexity}]
"""
WRITE = """
generation_kwargs: {until: [" "], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
NOUNS = ("people", "state", "nation", "law", "war")
CHOICES = ["of the union", "peace", "and law"]


@pytest.fixture(scope="module")
def run(language_model) -> Trained:
    return language_model("gpt")


@pytest.fixture
def put(run: Trained, monkeypatch, capsys, tmp_path: Path):
    """Results of a task of the harness by the command, and its items."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from ctx_jax.evaluation import harness

    monkeypatch.setattr(harness, "open_run", lambda path, checkpoint: run)

    def results(name: str, kind: str, settings: str, lines: list[dict], *options: str, text="", target="") -> dict:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        task = TASK.format(name=name, kind=kind, file=file, text=text, target=target) + settings
        (tmp_path / f"{name}.yaml").write_text(task)
        cli.main(["harness", "runs/x", "--tasks", name, "--include-path", str(tmp_path), "--batch-size", "4", *options])
        found = json.loads(capsys.readouterr().out)
        assert (found["step"], found["shots"]) == (7, {name: 1 if options else 0})
        return found["results"][name]

    return results


@pytest.mark.parametrize("shots", [0, 1])
def test_choices(put, run: Trained, shots: int, monkeypatch):
    asked, likelihoods = [], Scorer.__call__

    def recorded(self: Scorer, texts: list[tuple[str, str]]):
        asked.extend(texts)
        return likelihoods(self, texts)

    monkeypatch.setattr(Scorer, "__call__", recorded)
    lines = [{"context": f"the {noun}", "choices": CHOICES, "answer": n % 3} for n, noun in enumerate(NOUNS)]
    options = ["--shots", "1"] if shots else []
    found = put("choose", "multiple_choice", CHOOSE, lines, *options, text="{{context}}", target="answer")
    solved = {f"{line['context']} {CHOICES[line['answer']]}" for line in lines}
    for number, (context, choice) in enumerate(asked):
        *before, last = context.split("\n\n")
        assert (last, choice) == (lines[number // 3]["context"], f" {CHOICES[number % 3]}")
        assert len(before) == shots and solved.issuperset(before)
    if shots:
        return
    scorer, right, by_length = Scorer(run), 0, 0
    for line in lines:
        totals = [each.total for each in scorer([(line["context"], f" {choice}") for choice in CHOICES])]
        right += totals.index(max(totals)) == line["answer"]
        means = [total / len(choice) for total, choice in zip(totals, CHOICES, strict=True)]
        by_length += means.index(max(means)) == line["answer"]
    assert (found["acc,none"], found["acc_norm,none"]) == (pytest.approx(right / 5), pytest.approx(by_length / 5))


def test_whole_texts(put, run: Trained):
    texts = ["the union of the people", "peace and law " * 60]
    found = put("roll", "loglikelihood_rolling", ROLL, [{"text": text} for text in texts], target="{{text}}")
    scorer = Scorer(run)
    total = sum(scorer.rolling(text).total for text in texts)
    size = sum(len(text) for text in texts)
    assert found["byte_perplexity,none"] == pytest.approx(math.exp(-total / size))


def test_texts_to_generate(put, run: Trained):
    """What greedy decoding says up to a space is the answer of the first alone."""
    from ctx_jax.evaluation.harness import HarnessModel

    class Request:
        def __init__(self, *arguments: object) -> None:
            self.args = arguments

    model, settings = HarnessModel(run, batch_size=2), {"until": [" "], "max_gen_toks": 6}
    contexts = [f"the {noun}" for noun in NOUNS]
    said = model.generate_until([Request(context, settings) for context in contexts])
    alone = [model.generate_until([Request(context, settings)])[0] for context in contexts]
    assert said == alone and all(" " not in text for text in said) and any(said)
    whole = model.generate_until([Request(context, {**settings, "until": []}) for context in contexts])
    assert [text.partition(" ")[0] for text in whole] == said
    answers = ["?", *said[1:]]
    lines = [{"context": context, "answer": answer} for context, answer in zip(contexts, answers, strict=True)]
    found = put("write", "generate_until", WRITE, lines, text="{{context}}", target="{{answer}}")
    assert found["exact_match,none"] == pytest.approx(0.8)


def test_a_task_that_is_not_there(run: Trained, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["harness", "runs/x", "--tasks", "nothing_like_it"])
    assert "--tasks nothing_like_it is no task of lm_eval" in capsys.readouterr().err
