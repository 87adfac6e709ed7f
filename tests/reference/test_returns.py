"""Lambda-returns, return normaliser and imagination weights equal slow loops and hand-computed values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onegraph.dreamer.behavior import ReturnNormaliser, lambda_return

DISCOUNT = 1 - 1 / 333


def slow_lambda_return(last, term, rew, boot, disc, lam):
    n = len(rew) - 1
    out = [0.0] * n
    value = boot[n]
    for t in reversed(range(n)):
        live = (1 - term[t + 1]) * disc
        cont = (1 - last[t + 1]) * lam
        value = rew[t + 1] + (1 - cont) * live * boot[t + 1] + live * cont * value
        out[t] = value
    return out


def test_equals_a_slow_loop() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 15):
        last = rng.integers(0, 2, (3, n + 1)).astype(float)
        term = last * rng.integers(0, 2, (3, n + 1))
        rew, boot = rng.normal(size=(2, 3, n + 1))
        got = lambda_return(*(torch.tensor(x) for x in (last, term, rew, boot)), DISCOUNT, 0.95)
        want = [slow_lambda_return(*rows, DISCOUNT, 0.95) for rows in zip(last, term, rew, boot)]
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)


@pytest.mark.parametrize(
    ("terminal", "want"), [(0.0, [12.758822, 11.888674, 10.969970]), (1.0, [3.814885, 2.445646, 1.0])]
)
def test_a_time_limit_is_not_a_death(terminal: float, want: list[float]) -> None:
    last = torch.tensor([0.0, 0.0, 0.0, 1.0])
    got = lambda_return(last, last * terminal, torch.tensor([0.0, 1, 1, 1]), torch.full((4,), 10.0), DISCOUNT, 0.95)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)


def test_refuses_other_shapes_and_single_steps() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match="at least 2 steps"):
        lambda_return(one, one, one, one, 1.0, 0.95)
    with pytest.raises(ValueError, match="must share one"):
        lambda_return(two, two, torch.zeros(3), two, 1.0, 0.95)


def test_normaliser_moves_by_its_rate_and_has_a_floor() -> None:
    norm = ReturnNormaliser(rate=0.01)
    returns = torch.arange(101.0)
    norm.update(returns)
    assert norm.lo.item() == pytest.approx(0.05)
    assert norm.hi.item() == pytest.approx(0.95)
    assert norm.scale().item() == 1.0
    for _ in range(2000):
        norm.update(returns)
    assert norm.lo.item() == pytest.approx(5, rel=1e-3)
    assert norm.scale().item() == pytest.approx(90, rel=1e-3)


def test_percentiles_interpolate_as_numpy_does() -> None:
    values = np.random.default_rng(1).normal(size=977).astype(np.float32)
    norm = ReturnNormaliser(rate=1.0)
    norm.update(torch.from_numpy(values))
    assert norm.lo.item() == pytest.approx(np.percentile(values, 5), rel=1e-5)
    assert norm.hi.item() == pytest.approx(np.percentile(values, 95), rel=1e-5)
