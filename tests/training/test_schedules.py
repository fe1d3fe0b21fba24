from __future__ import annotations

import math

import pytest

from ctx_jax.training.optimizers import BertAdam
from ctx_jax.training.schedules import InverseSquareRoot, WarmUp


def values(schedule, *steps):
    return [float(schedule(step)) for step in steps]


def test_linear_decay_by_hand():
    schedule = WarmUp(rate=0.4, warmup=4, decay="linear").build(12)
    assert values(schedule, 0, 1, 4, 5, 8, 12, 20) == pytest.approx([0, 0.1, 0.4, 0.35, 0.2, 0, 0])


def test_linear_decay_to_a_fraction_over_steps_of_its_own():
    schedule = WarmUp(rate=0.4, decay="linear", final=0.5, steps=10).build(1000)
    assert values(schedule, 0, 5, 10, 500) == pytest.approx([0.4, 0.3, 0.2, 0.2])


def test_cosine_decay_by_hand():
    schedule = WarmUp(rate=2.0, warmup=2, decay="cosine", final=0.1).build(10)
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert values(schedule, 1, 2, 4, 6, 10) == pytest.approx([1.0, 2.0, 2 * quarter, 2 * 0.55, 0.2], rel=1e-6)


def test_decay_from_the_start_as_in_berts_code():
    """polynomial_decay over all the steps, replaced while step < warmup; so the highest rate is never used."""
    schedule = WarmUp(rate=0.4, warmup=4, decay="linear", from_start=True).build(16)
    assert values(schedule, 0, 3, 4, 8, 16, 20) == pytest.approx([0, 0.3, 0.3, 0.2, 0, 0])
    schedule = WarmUp(rate=2.0, warmup=2, decay="cosine", from_start=True).build(12)
    assert values(schedule, 1, 2, 6, 12) == pytest.approx([1.0, 1 + math.cos(math.pi / 6), 1.0, 0], abs=1e-6)
    bert = BertAdam().schedule.build(1_000_000)
    assert values(bert, 5_000, 10_000, 500_000) == pytest.approx([5e-5, 0.99e-4, 5e-5])


def test_constant_after_warm_up():
    assert values(WarmUp(rate=3.0, warmup=2, decay="constant").build(5), 0, 1, 2, 99) == [0, 1.5, 3, 3]


def test_the_transformers_rate_at_the_end_of_its_warm_up():
    width, warmup = 512, 4000
    schedule = WarmUp(rate=(width * warmup) ** -0.5, warmup=warmup, decay="inverse_square_root").build(100_000)
    expected = [width**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in (1, 1000, 4000, 4001, 64_000)]
    assert values(schedule, 1, 1000, 4000, 4001, 64_000) == pytest.approx(expected, rel=1e-6)
    assert float(schedule(4000)) == pytest.approx(6.98771e-4, rel=1e-6)


def test_inverse_square_root_without_warm_up_is_finite():
    schedule = WarmUp(rate=1.0, decay="inverse_square_root").build(10)
    assert values(schedule, 0, 1, 4) == pytest.approx([1, 1, 0.5])


def test_t5_holds_its_rate_for_ten_thousand_steps():
    assert values(InverseSquareRoot().build(5), 0, 10_000, 40_000) == pytest.approx([0.01, 0.01, 0.005])


def test_a_run_shorter_than_its_warm_up_warms_up():
    assert values(WarmUp(rate=1.0, warmup=10).build(5), 0, 5) == pytest.approx([0, 0.5])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmUp(rate=0.0), "rate 0.0"),
        (lambda: WarmUp(rate=math.nan), "rate nan"),
        (lambda: WarmUp(warmup=-1), "warmup -1"),
        (lambda: WarmUp(final=2.0), "final 2.0"),
        (lambda: InverseSquareRoot(hold=0), "hold 0"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
