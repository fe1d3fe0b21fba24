from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ctx_jax.data import building, fingerprint, preparation
from ctx_jax.data.corpora import Passage, TextFiles
from ctx_jax.data.preparation import Worker, batches, encoded, prepare
from ctx_jax.data.store import encode_passages, in_context

FILES = ("tokens.bin", "flags.bin", "offsets.bin", "document_bytes.bin", "store.json")


@dataclass(frozen=True)
class Texts:
    """A corpus of given texts."""

    texts: tuple[str, ...] = ("The Union is strong. Did he? Yes!", "One line\nbroken in two.", "  an 😀 [MASK]. So.")
    language: str = "en"

    @property
    def languages(self):
        return (self.language,)

    def passages(self, split):
        return (Passage(text, True, True, self.language) for text in (self.texts if split == "train" else ()))

    def size(self, split):
        return None

    def fingerprint(self, split):
        return fingerprint(self)


@dataclass(frozen=True)
class Many(Texts):
    """Documents of one to three passages."""

    documents: int = 40

    def passages(self, split):
        for number in range(self.documents):
            for part in range(last := number % 3 + 1):
                yield Passage(f"Part {part} of {number}. It is ü. " * 9, part == 0, part == last - 1, "en")


@pytest.fixture
def small_batches(monkeypatch):
    """So that little text is enough for workers."""
    monkeypatch.setattr(preparation, "BATCH", 1000)
    monkeypatch.setattr(preparation, "SMALL", 2)


def content(store):
    return {name: (store.folder / name).read_bytes() for name in FILES}


def left_behind(folder):
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def test_prepared_store_holds_the_text(tmp_path, tokenizer):
    told = []
    store = prepare(Texts(), tokenizer, "train", tmp_path, lambda *done: told.append(done))
    sizes = [len(text.encode()) for text in Texts().texts]
    assert told == [(3, sum(sizes))]
    assert store.document_bytes.tolist() == sizes
    assert store.tokens.dtype == np.uint16
    assert store.vocabulary == tokenizer.vocabulary
    assert store.offsets[-1] == len(store.tokens) == len(store.flags)
    for text, (start, end) in zip(Texts().texts, itertools.pairwise(store.offsets), strict=True):
        assert store.tokens[start] == tokenizer.vocabulary.begin
        assert store.tokens[end - 1] == tokenizer.vocabulary.end
        assert tokenizer.decode(store.tokens[start:end]) == text
    assert {path.name for path in store.folder.iterdir()} == set(FILES)


def test_kept_by_what_decides_the_content(tmp_path, tokenizer):
    store = prepare(Texts(), tokenizer, "train", tmp_path)
    written = store.folder.stat().st_mtime_ns
    assert prepare(Texts(), tokenizer, "train", tmp_path, workers=3).folder == store.folder
    assert store.folder.stat().st_mtime_ns == written
    others = {
        prepare(Texts(Texts().texts[:1]), tokenizer, "train", tmp_path).folder,
        prepare(Texts(), tokenizer, "validation", tmp_path).folder,
        prepare(Texts(language="de"), tokenizer, "train", tmp_path).folder,
    }
    assert len(others | {store.folder}) == 4


def test_empty_split(tmp_path, tokenizer):
    store = prepare(Texts(), tokenizer, "validation", tmp_path)
    assert len(store.tokens) == 0
    assert store.offsets.tolist() == [0]


def test_the_same_store_with_any_number_of_workers(tmp_path, tokenizer, small_batches):
    whole = encode_passages([*in_context(Many().passages("train"))], tokenizer)
    stores = [prepare(Many(), tokenizer, "train", tmp_path / str(n), workers=n) for n in (1, 2, 3)]
    assert len({tuple(content(store).items()) for store in stores}) == 1
    assert np.array_equal(stores[0].tokens, whole.tokens)
    assert np.array_equal(stores[0].flags, whole.flags)
    assert np.array_equal(np.diff(stores[0].offsets).cumsum(), whole.lengths.cumsum()[whole.last])
    assert stores[0].document_bytes.sum() == whole.sizes.sum()
    with pytest.raises(ValueError, match="workers 0 tokenize nothing: choose 1 or more"):
        prepare(Many(), tokenizer, "train", tmp_path, workers=0)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "byte_bpe", "bytes", "characters", "words"])
def test_workers_load_every_tokenizer(tmp_path, trained, kind, small_batches):
    stores = [prepare(Many(), trained(kind), "train", tmp_path / str(n), workers=n) for n in (1, 2)]
    assert content(stores[0]) == content(stores[1])
    assert (tmp_path / "1" / stores[0].tokenizer_folder).resolve() == trained(kind).folder


def test_batches_hold_all_passages_in_order():
    passages = [*in_context(Many().passages("train"))]
    assert [*itertools.chain(*batches(passages))] == passages
    assert len([*batches(("a", True, True, "en", "", "") for _ in range(30_000))]) == 12


def test_a_small_text_needs_no_worker(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(preparation, "Worker", None)
    assert len(prepare(Many(), tokenizer, "train", tmp_path, workers=2).document_bytes) == 40


def test_progress_is_told_now_and_then_and_at_the_end(tmp_path, tokenizer, small_batches, monkeypatch):
    monkeypatch.setattr(preparation, "TELL_SECONDS", 0.0)
    told = []
    store = prepare(Many(), tokenizer, "train", tmp_path, lambda *done: told.append(done), workers=1)
    assert told == sorted(told)
    assert len(told) > 5
    assert told[-1] == (40, store.document_bytes.sum())


def test_a_worker_starts_without_jax():
    code = "import sys, ctx_jax.data.worker, ctx_jax.data.preparation; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FAILING = """
import os, signal, sys

class Failing:
    vocabulary = None

    def __init__(self, how):
        self.how = how

    def encode(self, text, continued=False):
        if self.how == "value":
            raise ValueError("this text is not for me: give another")
        if self.how == "die":
            sys.stderr.write("first\\nwhat it died of\\n\\n")
            sys.stderr.flush()
            os._exit(7)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a fault")
"""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A tokenizer that fails, in a module that workers find."""
    (tmp_path / "failing_tokenizer.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("failing_tokenizer").Failing
    del sys.modules["failing_tokenizer"]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("value", ValueError, "^this text is not for me: give another$"),
        (
            "die",
            ChildProcessError,
            "^a process that tokenizes ended with code 7: what it died of .what is written is kept, .* from it.$",
        ),
        (
            "kill",
            ChildProcessError,
            "code -9: it said nothing .what .* goes on from it; where memory is short, choose fewer workers.$",
        ),
        ("fault", ChildProcessError, "ended with code 1: RuntimeError: a fault .what"),
    ],
)
def test_errors_of_a_worker(failing, how, error, message, small_batches):
    with pytest.raises(error, match=message):
        list(encoded(batches(in_context(Many().passages("train"))), failing(how), 2))
    assert children() == []


def test_a_tokenizer_that_workers_do_not_find(tmp_path):
    local = type("Local", (), {"__module__": "__main__"})()
    with pytest.raises(ValueError, match="Local is defined in the script that runs"):
        Worker(local)  # pyright: ignore[reportArgumentType]


def children(pid: int | None = None) -> list[int]:
    """Processes that tokenize for `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"ctx_jax.data.worker" in command and parent == (pid or os.getpid()):
            found.append(int(path.name))
    return found


def test_failed_preparation_leaves_nothing(tmp_path, tokenizer, small_batches):
    def fail(documents: int, size: int) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        prepare(Many(), tokenizer, "train", tmp_path, fail, 2)
    assert left_behind(tmp_path) == []
    assert children() == []


def test_interrupted_preparation_goes_on(tmp_path, tokenizer, small_batches, monkeypatch):
    """Text before the last mark is not encoded again."""
    monkeypatch.setattr(preparation, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(preparation, "MARK_BYTES", 3000)
    told = []

    def interrupt(documents: int, size: int) -> None:
        told.append(size)
        if len(told) == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(Many(), tokenizer, "train", tmp_path / "a", interrupt, 2)
    (partial,) = left_behind(tmp_path / "a")
    marked = json.loads((tmp_path / "a" / partial / "progress.json").read_text())["text"]
    assert 3000 < marked <= told[-1]
    assert children() == []
    told.clear()
    again = prepare(Many(), tokenizer, "train", tmp_path / "a", lambda documents, size: told.append(size), 2)
    assert told[0] == marked
    assert told[1] > 4000
    assert content(again) == content(prepare(Many(), tokenizer, "train", tmp_path / "b", workers=1))
    assert left_behind(tmp_path / "a") == [again.folder.name]


@pytest.mark.parametrize("what", ["tokens", "flags", "offsets", "document_bytes"])
def test_what_was_marked_and_is_lost_is_written_anew(tmp_path, tokenizer, small_batches, monkeypatch, what):
    monkeypatch.setattr(preparation, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(preparation, "MARK_BYTES", 3000)

    def interrupt(documents: int, size: int) -> None:
        if size > 9000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(Many(), tokenizer, "train", tmp_path / "a", interrupt, 1)
    (partial,) = left_behind(tmp_path / "a")
    file = tmp_path / "a" / partial / f"{what}.bin"
    os.truncate(file, 100)
    again = prepare(Many(), tokenizer, "train", tmp_path / "a", workers=1)
    assert content(again) == content(prepare(Many(), tokenizer, "train", tmp_path / "b", workers=1))


@dataclass(frozen=True)
class Short(Many):
    """Memory is short when it is read for the first time."""

    def passages(self, split):
        for number, passage in enumerate(super().passages(split)):
            if number == 60 and not READ:
                READ.append(number)
                raise MemoryError
            yield passage


READ: list[int] = []


def test_short_of_memory_it_goes_on(tmp_path, tokenizer, small_batches, monkeypatch):
    monkeypatch.setattr(preparation, "MARK_BYTES", 3000)
    READ.clear()
    with pytest.raises(OSError, match=r"memory is full \(what is written is kept, .* goes on from it\)") as error:
        prepare(Short(), tokenizer, "train", tmp_path, workers=1)
    assert error.value.filename.startswith(str(tmp_path / "train-"))
    assert len(left_behind(tmp_path)) == 1
    told = []
    store = prepare(Short(), tokenizer, "train", tmp_path, lambda *done: told.append(done), workers=1)
    assert told[0][1] > 3000
    assert content(store)["tokens.bin"] == content(prepare(Many(), tokenizer, "train", tmp_path))["tokens.bin"]


def test_after_a_worker_was_killed_it_goes_on(tmp_path, failing, tokenizer, small_batches):
    killed = failing("kill")
    killed.fingerprint, killed.folder, killed.vocabulary = tokenizer.fingerprint, tokenizer.folder, tokenizer.vocabulary
    with pytest.raises(ChildProcessError, match=r"code -9: .*the same command goes on from it; where memory is short"):
        prepare(Many(), killed, "train", tmp_path / "stores", workers=2)
    (partial,) = left_behind(tmp_path / "stores")
    store = prepare(Many(), tokenizer, "train", tmp_path / "stores", workers=2)
    assert partial == f".{store.folder.name}.partial"
    assert left_behind(tmp_path / "stores") == [store.folder.name]


def test_a_text_that_changes_while_it_is_read(tmp_path, tokenizer):
    file = tmp_path / "text.txt"
    file.write_text("One text.")
    corpus = TextFiles(file, whole=True)

    def change(documents: int, size: int) -> None:
        file.write_text("Another text.")

    with pytest.raises(ValueError, match=r"^the text changed while it was read: TextFiles.*text\.txt.*; give the same"):
        prepare(corpus, tokenizer, "train", tmp_path / "stores", change)
    assert left_behind(tmp_path / "stores") == []
    store = prepare(corpus, tokenizer, "train", tmp_path / "stores")
    assert tokenizer.decode(store.tokens) == "Another text."


SCRIPT = """
import resource, sys
from pathlib import Path
from ctx_jax.data import fingerprint, preparation
from ctx_jax.data.corpora import Passage
from ctx_jax.data.tokenizers import load_tokenizer

preparation.BATCH, preparation.SMALL, preparation.TELL_SECONDS, preparation.MARK_BYTES = 20_000, 2, 0.0, 100_000

class Long:
    languages = ("en",)
    def passages(self, split):
        for number in range(600):
            yield Passage(f"Part of {number // 4}. It is ü. " * 60, number % 4 == 0, number % 4 == 3, "en")
    def size(self, split):
        return None
    def fingerprint(self, split):
        return fingerprint("long")

def tell(documents, size):
    print(documents, size, flush=True)

if limit := int(sys.argv[4]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
# Unguarded, as in a notebook: workers must not run it again.
preparation.prepare(Long(), load_tokenizer(Path(sys.argv[1])), "train", Path(sys.argv[2]), tell, int(sys.argv[3]))
"""


def start(tokenizer, folder, workers, limit=0):
    """`limit`: bytes that a file may have."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    arguments = [sys.executable, "-c", SCRIPT, str(tokenizer.folder), str(folder), str(workers), str(limit)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_preparation_goes_on(tmp_path, tokenizer):
    """Killed again and again, at any moment, it gives the same bytes as at once, and leaves no process behind."""
    whole = start(tokenizer, tmp_path / "whole", 2)
    lines = whole.communicate(timeout=60)[0].splitlines()
    assert whole.returncode == 0
    assert len(lines) > 30
    (tmp_path / "killed").mkdir()
    name = next((tmp_path / "whole").glob("train-*")).name
    used = []
    for told in (0, 1, 9, 12, 7):
        process = start(tokenizer, tmp_path / "killed", 2)
        assert process.stdout is not None
        for _ in range(told):
            assert process.stdout.readline()
        used += children(process.pid)
        process.kill()
        process.communicate()
        assert left_behind(tmp_path / "killed") in ([], [f".{name}.partial"])
    again = start(tokenizer, tmp_path / "killed", 2)
    rest = again.communicate(timeout=60)[0].splitlines()
    assert again.returncode == 0
    assert len(used) > 4
    assert int(rest[0].split()[1]) > 200_000  # it did not begin anew
    assert rest[-1] == lines[-1]
    stores = [next(folder.glob("train-*")) for folder in (tmp_path / "whole", tmp_path / "killed")]
    for name in FILES:
        assert (stores[0] / name).read_bytes() == (stores[1] / name).read_bytes(), name
    deadline = time.monotonic() + 10
    while (left := [pid for pid in used if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


@pytest.mark.parametrize("workers", [1, 2])
def test_full_disk(tmp_path, tokenizer, workers):
    """One line that names the folder, and nothing half-written. The limit is on the size of a file."""
    process = start(tokenizer, tmp_path / "full", workers, limit=150_000)
    stderr = process.communicate(timeout=60)[1]
    said = r"OSError: \[Errno 27\] File too large \(what was written is removed\): '(.*)/train-[0-9a-f]+'"
    match = re.fullmatch(said, stderr.splitlines()[-1])
    assert match is not None and match[1] == str(tmp_path / "full")
    assert left_behind(tmp_path / "full") == []


TWO = """
import fcntl, sys, time
from pathlib import Path
from ctx_jax.data import fingerprint
from ctx_jax.data.corpora import Passage
from ctx_jax.data.preparation import prepare
from ctx_jax.data.tokenizers import load_tokenizer

class Waiting:
    languages = ("en",)
    def passages(self, split):
        print("reads", flush=True)
        sys.stdin.readline()
        yield Passage("A text.", True, True, "en")
    def size(self, split):
        return None
    def fingerprint(self, split):
        return fingerprint("waiting")

def lock(*arguments, flock=fcntl.flock):
    print("locks", flush=True)
    flock(*arguments)

fcntl.flock = lock
store = prepare(Waiting(), load_tokenizer(Path(sys.argv[1])), "train", Path(sys.argv[2]))
print(store.folder.name, len(store.tokens), flush=True)
"""


def test_two_processes_write_one_store(tmp_path, tokenizer):
    """The second comes to the lock while the first reads, and finds the store when it gets it."""

    def started() -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        arguments = [sys.executable, "-c", TWO, str(tokenizer.folder), str(tmp_path)]
        return subprocess.Popen(arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with started() as first:
        assert first.stdout is not None
        assert [first.stdout.readline() for _ in range(2)] == ["locks\n", "reads\n"]
        with started() as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "locks\n"
            ends = [process.communicate("\n", timeout=30)[0] for process in (first, second)]
    assert ends[1] == f"locks\n{ends[0]}"  # the lock that it has waited for is gone, with its file
    assert left_behind(tmp_path) == ends[0].split()[:1]


def test_what_is_there_already_is_not_written_to(tmp_path):
    """Its disk may be read-only: there is not even a lock."""
    (tmp_path / "store").mkdir()
    with building(tmp_path / "store") as folder:
        assert folder is None
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_was_being_built(tmp_path, resume):
    """A process is killed in the middle of filling a folder; the next one starts clean, or goes on."""
    code = (
        "import os, signal, sys; from pathlib import Path; from ctx_jax.data import building\n"
        "with building(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('written')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = tmp_path / "store"
    assert subprocess.run([sys.executable, "-c", code, str(target)], check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    with building(target, resume) as folder:
        assert folder is not None
        assert [path.name for path in folder.iterdir()] == ["half"] * resume
        (folder / "whole").write_text("written")
    assert {path.name for path in target.iterdir()} == {"whole", *["half"] * resume}
