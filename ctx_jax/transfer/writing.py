"""A field of an article written from the others (Grover: Zellers et al. 2019, arXiv 1905.12616, section 3)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctx_jax.data import check_writable, write_durably
from ctx_jax.data.articles import ArticleCorpus, field_of, markers_of, read_articles, shortened
from ctx_jax.generation.decode import generate
from ctx_jax.generation.sampling import Sampling
from ctx_jax.progress import counted
from ctx_jax.runs import open_run
from ctx_jax.serialization import nearest
from ctx_jax.transfer.texts import input_file, own_options


def write(
    path: Path,
    field: str,
    source: str,
    output: Path | None = None,
    *,
    sampling: Sampling,
    length: int = 64,
    seed: int = 0,
    checkpoint: str = "last",
    batch_size: int = 8,
) -> dict[str, Any]:
    """Writes one field of each article of a file ("-": standard input) from the fields that are there.

    What the model reads is as in the paper (section 3.2): the other fields in their order, then the field's start
    token; what is too long for it loses its body's end. The text is what comes before the field's end token, or
    the first `length` tokens.

    Returns {"run", "step", "field", "articles"} and "texts": [{"line", field: text}] or, with `output`, a file of one a
    line, "output". Raises ValueError for a field that the run does not know, and what `read_articles` raises.
    """
    if batch_size < 1:
        raise ValueError(f"--batch-size {batch_size} is not a number of articles: choose 1 or more")
    if output is not None:
        check_writable(output)
    run = open_run(path, checkpoint)
    corpus, config = run.experiment.data.corpus, run.experiment.model
    if not isinstance(corpus, ArticleCorpus):
        raise ValueError(f"{path} was not trained on articles: choose a run of grover")
    if field not in corpus.fields:
        raise ValueError(
            f"--field {field!r} is no field of {path}{nearest(field, list(corpus.fields))}: choose from "
            f"{', '.join(corpus.fields)}"
        )
    positions = run.experiment.data.reader.length  # those that were trained
    if not 0 < length <= positions - 2:
        raise ValueError(f"--length {length}: choose from 1 to {positions - 2}, of the run's rows of {positions}")
    vocabulary, target = run.tokenizer.vocabulary, corpus.fields.index(field)
    markers = markers_of(corpus, vocabulary, config.vocabulary_size)
    with own_options():
        articles = list(read_articles(input_file(source), corpus.fields, "strict"))
    if not articles:
        raise ValueError("there is no article in --input: give one a line of JSON")
    prompts = []
    for article in articles:
        texts = ("" if number == target else text for number, text in enumerate(article.texts))
        fields = [field_of(run.tokenizer, text) for text in texts]
        given = markers.row(shortened(fields, positions - length - 2), range(len(fields)))
        prompts.append([*given.ids[:-1].tolist(), markers.start(target)])
    ending = replace(vocabulary, size=config.vocabulary_size, end=markers.start(target) + 1)
    special = {vocabulary.end, *ending.special}
    written = []
    for first in counted("writing", range(0, len(prompts), batch_size), -(-len(prompts) // batch_size)):
        chosen = prompts[first : first + batch_size]
        found = generate(run.model, run.variables, ending, chosen, length=length, sampling=sampling, seed=seed)
        for article, ids in zip(articles[first : first + batch_size], found, strict=True):
            stop = next((n for n, i in enumerate(ids) if i in special or i >= vocabulary.size), len(ids))
            written.append({"line": article.line, field: run.tokenizer.decode(ids[:stop]).strip()})
    result = {"run": str(path), "step": run.step, "field": field, "articles": len(articles)}
    if output is None:
        return {**result, "texts": written}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_durably(output, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in written))
    return {**result, "output": str(output)}
