"""What a user types, and what comes back: one JSON line, or one line that says what is wrong and how to mend it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from jax.errors import JaxRuntimeError

from ctx_jax.cli import COMMANDS, main
from ctx_jax.runs import alone
from ctx_jax.signals import Interrupted, Preempted

SMALL = (
    "--model.layers 1 --model.width 16 --model.heads 2 --model.feed-forward 32 --data.reader.length 32 "
    "--data.batch-size 4 --data.tokenizer.vocabulary-size 340 --training.steps 2"
).split()


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command."""
    code = 0
    try:
        main(arguments)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train gpt:tiny --training.step 3", "unknown option --training.step; did you mean '--training.steps'?"),
        ("train gpt:tiny --trainig.seed=3", "unknown option --trainig.seed=3; did you mean '--training.seed'?"),
        ("train gpt:tiny --training.steps many", "--training.steps: invalid literal for int"),
        ("train gpt:tinny", "unknown experiment 'gpt:tinny'; did you mean 'tiny'?; there are: gpt:tiny, gpt:gpt"),
        ("train gtp:tiny", "unknown experiment 'gtp:tiny'; did you mean 'gpt'?; there are: bert, finetune, glue, gpt"),
        ("train gpt", "experiment 'gpt' names no function; there are: gpt:tiny"),
        ("train no/such.py:tiny", "unknown experiment 'no/such.py:tiny': there is no file no/such.py"),
        ("train missing.json", "missing.json: not a readable experiment file"),
        ("train", "train needs EXPERIMENT"),
        ("trian gpt:tiny", "unknown command 'trian'; did you mean 'train'?"),
        (
            "train gpt:tiny --data.tokenizer.vocabulary-size 4096",
            "data.tokenizer.vocabulary_size 4096 is larger than model.vocabulary_size 2048",
        ),
        ("train gpt:tiny --data.reader.length 512", "data.reader.length 512 is longer than the model's 256 positions"),
        ("train gpt:tiny --model.heads 3", "model: heads 3 does not divide width 128"),
        ("train gpt:tiny --mesh.data 3", "mesh data=3 fsdp=1 tensor=1 does not fit 1 devices"),
        (
            "train gpt:tiny --data.batch-size 16 --training.accumulation 5",
            "data.batch_size 16 does not divide into training.accumulation 5",
        ),
        ("train gpt:tiny --training.steps 0", "steps 0: choose 1 or more"),
        ("train gpt:tiny --text no-such-folder", "no text in no-such-folder"),
        ("train gpt:tiny --continue no-such-run --text {speeches}", "no-such-run"),
        ("evaluate no-such-run", "no-such-run has no checkpoint"),
        ("generate no-such-run --prompt a", "no-such-run has no checkpoint"),
        ("generate no-such-run", "--prompt"),
        ("report no-such-run", "no-such-run has no metrics.jsonl"),
        ("xlnet:tiny", "unknown command"),
        ("train xlnet:tiny --model.reuse-length 32", "the reader's stride 64 is not the model's reuse_length 32"),
        ("train xlnet:tiny --objective.perm-size 48", "perm_size 48 does not divide the reader's length 128"),
        ("train bert:tiny --model.classes 3", "needs model.classes 2, not 3"),
        ("train transformer_xl:tiny --model.memory-length 0", "needs a model with memory"),
        ("train gpt:tiny --text", "--text is given nothing"),
        ("train gpt:tiny --text=", "--text is given nothing"),
        ("train gpt:tiny --tokenizer word_piece", "tokenizer 'word_piece' is neither a kind nor a tokenizer's folder"),
        ("train gpt:tiny --tokenizr bytes", "unknown option --tokenizr; did you mean '--tokenizer'?"),
        ("train gpt:tiny --text tfds:no_such_set", "no_such_set"),
        ("data", "data needs to be told what to do: data prepare or data inspect or data tfds"),
        ("tokenizer", "tokenizer needs to be told what to do: tokenizer train"),
        ("tokenizer train", "tokenizer train needs KIND"),
        ("tokenizer train wordpeice", "did you mean 'wordpiece'?"),
        ("tokenizer train bytes --vocabulary-size 9", "unknown option --vocabulary-size"),
        ("tokenizer train words --vocabulary-siz 900", "did you mean '--vocabulary-size'?"),
        ("tokenizer train words --text no-such-folder", "no text in no-such-folder"),
        ("data prepare gpt:tinny", "unknown experiment 'gpt:tinny'"),
        ("data prepare --text no-such-folder", "no text in no-such-folder"),
        ("data prepare --data.worker 2", "unknown option --data.worker; did you mean '--data.workers'?"),
        ("data inspect no-such-store", "unknown experiment 'no-such-store'"),
        ("data inspect gpt:tiny --split tests", "unknown split 'tests'; did you mean 'test'?"),
        ("data tfds notes", "data tfds needs --text PATH"),
        ("data tfds notes --text no-such-folder", "no text in no-such-folder"),
        ("train gpt:tiny --text {speeches} --text=no-such-folder", "no text in no-such-folder"),
        ("train gpt:tiny stray", "train takes one EXPERIMENT, not also 'stray'"),
        ("train gpt:tiny --training.steps 3 stray", "'stray' belongs to no option"),
        ("train bert:tiny --model.nopooler", "did you mean '--model.no-pooler'?"),
        ("train bert:tiny --model.segments 1", "model.segments 1 is too few for the pairs of data.reader"),
        ("train gpt:tiny --optimizer.clip inf", "optimizer.clip inf is not a number that can be computed with"),
        ("train gpt:tiny --continue a --from b", "--continue a and --from b: choose one of them"),
        ("train gpt:tiny --data.folder /dev/null", "/dev/null: File exists: choose another path"),
        ("evaluate no-such-run --lenght 3", "unknown option --lenght; did you mean '--length'?"),
        ("generate no-such-run --prompt", "--prompt is given no text"),
        ("generate no-such-run --prompt a --beams 2 --stream", "leave out --stream and --window"),
        ("generate no-such-run --prompt a --beams 2 --window 8", "reads none of it anew: leave out --stream and"),
        ("generate no-such-run --prompt a --beams 2 --stop b", "no-such-run"),
        ("generate no-such-run --prompt a --temperature 1e-45", "choose 0 (greedy) or a number from 1e-06 upward"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(
    arguments: str, message: str, speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [word.format(speeches=speeches) for word in arguments.split()]
    if "{speeches}" in arguments:
        words += SMALL
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


def test_too_little_text_says_how_much_is_needed(
    speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("little.txt").write_text("The people of the States. " * 20)
    words = [
        *SMALL,
        "--data.tokenizer.vocabulary-size",
        "300",
        "--data.reader.length",
        "256",
        "--data.batch-size",
        "64",
    ]
    code, out, err = run(["train", "gpt:tiny", "--text", "little.txt", *words], capsys)
    assert (code, out) == (2, "")
    assert "vocabulary_size 300 does not fit a training text of 468 bytes: give more text" in err.splitlines()[-1]

    text = (speeches / "00.txt").read_text()
    Path("little.txt").write_text(text)
    code, out, err = run(["train", "gpt:tiny", "--text", "little.txt", *words], capsys)
    assert (code, out) == (2, "")
    assert re.search(
        r"the text has \d+ tokens, too few for 64 rows of length 256, which need 16385: give more text",
        err.splitlines()[-1],
    )


def test_from_experiment_to_text(speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """train, again, from its own file, evaluate, generate, report: the last line of each is one JSON object."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(["train", "gpt:tiny", "--text", str(speeches), *SMALL, "--run", "runs/a"], capsys)
    assert code == 0, err
    trained = json.loads(out)
    assert set(trained) == {"run", "step", "loss", "evaluation", "tokens_per_second"}
    assert (trained["run"], trained["step"]) == ("runs/a", 2)

    code, out, _ = run(["train", "runs/a/experiment.json", "--run", "runs/b"], capsys)
    again = json.loads(out)
    assert (again["loss"], again["evaluation"]) == (trained["loss"], trained["evaluation"])

    code, out, err = run(["train", "runs/a/experiment.json", "--training.seed", "1", "--run", "runs/a"], capsys)
    assert code == 2
    assert "training.seed: 0 -> 1" in err

    code, out, err = run(["evaluate", "runs/a", "--batch-size", "0"], capsys)
    assert (code, out) == (2, "")
    assert "--batch-size 0 is not a number of rows" in err

    code, out, _ = run(["evaluate", "runs/a", "--stride", "8"], capsys)
    assert json.loads(out)["stride"] == 8

    code, out, _ = run(["evaluate", "runs/a", "--checkpoint", "best"], capsys)
    assert json.loads(out)["step"] == 2
    code, out, err = run(["generate", "runs/a", "--prompt", "The people", "--checkpoint", "1"], capsys)
    assert (code, out) == (2, "")
    assert "--checkpoint 1: runs/a has no such checkpoint: choose best, last or one of 2" in err

    code, out, err = run(["generate", "runs/a", "--prompt", "The people", "--length", "4", "--top-k", "5"], capsys)
    assert json.loads(out)["texts"][0].startswith("The people")

    words = ["generate", "runs/a", "--prompt", "The péople", "of", "--length", "12", "--seed", "3"]
    code, out, err = run(words, capsys)
    texts = json.loads(out)["texts"]
    assert code == 0 and "péople" in out and texts[0].startswith("The péople")
    code, streamed, err = run([*words, "--stream"], capsys)
    steering = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what steers a terminal is not shown
    assert (streamed, err) == (out, "".join(steering.sub("\ufffd", f"{text}\n") for text in texts))
    code, out, err = run([*words, "--stream", "--stop", texts[0][14:17]], capsys)
    cut = json.loads(out)["texts"]
    assert cut[0] == texts[0][: texts[0].index(texts[0][14:17], len("The péople"))]
    assert err == "".join(steering.sub("\ufffd", f"{text}\n") for text in cut)
    code, out, err = run([*words[:5], "--length", "3000"], capsys)
    assert (code, out) == (2, "")
    assert "pass the model's 256 positions: generate at most" in err.splitlines()[-1]

    code, out, _ = run(["report", "runs/a", "runs/b", "--output", "page.html"], capsys)
    assert json.loads(out)["report"] == "page.html"
    assert Path("page.html").stat().st_size > 1000

    code, out, err = run(["report", "runs/a", "--output", "runs"], capsys)
    assert (code, out) == (2, "")
    assert "runs: Is a directory: choose another path" in err

    with alone(Path("runs/a")):
        code, out, err = run(["train", "runs/a/experiment.json", "--run", "runs/a"], capsys)
    assert (code, out) == (2, "")
    assert "runs/a is being trained by another process" in err

    Path("runs/a/metrics.jsonl").write_text("{}\n")
    code, out, _ = run(["train", "runs/a/experiment.json", "--run", "runs/a"], capsys)
    assert json.loads(out) == trained
    code, out, err = run(["report", "runs/a"], capsys)
    assert (code, err) == (0, "note: runs/a/metrics.jsonl is damaged at line 1, which is left out\n")

    shutil.copytree("runs/b/checkpoints/2", "runs/b/checkpoints/3")
    code, out, err = run(["evaluate", "runs/b", "--checkpoint", "3"], capsys)
    assert (code, out) == (2, "")
    assert "checkpoint runs/b/checkpoints/3 holds step 2: choose another step of 2, 3" in err.splitlines()[-1]
    shutil.rmtree("runs/b/checkpoints/3")

    shutil.rmtree("runs/b/checkpoints/2/params")
    code, out, err = run(["evaluate", "runs/b"], capsys)
    assert (code, out) == (2, "")
    assert "checkpoints/2 is damaged" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted: the same command goes on"),
        (OSError(28, "No space left on device", "runs/a"), 1, "runs/a: No space left on device"),
        (PermissionError(13, "Permission denied", "runs/a"), 2, "runs/a: Permission denied: choose another path"),
        (KeyError("x"), 1, "unexpected KeyError: 'x'; --debug shows where"),
        (MemoryError(), 1, "memory is short: ; choose a smaller batch"),
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nmore"),
            1,
            "error: memory is short: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes; choose a smaller batch",
        ),
        (
            JaxRuntimeError("UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED"),
            1,
            "error: the devices gave up: UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED; the same",
        ),
        (Preempted("stopped after step 3"), 75, "stopped after step 3"),
        (Interrupted("stopped after step 3"), 130, "stopped after step 3"),
    ],
)
def test_every_failure_is_one_line(error: BaseException, code: int, message: str, monkeypatch, capsys):
    def fails(arguments: list[str]) -> None:
        print("noise of a library")
        raise error

    monkeypatch.setitem(COMMANDS, "report", fails)
    found, out, err = run(["report"], capsys)
    assert (found, out) == (code, "")
    assert err.splitlines()[0] == "noise of a library"
    assert message in err.splitlines()[1]
    stopped = isinstance(error, Preempted | Interrupted)  # nothing failed
    with pytest.raises(SystemExit if stopped else type(error)):
        main(["report", "--debug"])


def test_doctor_needs_no_memory(capsys):
    """BERT base: the parameters of the paper, not allocated."""
    code, out, _ = run(["doctor", "bert:base", "--mesh.data", "1"], capsys)
    assert code == 0
    assert json.loads(out)["experiment"]["parameters"] > 100_000_000


def test_text_is_prepared_looked_at_and_trained_on(
    speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """A tokenizer, a store, a data set and a run of a user's own text, one command after the other."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(speeches, "speeches")

    def result(line: str) -> dict[str, Any]:
        code, out, err = run(line.split(), capsys)
        assert code == 0, err
        return json.loads(out)

    learned = result("tokenizer train words --text speeches --output my_words --vocabulary-size 60")
    assert learned["vocabulary"] == 60
    prepared = result("data prepare --text speeches --tokenizer my_words")
    assert [prepared[split]["documents"] for split in ("train", "validation", "test")] == [36, 2, 2]
    seen = result(f"data inspect {prepared['test']['store']} --samples 2 --length 5")
    assert seen["documents"] == sum(row["documents"] for row in seen["lengths"]) == 2
    assert seen["tokens"] == prepared["test"]["tokens"]
    assert seen["words"] == sum(len(Path(f"speeches/{n}.txt").read_text().split()) for n in (19, 39))
    assert [len(sample["pieces"]) for sample in seen["samples"]] == [5, 5]

    made = result("data tfds speeches --text speeches --data-dir sets")
    assert made["name"] == "tfds:speeches"
    again = result("data prepare --text tfds:speeches --data.corpus.data-dir sets --tokenizer my_words")
    assert again["train"]["tokens"] == prepared["train"]["tokens"]

    small = " ".join(SMALL[: SMALL.index("--data.tokenizer.vocabulary-size")])
    trained = result(f"train gpt:tiny --text speeches --tokenizer my_words {small} --training.steps 2 --run run")
    assert trained["step"] == 2
    assert json.loads(Path("run/experiment.json").read_text())["model"]["vocabulary_size"] == 60


def test_a_run_is_not_resumed_on_other_text(speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Nor scored with another tokenizer: it has its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(speeches, "speeches")
    words = ["train", "gpt:tiny", "--text", "speeches", *SMALL, "--run", "run"]
    assert run(words, capsys)[0] == 0
    before = json.loads(run("evaluate run --text speeches/19.txt".split(), capsys)[1])

    with Path("speeches/00.txt").open("a") as text:
        text.write("More of the same. " * 50)
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert "run was begun with another text (train" in err.splitlines()[-1]
    code, out, err = run("evaluate run".split(), capsys)
    assert (code, out) == (2, "")
    assert "the text of run has changed since it was begun (test" in err.splitlines()[-1]
    after = json.loads(run("evaluate run --text speeches/19.txt".split(), capsys)[1])
    assert after == before
    generated = json.loads(run("generate run --prompt the --temperature 0".split(), capsys)[1])
    shutil.rmtree("speeches")
    shutil.rmtree("data")
    assert json.loads(run("generate run --prompt the --temperature 0".split(), capsys)[1]) == generated


def test_a_run_that_never_began_is_no_hindrance(
    speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """A mistake that shows after the run folder was made, mended in the next command."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n".join(file.read_text().strip() for file in sorted(speeches.iterdir())))
    words = ["train", "bert:tiny", *SMALL, "--model.layers", "1", "--text", "text.txt", "--run", "run"]
    code, _, err = run(words, capsys)
    assert code == 2
    assert "a false second segment comes from another document" in err.splitlines()[-1]
    code, out, err = run([*words, "--data.corpus.document", "line"], capsys)
    assert code == 0, err
    assert json.loads(out)["step"] == 2


def test_a_run_of_little_text_is_scored_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Less of it than the rows of a training batch need."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The people of the States. " * 60)
    small = SMALL[: SMALL.index("--data.tokenizer.vocabulary-size")]
    words = ["train", "gpt:tiny", "--text", "text.txt", "--tokenizer", "bytes", *small, "--data.reader.length", "64"]
    code, _, err = run([*words, "--training.steps", "2", "--run", "run"], capsys)
    assert code == 0, err
    for command in ("evaluate run", "evaluate run --split validation", "generate run --prompt The --length 4"):
        code, _, err = run(command.split(), capsys)
        assert code == 0, err


def test_a_run_goes_on_where_its_text_is_now(speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(speeches, "speeches")
    words = ["train", "gpt:tiny", *SMALL, "--run", "run", "--text"]
    assert run([*words, "speeches"], capsys)[0] == 0
    (tmp_path / "there").mkdir()
    shutil.move("speeches", "there/speeches")
    code, out, err = run([*words, str(tmp_path / "there" / "speeches")], capsys)
    assert code == 0, err
    assert json.loads(out)["step"] == 2


@pytest.mark.parametrize("option", ["--from", "--continue"])
def test_a_run_that_goes_on_from_another_has_its_tokenizer(
    option: str, speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(speeches, "other")
    for file in Path("other").iterdir():
        file.write_text(file.read_text().upper())
    words = ["train", "gpt:tiny", *SMALL]
    assert run([*words, "--text", str(speeches), "--run", "old"], capsys)[0] == 0
    more = ["--training.steps", "3", option, "old"]
    code, _, err = run([*words, "--text", "other", "--run", "new", *more], capsys)
    assert code == 0, err
    fingerprints = {json.loads(Path(f"{name}/text.json").read_text())["tokenizer"] for name in ("old", "new")}
    assert len(fingerprints) == 1

    code, out, err = run([*words, "--text", "other", "--tokenizer", "characters", "--run", "newer", *more], capsys)
    assert (code, out) == (2, "")
    assert "old has another tokenizer" in err.splitlines()[-1]


def test_a_run_does_not_need_the_folder_that_its_tokenizer_came_from(
    speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run(f"tokenizer train characters --text {speeches} --output mine".split(), capsys)[0] == 0
    small = SMALL[: SMALL.index("--data.tokenizer.vocabulary-size")]
    words = ["train", "gpt:tiny", "--text", str(speeches), "--tokenizer", "mine", *small, "--training.steps", "2"]
    code, _, err = run([*words, "--run", "run"], capsys)
    assert code == 0, err
    Path("mine").rename("elsewhere")
    code, out, err = run("generate run --prompt the --length 4".split(), capsys)
    assert code == 0, err
    assert json.loads(out)["texts"][0].startswith("the")
    code, out, err = run("tokenizer train elsewhere --output new".split(), capsys)
    assert (code, out) == (2, "")
    assert "elsewhere is trained already" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("generate run --prompt a --temperatur 0", "temperature"),
        ("features run --poolin mean --input a --output b.npz", "pooling"),
    ],
)
def test_options_of_parts_are_known_where_nothing_has_a_default(command: str, meant: str, capsys):
    assert run(command.split(), capsys)[2].endswith(f"did you mean '--{meant}'?\n")
