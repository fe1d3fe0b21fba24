"""Our models in lm-evaluation-harness (Gao et al., github.com/EleutherAI/lm-evaluation-harness), an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import lm_eval  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from ctx_jax.evaluation.few_shot import Scorer
from ctx_jax.generation.decode import generate
from ctx_jax.generation.sampling import Sampling
from ctx_jax.generation.text import Texts
from ctx_jax.runs import TOKENS_TO_STOP, Trained, open_run

LONGEST = 256
"""Tokens to generate where a task does not say how many (the harness's own default)."""


class HarnessModel(LM):
    """A run's checkpoint as the harness sees a model: text in, likelihoods and text out."""

    def __init__(self, run: Trained, length: int | None = None, batch_size: int = 32) -> None:
        """Arguments and errors as `few_shot.Scorer`."""
        super().__init__()
        self.run, self.scorer, self.rows = run, Scorer(run, length, batch_size), batch_size

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): log P in nats, and whether it is what greedy decoding gives."""
        return [(found.total, found.greedy) for found in self.scorer([request.args for request in requests])]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of each (text,), as a whole."""
        return [self.scorer.rolling(request.args[0]).total for request in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Of each (context, settings): what follows, up to the first of `until`. Equal settings that stand together are
        generated together."""
        texts = []
        for _, alike in groupby((request.args for request in requests), lambda arguments: repr(arguments[1])):
            asked = list(alike)
            for start in range(0, len(asked), self.rows):
                contexts = [context for context, _ in asked[start : start + self.rows]]
                texts += self._continue(contexts, asked[0][1])
        return texts

    def _continue(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        tokenizer, until = self.run.tokenizer, settings.get("until") or ()
        length = min(settings.get("max_gen_toks", LONGEST), self.scorer.length - 1)
        prompts = [[tokenizer.vocabulary.begin, *tokenizer.encode(context).ids.tolist()] for context in contexts]
        prompts = [prompt[length - self.scorer.length :] for prompt in prompts]
        temperature = settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0
        texts = Texts(tokenizer, prompts, [until] if isinstance(until, str) else until)
        new = generate(
            self.run.model,
            self.run.variables,
            tokenizer.vocabulary,
            prompts,
            length=length,
            sampling=Sampling(temperature, settings.get("top_k"), settings.get("top_p")),
            seed=0,
            watch=texts.watch,
            every=TOKENS_TO_STOP,
        )
        return [text[start:] for text, start in zip(texts.finish(new), texts.starts, strict=True)]


def evaluate(
    path: Path,
    *,
    tasks: tuple[str, ...],
    include_path: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    checkpoint: str = "last",
    length: int | None = None,
    batch_size: int = 32,
) -> dict[str, Any]:
    """Arguments as `cli_evaluation.Harness`. Returns {"run", "step", "lm_eval": its version, "results": of each task,
    with "versions" and "shots"}.

    Raises ValueError for a task that the harness does not know.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(f"--tasks {task} is no task of lm_eval {lm_eval.__version__}, nor of --include-path")
    run = open_run(path, checkpoint)
    found = lm_eval.simple_evaluate(
        HarnessModel(run, length, batch_size),
        tasks=list(tasks),
        num_fewshot=shots,
        limit=limit,
        log_samples=False,
        task_manager=manager,
    )
    names = {"results": "results", "versions": "versions", "n-shot": "shots"}
    about = {"run": str(path), "step": run.step, "lm_eval": lm_eval.__version__}
    return {**about, **{ours: found[theirs] for theirs, ours in names.items()}}
