"""Tables of examples in files, declared by their columns.

.tsv, .txt    a line an example, tabs between columns, no quotation marks    .csv    RFC 4180
.jsonl        an object an example; each of them also .gz or .zst
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctx_jax.data.files import Errors, is_jsonl
from ctx_jax.data.jsonl import LINE, json_object, unified, without_halves
from ctx_jax.data.lines import lines
from ctx_jax.serialization import nearest

if TYPE_CHECKING:
    from ctx_jax.data.files import File


def rows(
    file: File, columns: tuple[str, ...], wanted: tuple[str, ...], errors: Errors, named_by: str | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, {column: field}) of a file of examples; blank lines are left out. `named_by`: the options that name the
    columns, besides .columns; None = they are those of a run.

    Raises ValueError, naming file and line, for a column of `wanted` that is missing, twice there, empty or no text.
    """
    read = (line for _, line in lines(file, errors))
    other = "" if named_by is None else ", or name the columns with --data.corpus.columns"
    for place, fields in objects(file, read) if is_jsonl(file) else tables(file, read, columns, wanted, other):
        where = f"{file} line {place}"
        for name in wanted:
            if name not in fields:
                remedy = "rename one" if named_by is None else f"rename one, or name another with {named_by}"
                raise ValueError(
                    f"{where} has no column {name!r}{nearest(name, list(fields))} (there are: {', '.join(fields)}): "
                    f"{remedy}{other}"
                )
            if not isinstance(text := fields[name], str):
                raise ValueError(f"{where}: the field {name!r} is a {type(text).__name__}: give a text or a number")
            if not text.strip():
                raise ValueError(f"{where}: the field {name!r} is empty: fill it, or leave the line out")
            fields[name] = without_halves(text, f"{where}: the field {name!r}", errors)
        yield place, fields


def check_columns(columns: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    """Raises ValueError if columns are named, and not all that are wanted."""
    for name in wanted if columns else ():
        if name not in columns:
            raise ValueError(f"columns {columns} have no {name!r}{nearest(name, list(columns))}")


def is_table(file: File) -> bool:
    return suffix(file) in (".csv", ".tsv")


def suffix(file: File) -> str:
    return Path(file.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def objects(file: File, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and fields of each line of JSON; numbers as they are written, null as no text."""
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = json_object(line, f"{file} line {place}", '{"text": "...", "label": "..."}')
        yield place, {name: written(value) for name, value in entry.items()}


def written(value: Any) -> Any:
    if isinstance(value, int | float):
        return json.dumps(value)
    return "" if value is None else unified(value) if isinstance(value, str) else value


def tables(
    file: File, lines: Iterator[str], columns: tuple[str, ...], wanted: tuple[str, ...], other: str
) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and fields of each line of a table. Raises ValueError, naming the line, for one that has fewer than the
    columns, or more than its header names: behind a tab that belongs to a text all fields would be others'. `other`
    says what else than to mend it helps."""
    numbered = table(file, lines)
    names = list(columns)
    for place, fields in numbered:
        if not any(map(str.strip, fields)):
            continue
        if not names:
            names = [name.strip() for name in fields]
            for name in wanted:
                if names.count(name) > 1:
                    raise ValueError(
                        f"{file} line {place} names {names.count(name)} columns {name!r}: rename all but one"
                    )
            continue
        if len(fields) < len(names) or (not columns and any(fields[len(names) :])):
            raise ValueError(
                f"{file} line {place} has {len(fields)} columns, not {len(names)} ({', '.join(names)}): mend it{other}"
            )
        yield place, dict(zip(names, fields, strict=False))


def table(file: File, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Number and columns of each line; of several that quotation marks join, the first."""
    if suffix(file) != ".csv":
        yield from ((place, line.split("\t")) for place, line in enumerate(lines, 1))
        return
    csv.field_size_limit(LINE)  # csv's own is 128 KiB; every platform's C long holds this one
    records = csv.reader((line + "\n" for line in lines), strict=True)
    place = 1
    try:
        for fields in records:
            yield place, fields
            place = records.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{file} line {place} is not CSV: {error}: begin and end a field that has quotation marks with one, and "
            "write those inside it twice"
        ) from None
