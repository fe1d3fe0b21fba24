"""What a batch, a reader, a model and an objective are: read this file first.

    documents -> tokenizer -> token store -> reader -> loader -> prepare -> model -> loss -> step -> run folder

Each arrow is one module, and each side of an arrow knows the other only through the types below.

Axes: B batch rows, T target positions (the window), S source positions (memory + window), K predicted positions,
D model width, L layers, M memory length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # the processes that tokenize start without it
    import jax

Batch = dict[str, Any]
"""A batch-first dict of arrays (numpy from a reader, jax after the loader). Every reader gives

    tokens          [B, T] int32   ids; the padding id where `documents` is 0
    documents       [B, T] int32   packing ids; 0 = padding; attention never crosses from one id to another
    positions       [B, T] int32   place in the window; never restart inside it
    words           [B, T] int32   number of the token's word in its row, from 1; 0 on special tokens and padding
    example         [B]    int32   the row's number in the store's order; with `epoch` it seeds the corruption
    epoch           [B]    int32   how often the reader had passed over the data before this row

and, where it applies,

    next_tokens, next_documents [B, T]   the token after each position (streams); an id other than the position's
                                         own, or 0, means that nothing is predicted there
    segments        [B, T] int32   0 = A, 1 = B, 2 = XLNet's CLS
    reversed        [B]    bool    the row is read backwards (XLNet): relative positions are negated
    relation        [B]    int32   0 = true next / right order, 1 = random / swapped (NSP, SOP)
    labels          [B]            int32, a class, or float32, a number: what a labelled example says of its row;
                                   [B, T] int32 the class of each piece, or -1; [B, 2] int32 the answer's two ends
    places          [B, T] int32   1 where an answer may start or end
    counts          [B, T] float32 how often the text has the token (`Masked.rarity`)

`Objective.prepare` adds `targets` and `target_weights`, [B, T] or, beside `target_positions` [B, K], [B, K] ([B] where
they are of rows);
permutation LM also `ranks` [B, T] int32: a position sees lower ranks, and its content stream its own rank too.
Examples of multiple choice have `tokens` and the like as [B, choices, T], of which `prepare` makes rows.
A short last batch is padded with rows whose `documents` are 0, so that shapes are static.
"""

TokenCounts = dict[str, "jax.Array"]
Variables = Mapping[str, Any]


@dataclass(frozen=True)
class Vocabulary:
    """The ids that readers and objectives need to know of a tokenizer; `size` counts the special ones."""

    size: int
    pad: int
    unknown: int
    begin: int
    end: int
    classification: int
    separator: int
    mask: int

    @property
    def special(self) -> tuple[int, ...]:
        """Ids that never stand for text: not masked, not counted as words (unknown text is text)."""
        return (self.pad, self.begin, self.end, self.classification, self.separator, self.mask)


class Memory(NamedTuple):
    """What a segment-recurrent model carries from one window to the next."""

    hidden: jax.Array
    """[B, L, M, D]: each layer's cached *input* (Transformer-XL, section 3.2); no gradient flows into it."""
    documents: jax.Array
    """[B, M] int32: the packing ids of the cached positions; 0 = empty, masked out."""


class ModelOutput(NamedTuple):
    """What a model returns; optional parts are None where the model or the call does not have them."""

    hidden: jax.Array
    """[B, T, D]: the last layer's output."""
    memory: Any = None
    """The memory after this window (`Memory` or a recurrent state)."""
    pooled: jax.Array | None = None
    """[B, D]: one vector per row for NSP, SOP and task heads."""
    query: jax.Array | None = None
    """[B, K, D]: XLNet's query stream at `target_positions`, the only places where it is computed."""
    layers: jax.Array | None = None
    """[B, L + 1, T, D]: the embedding and every layer's output, if `collect` names "layers"."""
    attention: jax.Array | None = None
    """[B, L, H, T, S]: attention probabilities, if `collect` names "attention"."""


class Penalties(NamedTuple):
    """What training adds to the negative log-likelihood of each target."""

    label_smoothing: float = 0.0
    """e: the cross-entropy is with 1 - e at the target and e / (V - 1) at each other token of V, as in the code of the
    Transformer (Vaswani et al. 2017, section 5.4); Szegedy et al. 2016 spread e over the target, too."""
    z_loss: float = 0.0
    """c: c log(Z)^2 is added, Z the softmax's denominator, whose log stays near 0 (Chowdhery et al. 2022, arXiv
    2204.02311, section 5)."""

    def evenly(self, vocabulary_size: int) -> float:
        """The part of the targets' mass that is spread evenly over all tokens, so that the others have theirs."""
        return self.label_smoothing * vocabulary_size / max(vocabulary_size - 1, 1)


NO_PENALTIES = Penalties()


class TokenScores(NamedTuple):
    """How well hidden vectors predict targets."""

    total: jax.Array
    """Scalar fp32: sum of weights * negative log-likelihood in nats, with the penalties if there are any. The only part
    that carries a gradient: with the weights known in the forward pass, the gradient can be computed there chunk by
    chunk and no logits are kept."""
    nll: jax.Array
    """[B, T] or [B, K] fp32: unweighted negative log-likelihood of each target, in nats; no gradient."""
    log_normalizer: jax.Array
    """Like nll: log of the softmax's denominator; no gradient."""
    best: jax.Array
    """Like nll, int32: the most probable id, for accuracy."""


class LossOutput(NamedTuple):
    """What an objective's loss returns: sums, never means, so that any split of the batch adds up to the same."""

    totals: dict[str, jax.Array]
    """Differentiable sum of each term; the step divides by `Objective.weights` of the whole batch."""
    metrics: dict[str, tuple[jax.Array, jax.Array]]
    """(sum, count) of what is reported: "nll" per predicted token, "accuracy", ..."""
    memory: Any = None
    fixed: Any = None
    """New values of `TrainState.fixed` (running averages), or None."""
    outputs: dict[str, jax.Array] | None = None
    """What is predicted of each row, [B, ...], where a metric is no sum over rows: the store's `measure` gets all."""


class TokenStore(Protocol):
    """Tokens on disk (`data/store.py`), seen as one stream. Document d is tokens[offsets[d]:offsets[d + 1]]: its begin
    token, its text, its end token (left out where begin and end are one id)."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def tokens(self) -> np.ndarray:
        """[N] uint16 or uint32, memory-mapped."""
        ...

    @property
    def flags(self) -> np.ndarray:
        """[N] uint8: bit 0 = a word begins here, bit 1 = a sentence begins here; 0 on special tokens."""
        ...

    @property
    def offsets(self) -> np.ndarray:
        """[documents + 1] int64."""
        ...

    @property
    def document_bytes(self) -> np.ndarray:
        """[documents] int64: UTF-8 bytes of each document's text, for bits per byte under any tokenizer."""
        ...

    def counts(self) -> np.ndarray:
        """[V] int64: how often each id occurs. Reads all tokens."""
        ...


@runtime_checkable
class Reader(Protocol):
    """The order in which a store is read. A frozen dataclass; its fields are its config."""

    @property
    def length(self) -> int:
        """T: positions in a row."""
        ...

    def passes(self, store: TokenStore, batch_size: int) -> int:
        """How many batches one pass over the store takes (the last one may be short)."""
        ...

    def batch(self, store: TokenStore, n: int, rows: Sequence[int], *, batch_size: int, seed: int | None) -> Batch:
        """Rows `rows` of batch n: a pure function, so that resuming is a seek and hosts read only what is theirs.

        `seed` orders endless training epochs; None reads one pass in order and pads what is missing (evaluation).
        Raises ValueError, naming how much is needed, if the store has too little text for one batch.
        """
        ...


class Model(Protocol):
    """A Flax Linen module with `setup`, used as a pure function: `model.apply(variables, batch, memory, key=key)`."""

    def __call__(
        self, batch: Batch, memory: Any = None, *, key: jax.Array | None = None, collect: tuple[str, ...] = ()
    ) -> ModelOutput:
        """key None = evaluation, no dropout. `collect` holds any of "layers", "attention"."""
        ...

    def score(
        self, hidden: jax.Array, targets: jax.Array, weights: jax.Array, penalties: Penalties = NO_PENALTIES
    ) -> TokenScores:
        """hidden [B, K, D], targets and weights [B, K]. Never holds the logits of the whole batch. Raises ValueError
        for penalties that its softmax does not take."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] fp32, without the padding of the vocabulary: for generation and analysis."""
        ...

    def classify(self, pooled: jax.Array) -> jax.Array:
        """[B, D] -> [B, classes] fp32; present by config (NSP, SOP, task heads)."""
        ...

    def classify_tokens(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., token_classes] fp32; present by config (tagging, start and end of an answer)."""
        ...

    def initialize(self, batch: Batch) -> None:
        """Touches every parameter: `model.init(key, batch, method="initialize")`."""
        ...

    def init_memory(self, batch_size: int) -> Any:
        """An empty memory, or None."""
        ...


@runtime_checkable
class Objective(Protocol):
    """What must be predicted. A frozen dataclass; its fields are its config, coefficients of its terms included."""

    @property
    def in_loader(self) -> bool:
        """Whether `prepare` runs in the loader's thread: choices that are sequential (whole words, spans)."""
        ...

    @property
    def copies(self) -> int | None:
        """Different corruptions of an example before they repeat; None = a fresh one at each visit."""
        ...

    def requirements(self, model: Any, reader: Reader) -> Iterator[str]:
        """One line for each thing in which the model's config or the reader does not serve this objective."""
        ...

    def prepare(self, batch: Batch, keys: jax.Array, vocabulary: Vocabulary) -> Batch:
        """Corruption: adds targets, weights and positions. `keys` [B] come from `objectives.row_keys`."""
        ...

    def weights(self, batch: Batch) -> TokenCounts:
        """{term: count} of a prepared batch; the same terms as `LossOutput.totals`."""
        ...

    def loss(self, model: Any, variables: Variables, batch: Batch, memory: Any, key: jax.Array | None) -> LossOutput:
        """Totals and metrics of a prepared batch."""
        ...
