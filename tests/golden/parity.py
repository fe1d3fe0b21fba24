"""The comparison with transformers, live and in both directions, on fresh random models (`make parity`).

For each case of record.py that the installed transformers has: what it writes is read by us and gives the same; what we
write is loaded by it without a warning, without a tensor missing or unexpected, and gives the same. Needs torch and
transformers beside ctx_jax.

    python -m tests.golden.parity [--seed N] [--original transformer-xl/pytorch]
"""

from __future__ import annotations

import argparse
import logging
import secrets
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from ctx_jax.interop import KINDS, Imported, export_folder, import_folder, kinds_of, rules_of
from tests.golden.cases import CASES, Case
from tests.golden.compare import compared, load_record, windows_of
from tests.golden.record import find_original, possible, record, run

MOST, MEAN = 1e-4, 1e-5
"""Errors that are allowed in fp32, absolute."""


class Said(logging.Handler):
    """Keeps what transformers warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def imported_error(imported: Imported, folder: Path) -> float:
    """The largest difference between a folder's record and what we compute from it; exits if there is one."""
    values = [one for one in compared(imported, load_record(folder)) if one.name != "loss"]  # a large sum
    for one in values:
        most, mean = one.error.max(), one.error.mean()
        if not (most < MOST and mean < MEAN):
            raise SystemExit(f"{folder.name}: {one.name} differs by {most:.1e}, in the mean by {mean:.1e}")
    return max(float(one.error.max()) for one in values)


def load(kind: str, folder: Path) -> Any:
    """Their model from our folder; exits if anything is said about it."""
    said = Said()
    logger = logging.getLogger("transformers")
    logger.addHandler(said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    logger.removeHandler(said)
    trouble = [*said.lines, *(f"{key}: {value}" for key, value in info.items() if value)]
    if trouble:
        raise SystemExit(f"{kind}: transformers says of our folder: {'; '.join(trouble)}")
    return model.eval()


def exported_error(case: Case, imported: Imported, folder: Path, exported: Path) -> float:
    """The largest difference between the record and what transformers computes from our folder; exits if there is
    one."""
    left = export_folder(
        imported.config, imported.params, exported, case.kind, labels=imported.labels, shard_bytes=30_000
    )
    if left:
        raise SystemExit(f"{case.kind}: the export leaves out {left}")
    model = load(case.kind, exported)
    if imported.labels and tuple(model.config.id2label.values()) != imported.labels:
        raise SystemExit(f"{case.kind}: the labels are {model.config.id2label}, not {imported.labels}")
    model.config.pad_token_id = case.pad  # with us it is said by each batch, as the direction
    if case.config.get("bi_data"):
        model.transformer.bi_data = True
    truth = load_record(folder)
    found = run(case, model, windows_of(truth))
    most = max(float(np.abs(x - truth[key]).max()) for key, x in found.items())
    if not most < MOST:
        raise SystemExit(f"{folder.name}: what is exported differs by {most:.1e}")
    return most


def other_kinds(imported: Imported, scratch: Path) -> list[str]:
    """The other classes as which our model can be written; each is loaded."""
    lacking = set(imported.absent)
    found = []
    for kind in kinds_of(imported.config):
        family = KINDS[kind]
        rules = rules_of(family, imported.config, family.kinds[kind], "")
        if kind == imported.kind or any(lacking.intersection(rule.ours) for rule in rules):
            continue
        export_folder(imported.config, imported.params, scratch / kind, kind)
        load(kind, scratch / kind)
        found.append(kind)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the models and their inputs")
    parser.add_argument("--original", type=Path, help="the pytorch folder of kimiyoung/transformer-xl: compare that")
    options = parser.parse_args()
    if options.original:
        find_original(options.original)
    transformers.utils.logging.disable_progress_bar()
    print(f"seed {options.seed}, transformers {transformers.__version__}")
    for name in possible(options.original is not None):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            record(name, folder, options.seed)
            imported = import_folder(folder)
            line = f"{name:32} imported {imported_error(imported, folder):.1e}"
            if KINDS[imported.kind].write is not None:
                line += f"   exported {exported_error(CASES[name], imported, folder, Path(scratch) / 'exported'):.1e}"
                line += f"   loaded {' '.join(other_kinds(imported, Path(scratch)))}"
            print(line)


if __name__ == "__main__":
    main()
