"""Records pretraining batches as the original data code of BERT and XLNet makes them of a small text, and the random
choices that it made. Needs tensorflow, six, and clones of google-research/bert and zihangdai/xlnet in one folder.

    python -m tests.golden.record_pretraining --original FOLDER
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.golden.originals import load, old

HERE = Path(__file__).parent / "tensorflow"
LENGTH, PREDICTIONS = 32, 5
"""Of BERT's rows."""
ROWS, REUSED, PREDICTED = 4, 16, 6
"""Of XLNet's batches, whose rows are as long as BERT's."""
WORDS = "the a of to king queen ship war peace city law gave took saw made held old new great small and but".split()
PIECES = "##s ##ing ##ed ##ly ##ness ##er".split()
SPECIAL = "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
VOCABULARY = SPECIAL + WORDS + PIECES
SYMBOLS = "<unk> <s> </s> <cls> <sep> <pad> <mask> <eod> <eop>".split()
DEAL = {"random": 0, "randint": 1, "truncate": 2}
"""What each row of "draws" begins with."""


def text(seed: int) -> list[list[str]]:
    """Documents of sentences."""
    chance = random.Random(seed)

    def word() -> str:
        ends = "".join(end[2:] for end in chance.sample(PIECES, chance.choice((0, 0, 0, 1, 2))))
        return chance.choice(WORDS) + ends

    return [
        [" ".join(word() for _ in range(chance.randint(2, 12))) for _ in range(chance.randint(1, 9))] for _ in range(6)
    ]


class Watched(random.Random):
    """Keeps what is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.draws: list[tuple[float, ...]] = []
        self.silent = False

    def note(self, kind: str, *values: float) -> None:
        if not self.silent:
            self.draws.append((DEAL[kind], *values, *(0.0,) * (4 - len(values))))

    def shuffle(self, x: Any) -> None:
        """Of documents; instances stay in order."""
        if isinstance(x[0], list):
            self.silent = True
            super().shuffle(x)
            self.silent = False

    def random(self) -> float:
        value = super().random()
        self.note("random", value)
        return value

    def randint(self, a: int, b: int) -> int:
        self.silent, before = True, self.silent
        value = super().randint(a, b)
        self.silent = before
        self.note("randint", a, b, value)
        return value


class Cut(list[Any]):
    """Counts what is taken off its front, and off both ends."""

    front = removed = 0

    def __delitem__(self, key: Any) -> None:
        self.front, self.removed = self.front + 1, self.removed + 1
        super().__delitem__(key)

    def pop(self, index: Any = -1) -> Any:
        self.removed += 1
        return super().pop(index)


def bert(folder: Path, whole_words: bool) -> dict[str, np.ndarray]:
    """Features of all instances of two copies of the text, in the order in which they are made, and what was drawn."""
    data, tokenization = load(folder, "create_pretraining_data", "tokenization")
    data.FLAGS.do_whole_word_mask = whole_words
    tokenizer = tokenization.FullTokenizer(str(HERE / "bert" / "vocab.txt"))
    rng = Watched(0)
    made: list[tuple[list[str], list[int]]] = []
    counts: list[list[int]] = []
    order: list[Any] = []

    def documents_watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(documents: Any, index: int, *rest: Any) -> Any:
            order[:] = documents
            begin, instances = len(rng.draws), original(documents, index, *rest)
            counts.append([len(instances), len(rng.draws) - begin])
            return instances

        return create

    def masking_watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(tokens: list[str], rate: float, most: int, words: list[str], rng: Watched) -> Any:
            shuffled: list[int] = []

            class Order(random.Random):
                def shuffle(self, x: Any) -> None:
                    super().shuffle(x)
                    shuffled.extend(indices[0] for indices in x)

            chance = Order(rng.getrandbits(32))
            made.append((list(tokens), shuffled))
            return original(tokens, rate, most, words, chance)

        return create

    def truncation_watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def truncate(a: list[str], b: list[str], most: int, rng: Watched) -> None:
            cut_a, cut_b = Cut(a), Cut(b)
            rng.silent = True
            original(cut_a, cut_b, most, rng)
            rng.silent = False
            a[:], b[:] = cut_a, cut_b
            rng.note("truncate", cut_a.front, cut_a.removed, cut_b.front, cut_b.removed)

        return truncate

    data.create_instances_from_document = documents_watched(data.create_instances_from_document)
    data.create_masked_lm_predictions = masking_watched(data.create_masked_lm_predictions)
    data.truncate_seq_pair = truncation_watched(data.truncate_seq_pair)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "text"
        path.write_text("\n\n".join("\n".join(document) for document in text(1)) + "\n")
        instances = data.create_training_instances([str(path)], tokenizer, LENGTH, 2, 0.3, 0.15, PREDICTIONS, rng)
        records = Path(scratch) / "records"
        data.write_instance_to_example_files(instances, tokenizer, LENGTH, PREDICTIONS, [str(records)])
        features = read_records(records)

    def padded(rows: list[list[int]], filler: int) -> np.ndarray:
        return np.array([row + [filler] * (LENGTH - len(row)) for row in rows])

    ids = tokenizer.convert_tokens_to_ids
    sentences = [(number, ids(tokens)) for number, document in enumerate(order) for tokens in document]
    return {
        **features,
        "original_ids": padded([ids(tokens) for tokens, _ in made], 0),
        "order": padded([shuffled for _, shuffled in made], -1),
        "sentence_ids": np.array([token for _, tokens in sentences for token in tokens]),
        "sentence_lengths": np.array([len(tokens) for _, tokens in sentences]),
        "sentence_documents": np.array([number for number, _ in sentences]),
        "counts": np.array(counts),
        "draws": np.array(rng.draws),
    }


def read_records(path: Path) -> dict[str, np.ndarray]:
    """The features of a file of examples, each [N, ...]."""
    rows: dict[str, list[Any]] = {}
    for record in old.python_io.tf_record_iterator(str(path)):
        for name, feature in old.train.Example.FromString(record).features.feature.items():
            rows.setdefault(name, []).append(list(feature.int64_list.value or feature.float_list.value))
    return {name: np.array(values) for name, values in rows.items()}


class Pieces:
    """In place of a SentencePiece model: ids from 9 on, of which every third goes on a word."""

    def Load(self, path: str) -> None:
        pass

    def IdToPiece(self, token: int) -> str:
        return SYMBOLS[token] if token < len(SYMBOLS) else f"{'' if token % 3 == 0 else '▁'}p{token}"


def xlnet(folder: Path) -> dict[str, np.ndarray]:
    """Batches [N, B, ...], half of whose rows are read backwards, and the random order of each row's halves."""
    (data,) = load(folder, "data_utils")
    data.spm.SentencePieceProcessor = Pieces
    halves: list[list[np.ndarray]] = []

    def shuffled(index: Any) -> Any:
        drawn: list[np.ndarray] = []
        halves.append(drawn)

        def draw(index: np.ndarray) -> np.ndarray:
            drawn.append(rng.permutation(index))
            return drawn[-1]

        found = old.numpy_function(draw, [index], old.int64)
        found.set_shape(index.shape)
        return found

    rng = np.random.default_rng(5)
    number_feature, data._int64_feature = data._int64_feature, lambda x: number_feature([int(value) for value in x])
    data.tf.random_shuffle = shuffled
    np.random.seed(5)  # noqa: NPY002  # which the original draws from
    data.random.seed(5)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "text"
        chance = random.Random(3)
        path.write_text(
            "\n\n".join(
                "\n".join(
                    " ".join(str(chance.randint(9, 42)) for _ in range(chance.randint(2, 9)))
                    for _ in range(chance.randint(2, 9))
                )
                for _ in range(7)
            )
        )
        data.FLAGS = SimpleNamespace(
            sp_path="",
            use_eod=True,
            from_raw_text=False,
            uncased=False,
            save_dir=scratch,
            split="train",
            task=0,
            pass_id=0,
            bsz_per_host=ROWS,
            num_core_per_host=1,
            bi_data=True,
            seq_len=LENGTH,
            reuse_len=REUSED,
            mask_alpha=6,
            mask_beta=1,
            num_predict=PREDICTED,
        )
        old.gfile.MakeDirs(f"{scratch}/tfrecords")
        (file,) = data._create_data(0, [str(path)])["filenames"]
        raw = read_records(Path(file))
        count = len(raw["input"]) // ROWS
        dataset = data.get_dataset(
            {"batch_size": ROWS}, 1, 1, "train", [file], count, LENGTH, REUSED, REUSED, 6, 1, num_predict=PREDICTED
        )
        following = old.data.make_one_shot_iterator(dataset).get_next()
        with old.Session() as session:
            batches = [session.run(following) for _ in range(count)]
    features = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    orders = [np.stack(drawn[: ROWS * count]).reshape(count, ROWS, REUSED) for drawn in halves]
    chosen = raw["is_masked"].reshape(count, ROWS, LENGTH)
    return {**features, "is_masked": chosen, "permutation": np.concatenate(orders, axis=2)}


def spans(folder: Path) -> dict[str, np.ndarray]:
    """Targets chosen in segments of text alone, [N, T], and what was drawn: lengths of spans, their places in their
    contexts, and where is topped up, -1 from where on nothing was."""
    (data,) = load(folder, "data_utils")
    data.FLAGS = SimpleNamespace(mask_alpha=6, mask_beta=1)
    rng = np.random.default_rng(6)
    drawn: dict[str, list[int]] = {}

    class Numpy:
        random = SimpleNamespace(
            choice=lambda x, p=None: note("places" if p is None else "lengths", rng.choice(x, p=p)),
            randint=lambda size: note("more", rng.integers(size)),
        )

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    def note(name: str, value: Any) -> Any:
        drawn[name].append(int(value))
        return value

    data.np = Numpy()
    segments = rng.integers(9, 43, (60, 48))
    found: dict[str, list[Any]] = {name: [] for name in ("chosen", "lengths", "places", "more")}
    for segment in segments:
        drawn.update({name: [] for name in found})
        found["chosen"].append(data._sample_mask(Pieces(), segment, goal_num_predict=8))
        for name in ("lengths", "places", "more"):
            found[name].append(drawn[name] + [-1] * (24 - len(drawn[name])))
    return {"tokens": segments, **{name: np.array(values) for name, values in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--original", type=Path, required=True, help="where the clones bert and xlnet are")
    original = parser.parse_args().original.resolve()
    (HERE / "bert").mkdir(parents=True, exist_ok=True)
    (HERE / "bert" / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    found = {
        "bert_pretraining": bert(original / "bert", whole_words=False),
        "bert_whole_words": bert(original / "bert", whole_words=True),
        "xlnet_pretraining": xlnet(original / "xlnet"),
        "xlnet_spans": spans(original / "xlnet"),
    }
    for name, arrays in found.items():
        small = {
            key: x.astype(np.float32 if x.dtype.kind == "f" and key != "draws" else x.dtype)
            for key, x in sorted(arrays.items())
        }
        np.savez_compressed(HERE / f"{name}.npz", **small)  # pyright: ignore[reportArgumentType]
        print(name, {key: x.shape for key, x in arrays.items()})


if __name__ == "__main__":
    main()
