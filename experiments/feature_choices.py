"""Which layers of a frozen model hold most of a tagging task: BERT's choices of features (Devlin et al. 2018, table 7),
each read by a BiLSTM.

    python experiments/feature_choices.py RUN --text train.conll --validation dev.conll --test test.conll

--seeds 3 trains each BiLSTM three times. What else is given is an option of `probe` (--scheme IOB1, --tagger.width
384). Prints a table of entity F1, means over the seeds, beside the paper's of BERT-base on the development set of
CoNLL-2003, and ends in one JSON line on stdout. What it gives on WNUT-17: benchmarks/results/finetuning.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ctx_jax.cli_transfer import probe
from ctx_jax.compilation import keep_compiled
from ctx_jax.experiment import load
from ctx_jax.progress import tell
from ctx_jax.training.checkpoints import named


def choices(depth: int) -> dict[str, tuple[float, list[str]]]:
    """By name the paper's F1 and the options of `probe`, for a model of so many layers."""
    last_four, every = (list(map(str, layers)) for layers in (range(-min(4, depth), 0), range(1, depth + 1)))
    return {
        "embeddings": (91.0, ["--layers", "0"]),
        "second to last layer": (95.6, ["--layers", "-2"]),
        "last layer": (94.9, ["--layers", "-1"]),
        "weighted sum of the last four": (95.9, ["--layers", *last_four, "--tagger.weighted"]),
        "last four beside each other": (96.1, ["--layers", *last_four]),
        "weighted sum of all layers": (95.5, ["--layers", *every, "--tagger.weighted"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seeds", type=int, default=1, help="how many times each BiLSTM is trained")
    arguments, rest = parser.parse_known_args()
    keep_compiled()
    try:
        depth = load(named(arguments.run)[0] / "experiment.json").model.layers
        table = Table("features", "validation F1", "test F1", "the paper's", box=box.SIMPLE)
        results = []
        for name, (paper, options) in choices(depth).items():
            words = [str(arguments.run), "--kind", "tagging", *rest, *options]
            found = [probe([*words, "--seed", str(seed)]) for seed in range(arguments.seeds)]
            scores = {split: [one[split]["f1"] for one in found] for split in ("validation", "test")}
            results.append({"features": name, "layers": found[0]["layers"], "combine": found[0]["combine"], **scores})
            validation, test = (f"{statistics.fmean(scores[split]):.3f}" for split in ("validation", "test"))
            tell(f"{name}: validation F1 {validation}, test F1 {test}")  # a run that is stopped has said this much
            table.add_row(name, validation, test, f"{paper / 100:.3f}")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    Console(stderr=True).print(table)
    print(json.dumps({"run": str(arguments.run), "results": results}))


if __name__ == "__main__":
    main()
