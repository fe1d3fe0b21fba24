"""Fine-tuning on labelled examples of your own: the network is that of the run that --from names.

    python -m ctx_jax train finetune:classification --from RUN --text examples.tsv --run runs/mine

The recipe is the usual one (Devlin et al. 2018, appendix A.3: rates 2e-5 to 5e-5, batches of 16 or 32, 2 to 4 epochs):
AdamW, warm-up over a tenth of the steps, linear decay. After each epoch the validation examples are scored, and the
checkpoint that did best stays: evaluate RUN --checkpoint best. Without --from a tiny BERT is trained from scratch.

What it gives with all-MiniLM-L6-v2 on SST-2, STS-B, RTE and WNUT-17, and what rates and layer-wise decay add:
benchmarks/results/finetuning.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ctx_jax.data.examples import Examples, Windows
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.evaluation.answers import Answers
from ctx_jax.evaluation.multiple_choice import MultipleChoice
from ctx_jax.evaluation.tagging import Tagging
from ctx_jax.evaluation.tasks import Task
from ctx_jax.experiment import Data, Experiment, find
from ctx_jax.objectives.choices import Choices
from ctx_jax.objectives.spans import Spans
from ctx_jax.objectives.supervised import Supervised
from ctx_jax.objectives.tags import Tags
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


def gpt() -> Experiment:
    """GPT's recipe (Radford et al. 2018, section 4.1): rate 6.25e-5, batches of 32, three epochs, warm-up over 0.2 % of
    the steps, and language modelling of the texts as an auxiliary loss, half as heavy.

    Pairs without an order (MRPC, STS-B, QQP) want --objective.both-orders.

    python -m ctx_jax train finetune:gpt --from RUN --text examples.tsv
    """
    default = classification()
    return replace(
        default,
        name="gpt-classification",
        model=replace(find("gpt:tiny").model, dropout=0.1, attention_dropout=0.1),
        objective=Supervised(language_model=0.5),
        optimizer=AdamW(schedule=WarmUp(rate=6.25e-5, share=0.002)),
    )


def regression() -> Experiment:
    """Two texts and a number (columns first, second and label), as in STS-B: the mean of squared errors.

    python -m ctx_jax train finetune:regression --from RUN --text pairs.tsv
    """
    default = classification()
    task = replace(default.data.corpus, kind="regression", texts=("first", "second"))
    return replace(default, name="regression", data=replace(default.data, corpus=task))


def tagging() -> Experiment:
    """A tag for each word, from a file in the manner of CoNLL (word, tab, tag; a blank line after each sentence).

    python -m ctx_jax train finetune:tagging --from RUN --text train.conll --data.corpus.validation dev.conll

    What it gives on WNUT-17: benchmarks/results/finetuning.md.
    """
    default = on_tokens("tagging", Windows(128, stride=64))
    return replace(default, data=replace(default.data, corpus=Tagging(Path("train.conll"))), objective=Tags())


def spans() -> Experiment:
    """Questions and the texts in which their answers are, in SQuAD's JSON, 1.1 or 2.0.

    python -m ctx_jax train finetune:spans --from RUN --text train.json --data.corpus.validation dev.json

    The articles of one file, the first 20 to train on and the others to test on:

    python -c "import json; data = json.load(open('xquad.en.json'))['data']; [json.dump({'data': part}, open(name, 'w'))
    for name, part in (('train.json', data[:20]), ('test.json', data[20:]))]"

    On XQuAD's articles 21 to 24 (96 questions) the best of what needs no model is F1 0.177: the first number or name of
    the sentence that shares most words with the question; that sentence itself has 0.159. Seen with all-MiniLM-L6-v2,
    --optimizer.schedule.rate 1e-4 --training.epochs 20, seeds 0, 1 and 2, fp32 on one H200, the last checkpoint: F1
    0.502, 0.520 and 0.449, mean 0.490; exact 0.361. With the rate and the three epochs above, which are SQuAD's: 0.038.
    """
    default = on_tokens("spans", Windows())
    return replace(default, data=replace(default.data, corpus=Answers(Path("train.json"))), objective=Spans())


def on_tokens(name: str, reader: Windows) -> Experiment:
    default = classification()
    model = replace(default.model, max_length=reader.length, pooler=False, classes=None, token_classes=2)
    return replace(default, name=name, data=replace(default.data, reader=reader), model=model)


def choices() -> Experiment:
    """Which of several texts goes on from one (columns as SWAG's: sent1, ending0 to ending3, label), as in SWAG, whose
    endings go on from the words in sent2:

    python -m ctx_jax train finetune:choices --from RUN --text swag/train.csv --data.corpus.begin sent2
    """
    default = classification()
    data = replace(default.data, corpus=MultipleChoice(Path("choices.csv")), batch_size=16, evaluation_batch_size=16)
    return replace(default, name="choices", data=data, objective=Choices())
