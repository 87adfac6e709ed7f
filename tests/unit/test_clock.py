from __future__ import annotations

from fractions import Fraction

import pytest

from onegraph.train.clock import Every, EverySeconds, Rate, Ratio, Timer


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowRatio:
    """The recurrence of the contract, 11.4, with exact arithmetic."""

    def __init__(self, ratio: Fraction) -> None:
        self.ratio, self.prev = ratio, None

    def __call__(self, step: int) -> int:
        if self.ratio == 0:
            return 0
        if self.prev is None:
            self.prev = Fraction(step)
            return 1
        n = int((step - self.prev) * self.ratio)
        self.prev += n / self.ratio
        return n


@pytest.mark.parametrize(
    "ratio", [Fraction(0), Fraction(1), Fraction(1, 4), Fraction(1, 32), Fraction(3, 7), Fraction(5, 2)]
)
@pytest.mark.parametrize("stride", [1, 3, 16])
def test_ratio_equals_the_recurrence(ratio, stride):
    ours, slow = Ratio(ratio), SlowRatio(ratio)
    for step in range(1000, 3000, stride):
        assert ours(step) == slow(step)


@pytest.mark.parametrize(("ratio", "after"), [(0.1, 10), (1 / 3, 3), (512 / 1024, 2), (0.7, 10)])
def test_ratio_does_not_drift(ratio, after):
    exact = Fraction(ratio).limit_denominator(1000)
    owed = Ratio(ratio)
    assert owed(0) == 1
    assert sum(owed(step) for step in range(1, after + 1)) == after * exact
    later = range(after, 300_001, 3)
    assert sum(owed(step) for step in later) == int(later[-1] * exact) - after * exact
    assert owed(10_000_000) == int(10_000_000 * exact) - int(later[-1] * exact)


def test_ratio_owes_nothing_for_skipped_steps():
    owed = Ratio(1.0)
    for step in range(1, 1025):
        owed.skip(step)
    assert [owed(step) for step in (1025, 1026, 1027)] == [1, 1, 1]
    owed.skip(5000)
    assert [owed(step) for step in (9000, 9001)] == [1, 1]


def test_ratio_resumes_without_a_burst():
    whole, first = Ratio(0.3), Ratio(0.3)
    expected = [whole(step) for step in range(4000)]
    got = [first(step) for step in range(2001)]
    second = Ratio(0.3)
    second.load_state_dict(first.state_dict(), step=2000)
    assert got + [second(step) for step in range(2001, 4000)] == expected

    empty_buffer = Ratio(1.0)
    empty_buffer.load_state_dict(_after(Ratio(1.0), 2000))
    for step in range(2001, 3025):
        empty_buffer.skip(step)
    assert [empty_buffer(step) for step in range(3025, 3030)] == [1] * 5

    moved = Ratio(1.0)
    moved.load_state_dict(_after(Ratio(1.0), 2000), step=50_000)
    assert [moved(step) for step in range(50_001, 50_005)] == [1] * 4

    changed = Ratio(0.5)
    changed.load_state_dict(_after(Ratio(1.0), 2000))
    assert [changed(step) for step in range(2001, 2005)] == [0, 1, 0, 1]

    fresh = Ratio(1.0)
    fresh.load_state_dict(Ratio(1.0).state_dict(), step=700)
    assert fresh(700) == 1


def _after(ratio: Ratio, steps: int) -> dict:
    for step in range(steps + 1):
        ratio(step)
    return ratio.state_dict()


def test_ratio_errors():
    for bad in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be finite and at least 0"):
            Ratio(bad)
    owed = Ratio(1.0)
    owed(10)
    with pytest.raises(ValueError, match="step 5 after step 10; it must not decrease"):
        owed(5)


def test_every():
    due = Every(100)
    assert [due(s) for s in (0, 50, 99, 100, 101, 350, 399, 400)] == [
        True,
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    due = Every(100, initial=False)
    assert [due(s) for s in (150, 199, 200)] == [False, False, True]
    again = Every(100)
    again.load_state_dict(due.state_dict())
    assert [again(s) for s in (250, 300)] == [False, True]
    never = Every(0)
    never.load_state_dict(due.state_dict())
    assert not any(never(s) for s in range(10))
    with pytest.raises(ValueError, match="a period of -1 steps"):
        Every(-1)


def test_every_seconds():
    clock = FakeTime()
    due = EverySeconds(10, clock=clock)
    assert not due()
    clock.now += 9.9
    assert not due()
    clock.now += 25
    assert due()
    assert not due()
    assert EverySeconds(10, initial=True, clock=clock)()
    assert not EverySeconds(0, initial=True, clock=clock)()
    with pytest.raises(ValueError, match=r"a period of nan s"):
        EverySeconds(float("nan"))


def test_timer_gives_each_second_to_one_section():
    clock = FakeTime()
    timer = Timer(clock=clock)
    with timer.section("train"):
        clock.now += 3
        with timer.section("sample"):
            clock.now += 1
        clock.now += 2
    clock.now += 4
    with pytest.raises(RuntimeError), timer.section("train"):
        raise RuntimeError
    assert timer.seconds() == {"train": 5.0, "sample": 1.0}
    assert timer.fractions() == {"train": 0.5, "sample": 0.1}
    clock.now += 1
    assert timer.fractions() == {"train": 0.0, "sample": 0.0}
    assert timer.fractions() == {"train": 0.0, "sample": 0.0}


def test_rate():
    clock = FakeTime()
    rate = Rate(clock=clock)
    rate.add(6)
    rate.add()
    clock.now += 2
    assert rate.read() == 3.5
    assert rate.read() == 0.0
    clock.now += 2
    assert rate.read() == 0.0
