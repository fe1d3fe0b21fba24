"""Texts that grow: where they stop, and what is shown of them."""

from __future__ import annotations

import pytest

from ctx_jax.data.symbols import Bytes
from ctx_jax.generation.text import Texts, certain

STOP = ("\n\n", "é!", "END")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return Bytes().train([], tmp_path_factory.mktemp("bytes") / "tokenizer")


def test_a_text_is_cut_before_the_stop_string_that_comes_first(tokenizer):
    """Over the borders of tokens, in what is generated, and never in the prompt."""
    prompts = ["END of", "a", "b", "é"]
    more = [" the END, and é! more", "\n", "x\n\nEND", "!"]
    ids = [tokenizer.encode(text).ids.tolist() for text in prompts]
    tokens = [tokenizer.encode(text).ids.tolist() for text in more]
    texts = Texts(tokenizer, ids, STOP)
    assert texts.watch(tokens) == [True, False, True, False]
    assert texts.finish(tokens) == ["END of the ", "a\n", "bx", "é!"]
    assert Texts(tokenizer, ids).finish(tokens) == ["END of the END, and é! more", "a\n", "bx\n\nEND", "é!"]


def test_what_is_shown_is_the_result_in_whole_characters(tokenizer):
    prompts, more = ["é: ", "", "日"], ["日本語 é", "x\nEN\nE", "aé!b"]
    ids, shown = [tokenizer.encode(text).ids.tolist() for text in prompts], []
    tokens = [tokenizer.encode(text).ids.tolist() for text in more]
    texts = Texts(tokenizer, ids, STOP, shown.append)
    for n in range(1, max(map(len, tokens)) + 1):
        texts.watch([row[:n] for row in tokens])
    assert texts.finish(tokens) == ["é: 日本語 é", "x\nEN\nE", "日a"]
    assert "".join(shown) == "é: 日本語 é\nx\nEN\nE\n日a\n"
    assert [piece for piece in shown if piece][:5] == ["é: ", "日", "本", "語", " "]


@pytest.mark.parametrize(
    ("text", "sure"),
    [("a\n", "a"), ("a\n\n b", "a\n\n b"), ("TEN", "T"), ("ENTE", "ENT"), ("a\ufffd\ufffd", "a"), ("é", ""), ("", "")],
)
def test_the_beginning_of_a_stop_string_is_not_certain(text: str, sure: str):
    assert certain(text, STOP) == sure
