"""The nine tasks of GLUE (Wang et al. 2018, arXiv 1804.07461) and IMDb (Maas et al. 2011), by one declaration each,
which reads them from the files as they are published or from TFDS, and says how the leaderboard wants its predictions.

    glue/CoLA         the folder of a task as GLUE's download has it: train.tsv, dev.tsv, test.tsv (also .gz, .zst)
    tfds:glue/cola    the same, prepared by TFDS in the array_record format
    aclImdb           IMDb as it is published: train/pos/*.txt and so on

GLUE's tables have no quotation marks: a " is a character like any other. The labels of its test sets are not published.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from ctx_jax.data import fingerprint
from ctx_jax.data.corpora import Split
from ctx_jax.data.files import content, location
from ctx_jax.data.jsonl import unified
from ctx_jax.data.lines import escaped, lines, whole
from ctx_jax.data.tfds import Tfds
from ctx_jax.evaluation.tasks import Example, Kind, Task
from ctx_jax.progress import tell
from ctx_jax.serialization import nearest

TFDS = "tfds:"
TEST = {"train": "train", "validation": "dev", "test": "test"}
MATCHED = {"train": "train", "validation": "dev_matched", "test": "test_matched"}
MISMATCHED = {"train": "train", "validation": "dev_mismatched", "test": "test_mismatched"}
ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Published:
    """What is known of a task: everything that its files do not say."""

    data_set: str
    """Its name in TFDS."""
    texts: tuple[str, ...]
    """The columns of its texts in the tables."""
    labels: tuple[str, ...] = ("0", "1")
    """The classes as the tables and the leaderboard write them, in TFDS's order; none = numbers."""
    names: tuple[str, ...] = ()
    """The classes as TFDS writes them; none = as the tables."""
    features: tuple[str, ...] = ()
    """The texts in TFDS; none = as the columns."""
    label: str = "label"
    """The column of the label; in TFDS it is "label" always."""
    columns: tuple[str, ...] = ()
    """Columns of train and dev where these have no header (the test has one)."""
    index: str = "index"
    """The column of the test's numbers."""
    metric: str = "accuracy"
    """The paper's metric, where there are two the one that BERT's paper reports."""
    files: dict[str, str] = field(default_factory=lambda: TEST)
    """The table of each split."""
    submission: str | None = None
    """The name of its predictions, without .tsv."""
    ragged: bool = False
    """Whether lines that lack columns or text are left out, as everybody does."""
    folders: bool = False
    """Whether it is published as folders of texts, one for each class."""

    @property
    def kind(self) -> Kind:
        return "classification" if self.labels else "regression"


def mnli(files: dict[str, str], submission: str) -> Published:
    return Published(
        "glue/mnli",
        ("sentence1", "sentence2"),
        ("entailment", "neutral", "contradiction"),
        features=("premise", "hypothesis"),
        label="gold_label",
        files=files,
        submission=submission,
    )


PAIR = ("sentence1", "sentence2")
TASKS = {
    "cola": Published(
        "glue/cola",
        ("sentence",),
        names=("unacceptable", "acceptable"),
        columns=("source", "label", "mark", "sentence"),
        metric="matthews",
        submission="CoLA",
    ),
    "sst2": Published("glue/sst2", ("sentence",), names=("negative", "positive"), submission="SST-2"),
    "mrpc": Published(
        "glue/mrpc",
        ("#1 String", "#2 String"),
        names=("not_equivalent", "equivalent"),
        features=PAIR,
        label="Quality",
        metric="f1",
        submission="MRPC",
    ),
    "stsb": Published("glue/stsb", PAIR, labels=(), label="score", metric="spearman", submission="STS-B"),
    "qqp": Published(
        "glue/qqp",
        ("question1", "question2"),
        names=("not_duplicate", "duplicate"),
        label="is_duplicate",
        index="id",
        metric="f1",
        submission="QQP",
        ragged=True,
    ),
    "mnli": mnli(MATCHED, "MNLI-m"),
    "mnli_mismatched": mnli(MISMATCHED, "MNLI-mm"),
    "qnli": Published("glue/qnli", ("question", "sentence"), ENTAILMENT, submission="QNLI"),
    "rte": Published("glue/rte", PAIR, ENTAILMENT, submission="RTE"),
    "wnli": Published("glue/wnli", PAIR, names=("not_entailment", "entailment"), submission="WNLI"),
    "imdb": Published("imdb_reviews/plain_text", ("text",), ("neg", "pos"), folders=True),
}


class Unlabelled(NamedTuple):
    """A text of a test, or two, and its number there."""

    number: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Glue(Task):
    """A published task, whose columns, classes and metric are known: from its folder, or from TFDS (tfds:glue/rte)."""

    name: str = "cola"
    """cola, sst2, mrpc, stsb, qqp, mnli, mnli_mismatched, qnli, rte, wnli or imdb."""
    data_dir: str | Path | None = None
    """The folder of TFDS's data sets; None: TFDS's own."""

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            known = list(TASKS)
            raise ValueError(f"task {self.name!r} is not known{nearest(self.name, known)}: choose {', '.join(known)}")
        about, defaults = self.published, {each.name: each.default for each in fields(Task)}
        known = {"kind": about.kind, "texts": about.texts, "label": about.label, "labels": about.labels}
        for name, value in known.items():
            if getattr(self, name) not in (value, defaults[name]):
                raise ValueError(f"{name} {getattr(self, name)!r} is not {self.name}'s, {value!r}: leave it out")
            object.__setattr__(self, name, value)
        if self.metric is None:
            object.__setattr__(self, "metric", about.metric)
        if self.data_dir is not None:
            object.__setattr__(self, "data_dir", location(self.data_dir))
        super().__post_init__()

    @property
    def published(self) -> Published:
        return TASKS[self.name]

    @property
    def data_set(self) -> str | None:
        """The name in TFDS, if it is read from there."""
        return str(self.path).removeprefix(TFDS) if str(self.path).startswith(TFDS) else None

    def examples(self, split: Split) -> Iterator[Example]:
        """As `Task`; raises ValueError for the test of GLUE."""
        if split == "test" and self.test is None and not self.whole and self.published.submission:
            raise ValueError(
                f"the test labels of {self.name} are not published: evaluate --split validation, and give predictions "
                "to the leaderboard (ctx_jax submit)"
            )
        yield from super().examples(split)

    def fingerprint(self, split: Split) -> str:
        held = (split, self._held_out(split)) if self._held_out(split) else None
        if self.data_set is not None:
            files = [self._tfds(self._file(split)).fingerprint("train")]
        elif self.published.folders:
            files = content(file for file, _ in self._in_folders(self._file(split)))
        else:
            files = content([self._file(split)])
        return fingerprint(type(self).__name__, self.name, files, held, (self.scale, self.errors))

    def unlabelled(self, source: Path | None = None) -> list[Unlabelled]:
        """The examples of the test in their order, from `source` instead of its own file (the diagnostic set).

        Raises FileNotFoundError or ValueError for what is not there.
        """
        about = self.published
        if self.data_set is not None and source is None:
            names = (*(about.features or about.texts), "idx")
            records = self._tfds(about.files["test"]).fields(about.files["test"], names)
            found = [Unlabelled(int(one["idx"]), tuple(one[name] for name in names[:-1])) for one in records]
        else:
            file = source or self._table("test")
            wanted = (about.index, *about.texts)
            found = []
            for place, one in self._fields(file, (), wanted, empty=True):
                if not one[0].isdecimal():
                    raise ValueError(f"{file} line {place}: {about.index} {one[0]!r} is no number: mend it")
                found.append(Unlabelled(int(one[0]), one[1:]))
        return sorted(found)

    def _held_out(self, split: Split) -> tuple[str, ...]:
        if self.whole or not self.published.folders or split == "test" or self.validation is not None:
            return ()
        return ("validation",)

    def _file(self, split: Split) -> Any:
        """A file; a folder of IMDb's; of TFDS the name of a split."""
        chosen = None if split == "train" or self.whole else getattr(self, split)
        part: Split = "train" if self.whole or (split == "validation" and self.published.folders) else split
        if self.data_set is not None:
            if self.published.folders:
                return chosen or part
            return str(chosen or self.published.files[part].replace("dev", "validation"))
        if chosen is not None:
            return Path(chosen)
        if self.published.folders:
            return Path(self.path) / part
        return Path(self.path) if Path(self.path).is_file() else self._table(part)

    def _table(self, split: Split) -> Path:
        name = f"{self.published.files[split]}.tsv"
        for ending in ("", ".gz", ".zst"):
            if (file := Path(self.path) / f"{name}{ending}").is_file():
                return file
        raise FileNotFoundError(
            f"{self.path} has no {name}: give the folder of {self.name} as GLUE publishes it, or "
            f"{TFDS}{self.published.data_set} (--text)"
        )

    def _tfds(self, split: str) -> Tfds:
        return Tfds(self.data_set or "", self.data_dir, train=split, whole=True)

    def _read(self, file: Any) -> Iterator[Example]:
        about = self.published
        if self.data_set is not None:
            texts, names = about.features or about.texts, about.names or about.labels
            for number, one in enumerate(self._tfds(file).fields(file, (*texts, "label"))):
                label = about.labels[names.index(one["label"])] if one["label"] in names else one["label"]
                yield Example(tuple(one[name] for name in texts), label, f"{self.path} {file} record {number}", number)
        elif about.folders:
            for each, label in self._in_folders(file):
                text = unified(whole("".join(escaped(each, self.errors)), str(each))).strip()
                yield Example((text,), label, str(each), 1)
        else:
            wanted = (*about.texts, about.label)
            for place, one in self._fields(file, about.columns, wanted):
                yield Example(one[:-1], one[-1].strip(), f"{file} line {place}", place)

    def _in_folders(self, folder: Path) -> Iterator[tuple[Path, str]]:
        for label in self.labels:
            files = sorted((folder / label).glob("*.txt"))
            if not files:
                raise FileNotFoundError(
                    f"{folder / label} has no texts: give the folder of {self.name} as it is published (with train/"
                    f"{label}/*.txt and so on), or {TFDS}{self.published.data_set} (--text)"
                )
            yield from ((file, label) for file in files)

    def _fields(
        self, file: Path, columns: tuple[str, ...], wanted: tuple[str, ...], empty: bool = False
    ) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Line and fields of a table, whose first line names the columns if they are not given. Raises ValueError,
        naming the place, for what is missing, unless fields may be empty."""
        places: list[int] = []
        left_out = 0
        for number, line in lines(file, self.errors):
            row = line.split("\t")
            if not places:
                names = columns or tuple(row)
                for name in wanted:
                    if name not in names:
                        raise ValueError(
                            f"{file} has no column {name!r} (there are: {', '.join(names)}): give the files of "
                            f"{self.name} as GLUE publishes them"
                        )
                places = [names.index(name) for name in wanted]
                if not columns:
                    continue
            if not line:
                continue
            found = tuple(row[place] if place < len(row) else "" for place in places)
            if empty or all(value.strip() for value in found):
                yield number, found
            elif self.published.ragged:
                left_out += 1
            else:
                raise ValueError(f"{file} line {number} lacks one of {', '.join(wanted)}: mend it, or leave it out")
        if left_out:
            tell(f"note: {left_out:,} lines of {file} lack a text or the label, and are left out")
