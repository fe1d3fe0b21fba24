"""Fine-tuning on labelled examples of your own: the network is that of the run that --from names.

    python -m ctx_jax train finetune:classification --from RUN --text examples.tsv --run runs/mine

The recipe is the usual one (Devlin et al. 2018, appendix A.3: rates 2e-5 to 5e-5, batches of 16 or 32, 2 to 4 epochs):
AdamW, warm-up over a tenth of the steps, linear decay. After each epoch the validation examples are scored, and the
checkpoint that did best stays: evaluate RUN --checkpoint best. Without --from a tiny BERT is trained from scratch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ctx_jax.data.examples import Examples
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.evaluation.tasks import Task
from ctx_jax.experiment import Data, Experiment, find
from ctx_jax.objectives.supervised import Supervised
from ctx_jax.training.loop import Training
from ctx_jax.training.optimizers import AdamW
from ctx_jax.training.schedules import WarmUp


def classification() -> Experiment:
    """A text, or two with --data.corpus.texts, and the name of its class (columns text and label).

    python -m ctx_jax train finetune:classification --from RUN --text examples.tsv
    """
    return Experiment(
        name="classification",
        data=Data(
            reader=Examples(128),
            corpus=Task(Path("examples.tsv")),
            tokenizer=SentencePiece(2048),
            batch_size=32,
            evaluation_batch_size=64,
        ),
        model=replace(find("bert:tiny").model, dropout=0.1, attention_dropout=0.1),
        objective=Supervised(),
        optimizer=AdamW(schedule=WarmUp(rate=5e-5, share=0.1)),
        training=Training(epochs=3),
    )


def regression() -> Experiment:
    """Two texts and a number (columns first, second and label), as in STS-B: the mean of squared errors.

    python -m ctx_jax train finetune:regression --from RUN --text pairs.tsv
    """
    default = classification()
    task = replace(default.data.corpus, kind="regression", texts=("first", "second"))
    return replace(default, name="regression", data=replace(default.data, corpus=task))
