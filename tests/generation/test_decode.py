from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ctx_jax.contract import Vocabulary
from ctx_jax.generation.beams import Beams
from ctx_jax.generation.decode import generate
from ctx_jax.generation.sampling import Sampling, draw, keep_top_k, keep_top_p, penalized
from ctx_jax.generation.windows import bucket

VOCABULARY = Vocabulary(size=24, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6)
SPECIAL = {0, 2, 4, 5, 6}
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Config:
    max_length: int | None = None
    dtype: str = "float32"


class Cache(NamedTuple):
    state: jax.Array
    used: jax.Array

    def rows(self, rows: jax.Array) -> Cache:
        return Cache(self.state[rows], self.used[rows])


@dataclass(frozen=True)
class Recurrent:
    """h' = tanh(W h + E[token] + p[position]): its logits depend on all tokens before, their order and number."""

    config: Config = Config()
    traces: list = field(default_factory=list, compare=False)

    def apply(self, variables: Any, *arguments: Any, method: str) -> Any:
        return getattr(self, method)(variables, *arguments)

    def start(self, variables: Any, batch: Any, length: int) -> Cache:
        self.traces.append((*batch["tokens"].shape, length))

        def step(state: jax.Array, column: Any) -> tuple[jax.Array, None]:
            token, document, position = column
            new = self.cell(variables, state, token, position)
            return jnp.where(document[:, None] != 0, new, state), None

        columns = [batch[name].T for name in ("tokens", "documents", "positions")]
        state = jnp.zeros((batch["tokens"].shape[0], 8))
        return Cache(jax.lax.scan(step, state, columns)[0], (batch["documents"] != 0).sum(1))

    def decode(self, variables: Any, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        state = self.cell(variables, cache.state, tokens[:, 0], cache.used)
        return 3 * state @ variables["embedding"].T, Cache(state, cache.used + 1)

    def cell(self, variables: Any, state: jax.Array, token: jax.Array, position: jax.Array) -> jax.Array:
        embedding = variables["embedding"][token] + variables["position"][position % 50]
        return jnp.tanh(state @ variables["recurrent"] + embedding)


def variables_of(width: int = 24) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embedding": (width, 8), "position": (50, 8), "recurrent": (8, 8)}
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def run(prompts: list[list[int]], model: Any = None, **options: Any) -> list[list[int]]:
    options = {"length": 12, "sampling": Sampling(), "seed": 0, **options}
    return generate(model or Recurrent(), options.pop("variables", variables_of()), VOCABULARY, prompts, **options)


def often_ending() -> dict[str, jax.Array]:
    """Variables by which the end is as probable as a token that often follows."""
    variables = variables_of()
    embedding = 0.3 * variables["embedding"]
    return {**variables, "embedding": embedding.at[3].set(1.02 * embedding[10])}


def naive_logits(text: list[int], variables: dict[str, jax.Array] | None = None) -> np.ndarray:
    """Of what follows, in numpy: without a cache, padding or a loop on the device."""
    variables, state = (
        {name: np.asarray(x, np.float64) for name, x in (variables or variables_of()).items()},
        np.zeros(8),
    )
    for position, token in enumerate(text):
        state = np.tanh(
            state @ variables["recurrent"] + variables["embedding"][token] + variables["position"][position]
        )
    logits = 3 * variables["embedding"] @ state
    logits[list(SPECIAL)] = -np.inf
    return logits


def naive(prompt: list[int], length: int, penalty: float = 1.0) -> list[int]:
    """Greedy continuation."""
    text = list(prompt)
    while len(text) < len(prompt) + length:
        logits = naive_logits(text)
        for token in set(text) - SPECIAL - {VOCABULARY.end}:
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        if logits.argmax() == VOCABULARY.end:
            break
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


def naive_beams(prompt: list[int], length: int, search: Beams) -> list[int]:
    """Beam search with lists: of the K best continuations those that end are kept, the K best that do not go on."""

    def score(total: float, count: int) -> float:
        return total / ((5 + count) / 6) ** search.length_penalty

    going, ended = [(0.0, list(prompt))], []
    for count in range(1, length + 1):
        found = []
        for total, text in going:
            logits = naive_logits(text, often_ending())
            logits -= np.log(np.exp(logits).sum())
            found += [(total + value, [*text, token]) for token, value in enumerate(logits) if value > -np.inf]
        found.sort(reverse=True)
        best = [pair for pair in found[: search.beams] if pair[1][-1] == VOCABULARY.end]
        ended += [(score(total, count), text[:-1]) for total, text in best]
        going = [pair for pair in found if pair[1][-1] != VOCABULARY.end][: search.beams]
    ended += [(score(total, length), text) for total, text in going]
    return max(ended)[1][len(prompt) :]


def test_greedy_is_the_naive_loop_for_prompts_of_every_length():
    prompts = [[2], [2, 9], [2, 10, 11, 12, 8, 7, 9], [2, *range(7, 24)]]
    assert run(prompts, sampling=GREEDY) == [naive(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=6, top_p=0.9, repetition_penalty=1.5)])
def test_a_rows_text_does_not_depend_on_its_batch_mates(sampling: Sampling):
    prompts = [[2, 9, 8], [2], [2, *range(7, 21)], [2, 20, 20, 20, 20]]
    together = run(prompts, sampling=sampling)
    assert together == [run([prompt], sampling=sampling)[0] for prompt in prompts]
    assert together == run(prompts[::-1], sampling=sampling)[::-1]


def test_the_seed_gives_the_text_and_equal_prompts_give_different_ones():
    prompts = [[2, 9]] * 3
    first = run(prompts)
    assert first == run(prompts)
    assert first != run(prompts, seed=1) != run(prompts, seed=2**32 - 1)
    assert len({tuple(row) for row in first}) == 3
    assert first[:1] == run(prompts[:1])


def test_special_tokens_and_ids_that_the_tokenizer_lacks_are_never_drawn():
    wide = variables_of(32)  # a model with 32 rows, a tokenizer with 24
    rows = run([[2, token] for token in range(7, 24)], variables=wide, sampling=Sampling(temperature=50.0), length=32)
    drawn = {token for row in rows for token in row}
    assert drawn == {1, *range(7, 24)}


def test_the_end_token_stops_its_row_only_and_is_left_out():
    rows = run([[2, token] for token in range(7, 24)], sampling=Sampling(temperature=50.0), length=16)
    lengths = [len(row) for row in rows]
    assert min(lengths) < 16 and max(lengths) == 16
    assert all(VOCABULARY.end not in row for row in rows)
    shorter = run([[2, token] for token in range(7, 24)], sampling=Sampling(temperature=50.0), length=5)
    assert shorter == [row[:5] for row in rows]


def test_whoever_watches_sees_the_text_grow_and_may_end_it():
    prompts, seen = [[2, 9], [2, 10, 11], [2]], []

    def watch(texts: list[list[int]]) -> list[bool]:
        seen.append(texts)
        return [len(text) > 4 and row == 1 for row, text in enumerate(texts)]

    texts = run(prompts, watch=watch, every=3)
    whole = run(prompts)
    assert texts == [whole[0], whole[1][:6], whole[2]]
    assert seen == [[text[:n] for text in whole] for n in (3, 6)] + [
        [whole[0][:n], whole[1][:6], whole[2][:n]] for n in (9, 12)
    ]
    assert run(prompts, watch=lambda texts: [True] * 3) == [text[:1] for text in whole]


def test_one_compilation_per_bucket():
    model = Recurrent(Config(max_length=999))  # not equal to another test's, so not compiled yet
    for prompts, length in (([[2, 9]] * 3, 10), ([[2]] * 4, 16), ([[2, *range(7, 20)], [2], [9]], 3)):
        run(prompts, model=model, length=length)
    assert model.traces == [(4, 16, 32)]
    run([[2] * 18] * 3, model=model)
    assert model.traces[1:] == [(4, 32, 48)]


@pytest.mark.parametrize(("n", "size"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_bucket_is_the_next_power_of_two(n: int, size: int):
    assert bucket(n, 1) == size
    assert bucket(n, 16) == max(16, size)


def test_top_k_keeps_exactly_k():
    logits = jnp.array([[1.0, 4.0, 4.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    infinite = -np.inf
    np.testing.assert_array_equal(
        keep_top_k(logits, 2), [[infinite, 4.0, 4.0, infinite], [0.0, 0.0, infinite, infinite]]
    )
    np.testing.assert_array_equal(keep_top_k(logits, 9), logits)


def test_top_p_keeps_the_smallest_set_that_holds_p():
    logits = jnp.log(jnp.array([[0.2, 0.5, 0.05, 0.25]]))
    for p, kept in ((0.4, [1]), (0.6, [1, 3]), (0.8, [0, 1, 3]), (1.0, [0, 1, 2, 3])):
        np.testing.assert_array_equal(np.flatnonzero(np.isfinite(keep_top_p(logits, p)[0])), kept)
    tied = keep_top_p(jnp.zeros((1, 4)), 0.5)
    assert np.isfinite(tied).sum() == 2


def test_the_penalty_makes_seen_tokens_less_probable():
    logits = jnp.array([[2.0, -2.0, 3.0, 0.0]])
    np.testing.assert_allclose(penalized(logits, jnp.array([[True, True, False, True]]), 4.0), [[0.5, -8.0, 3.0, 0.0]])


def test_prompt_and_text_are_penalized_and_the_end_is_not():
    prompts = [[2, 3, 9], [2, 10, 11, 12, 8, 7, 9], [2, *range(7, 24)], [2]]
    penalty = Sampling(temperature=0.0, repetition_penalty=8.0)
    texts = run(prompts, sampling=penalty)
    assert texts == [naive(prompt, 12, 8.0) for prompt in prompts]
    assert texts != run(prompts, sampling=GREEDY)
    assert all(len(set(text)) == len(text) for text in texts)


@pytest.mark.parametrize("search", [Beams(3, 0.0), Beams(4, 1.0)])
def test_beam_search_is_the_naive_one(search: Beams):
    prompts, variables = [[2, 9, 8], [2], [2, *range(7, 21)], [2, 23], [2, 22]], often_ending()
    texts = run(prompts, variables=variables, search=search, length=7)
    assert texts == [naive_beams(prompt, 7, search) for prompt in prompts]
    assert 0 < min(map(len, texts)) < max(map(len, texts))


def test_hypotheses_are_penalized_by_what_they_have():
    """Each by its own tokens: no text repeats one while another token is to be had."""
    texts = run([[2, 9], [2, 10]], search=Beams(4), sampling=Sampling(repetition_penalty=1e6))
    assert all(len(set(text)) == len(text) for text in texts)


def test_draws_follow_the_tempered_distribution():
    logits = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4]))
    keys = jax.random.split(jax.random.key(0), 20_000)
    rows = jnp.broadcast_to(logits, (20_000, 4))
    frequencies = np.bincount(draw(rows, keys, Sampling(temperature=0.5)), minlength=4) / 20_000
    np.testing.assert_allclose(frequencies, np.array([1, 4, 9, 16]) / 30, atol=0.015)
    frequencies = np.bincount(draw(rows, keys, Sampling(top_k=2)), minlength=4) / 20_000
    np.testing.assert_allclose(frequencies, np.array([0, 0, 3, 4]) / 7, atol=0.015)


def test_a_text_fills_the_models_positions_and_not_more():
    model = Recurrent(Config(max_length=21))
    prompt = [2, 9, 8, 7, 11, 12]
    assert len(run([prompt], model=model, length=16, sampling=GREEDY)[0]) == 16
    with pytest.raises(ValueError, match="6 tokens and 17 more pass the model's 21 positions: generate at most 16"):
        run([prompt], model=model, length=17)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": object()}, "object cannot generate: it has no `decode`"),
        ({"length": 0}, "length 0: generate at least 1 token"),
        ({"seed": 2**32}, "seed 4294967296: choose a number from 0 to 4294967295"),
        ({"prompts": [[2], []]}, "prompt 1 is empty: give at least the begin token, 2"),
        ({"search": Beams(2), "window": 4}, "leave out window and watch, or choose 1 beam"),
        ({"search": Beams(2), "sampling": Sampling(0.5)}, "temperature 0.5: beam search draws nothing"),
        ({"search": Beams(2), "sampling": Sampling(top_k=5)}, "top_k 5: beam search draws nothing"),
        ({"prompts": [[2, 24]]}, "prompt 0 has a token outside the vocabulary of 24"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        run(options.pop("prompts", [[2]]), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"repetition_penalty": 0.5},
        {"beams": 0},
        {"length_penalty": -1.0},
    ],
)
def test_bad_choices_are_named(options: dict[str, Any]):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name} .*: choose"):
        (Beams if name in ("beams", "length_penalty") else Sampling)(**options)


def test_nothing_to_continue_gives_nothing():
    assert run([]) == []
