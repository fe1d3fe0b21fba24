"""Stores, readers and objectives with vocabularies in which one id stands for several things."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ctx_jax.data.corpora import TextFiles
from ctx_jax.data.inspection import describe
from ctx_jax.data.pairs import Pairs, Sentences
from ctx_jax.data.preparation import prepare
from ctx_jax.data.readers import Blocks, Lanes
from ctx_jax.data.store import SENTENCE, WORD, open_store
from ctx_jax.data.tokenizers import load_tokenizer
from ctx_jax.interop.tokenizers import import_tokenizer
from ctx_jax.objectives import row_keys
from ctx_jax.objectives.causal import Causal
from ctx_jax.objectives.masked import Masked
from ctx_jax.objectives.permutation import Permutation
from tests.golden.published import FAMILIES, write_family

DOCUMENTS = [
    "The people of the United States. They've 1999, won!\nHello [MASK] <s> people. It is so. We know it.",
    " the <|endoftext|> government.\u2028It won. The people won it, too. And then it was so.\n\nIn the end.",
] * 6


@pytest.fixture(params=FAMILIES, scope="module")
def prepared(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    write_family(request.param, root / "theirs")
    tokenizer = import_tokenizer(root / "theirs", root / "tokenizer")
    texts = root / "texts"
    texts.mkdir()
    for number, document in enumerate(DOCUMENTS):
        (texts / f"{number:02}.txt").write_text(document)
    return tokenizer, prepare(TextFiles(texts, test=texts), tokenizer, "test", root / "data", workers=1)


def test_a_store(prepared):
    tokenizer, store = prepared
    vocabulary = tokenizer.vocabulary
    assert len(store.offsets) == len(DOCUMENTS) + 1
    for at, document in enumerate(DOCUMENTS):
        tokens = store.tokens[slice(*store.offsets[at : at + 2])].tolist()
        end = [vocabulary.end] * (vocabulary.begin != vocabulary.end)
        assert tokens[:1] == [vocabulary.begin]
        assert tokens[len(tokens) - len(end) :] == end
        inside = tokens[1 : len(tokens) - len(end)]
        assert not {*inside} & {*vocabulary.special}
        assert tokenizer.decode(tokens) == tokenizer.decode(inside)
        assert inside == tokenizer.encode(document).ids.tolist()
    special = np.isin(store.tokens, vocabulary.special)
    assert not store.flags[special].any()
    assert (store.flags & WORD > 0).sum() > 50
    assert (store.flags & SENTENCE > 0).sum() >= 4 * (len(store.offsets) - 1)
    assert open_store(store.folder).vocabulary == vocabulary
    unknown = describe(store, load_tokenizer(tokenizer.folder), samples=0, length=8, seed=0)["unknown"]
    known = vocabulary.unknown in vocabulary.special
    assert unknown == (0 if known else (store.tokens == vocabulary.unknown).sum())


READERS = [
    Blocks(length=32),
    Blocks(length=32, join_documents=True),
    Lanes(length=16),
    Pairs(length=32),
    Sentences(length=48),
]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: type(reader).__name__)
def test_readers_and_objectives(prepared, reader):
    tokenizer, store = prepared
    vocabulary = tokenizer.vocabulary
    batch = reader.batch(store, 0, range(2), batch_size=2, seed=0)
    real = batch["documents"] > 0
    special = np.isin(batch["tokens"], vocabulary.special)
    assert np.array_equal(batch["words"] > 0, real & ~special)
    assert np.all(batch["tokens"][~real] == vocabulary.pad)
    if isinstance(reader, Pairs | Sentences):
        assert np.all(batch["tokens"][:, 0] == vocabulary.classification)
        assert np.all((batch["tokens"] == vocabulary.separator).sum(1) >= 1)
        if vocabulary.begin not in (vocabulary.end, vocabulary.classification):
            assert not np.any(batch["tokens"] == vocabulary.begin)
    keys = row_keys(0, batch["epoch"], batch["example"])
    if "next_tokens" in batch:
        weights = Causal().prepare(batch, keys, vocabulary)["target_weights"]
        assert np.asarray(weights).sum() > 0
    masked = Masked(max_predictions=8)
    if vocabulary.mask == vocabulary.end:
        with pytest.raises(ValueError, match=r"objective\.mask 0\.8 needs a tokenizer that has a mask"):
            masked.prepare(batch, keys, vocabulary)
        return
    corrupted = jax.tree.map(np.asarray, masked.prepare(batch, keys, vocabulary))
    targets = corrupted["targets"][corrupted["target_weights"] > 0]
    assert len(targets) > 0
    assert not np.isin(targets, vocabulary.special).any()
    changed = corrupted["tokens"] != batch["tokens"]
    assert not changed[special | ~real].any()
    if isinstance(reader, Lanes):
        permuted = Permutation(num_predict=4, perm_size=8).prepare(batch, keys, vocabulary)
        targets = np.asarray(permuted["targets"])[np.asarray(permuted["target_weights"]) > 0]
        assert not np.isin(targets, vocabulary.special).any()
