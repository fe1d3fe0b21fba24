"""Articles told apart, as those that people wrote from those that a model did (Grover: Zellers et al. 2019, arXiv
1905.12616, section 5).

The detector reads an article's fields in their order and, at the end, a classification token, on which the head stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ctx_jax.contract import Vocabulary
from ctx_jax.data.articles import NEWS, Field, Markers, read_articles, shortened
from ctx_jax.data.tokenizers import Encoding
from ctx_jax.evaluation.files import FileTask
from ctx_jax.evaluation.tasks import Example, Task
from ctx_jax.transfer.inputs import Row, Template, template


@dataclass(frozen=True)
class ArticleTask(Task):
    """Articles with a label, in files of JSON lines; the fields are those of the run that --from names."""

    MOST_TEXTS: ClassVar[int] = 64

    texts: tuple[str, ...] = NEWS
    """The articles' fields, of which the last is the body."""

    def _read(self, file: Any) -> Iterator[Example]:
        for article in read_articles(file, (*self.texts, self.label), self.errors):
            *texts, label = article.texts
            if not label:
                raise ValueError(f"{article.where} has no {self.label!r}: label it, or name the label's field")
            if not any(texts):
                raise ValueError(f"{article.where} has none of the fields {', '.join(self.texts)}: give it one")
            yield Example(tuple(texts), label, article.where, article.line)

    def inputs(self, file: Any) -> Iterator[Example]:
        for article in read_articles(file, self.texts, self.errors):
            yield Example(article.texts, "", article.where, article.line)


@dataclass(frozen=True)
class ArticleTemplate(Template):
    """[begin] <field> tokens </field> ... [classification]; a field without text is left out."""

    first: int = 0
    """The id with which the first field starts."""

    def special(self, texts: int) -> int:
        return super().special(1) + 2 * texts

    def row(self, texts: Sequence[Encoding], length: int) -> Row:
        """Of at most `length` tokens: what is too much is cut off the body's end, then off those before it."""
        whole = [Field(text.ids, text.word_starts()) for text in texts]
        fields = shortened(whole, length - super().special(1))
        (begin,), (end,) = self.before, self.after
        tokens, begins = Markers(begin, end, self.first).row(fields, range(len(fields)))
        cut = sum(len(field.ids) for field in fields) < sum(len(field.ids) for field in whole)
        text = (tokens < self.first) & (np.arange(len(tokens)) % (len(tokens) - 1) > 0)
        return Row(tokens, np.cumsum(begins, dtype=np.int32) * text, np.zeros_like(tokens), cut)


def form(task: FileTask, config: Any, vocabulary: Vocabulary, *, both_orders: bool = False) -> Template:
    """How the model of this config reads an example of the task, for a head."""
    if not isinstance(task, ArticleTask):
        return template(config, vocabulary, head=True, both_orders=both_orders)
    first, after = config.vocabulary_size - 2 * len(task.texts), (vocabulary.classification,)
    return ArticleTemplate((vocabulary.begin,), after, vocabulary.pad, first=first, classification_last=True)
