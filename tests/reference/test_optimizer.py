"""The optimizer equals a slow numpy twin, and hand-computed first steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from onegraph.optim import DreamerV3Optimizer, HardUpdate, SoftUpdate


def twin(params, grads, *, lr, warmup, decay=0, agc=0.3, beta1=0.9, beta2=0.999, eps=1e-20):
    """All updates of each tensor in float64; grads is a list (one entry an update) of lists."""
    mu = [np.zeros_like(p) for p in params]
    nu = [np.zeros_like(p) for p in params]
    for n, update in enumerate(grads, 1):
        for i, g in enumerate(update):
            p = params[i]
            g = g / max(1, np.linalg.norm(g) / (agc * max(1e-3, np.linalg.norm(p))))
            nu[i] = beta2 * nu[i] + (1 - beta2) * g**2
            g = g / (np.sqrt(nu[i] / (1 - beta2**n)) + eps)
            mu[i] = beta1 * mu[i] + (1 - beta1) * g
            rate = lr * (min(1, (n - 1) / warmup) if warmup else 1)
            rate *= 1 - 0.9 * min(1, (n - 1) / decay) if decay else 1
            params[i] = p - rate * mu[i] / (1 - beta1**n)
    return params


def run(params, grads, **kwargs):
    tensors = [nn.Parameter(torch.tensor(p, dtype=torch.float32)) for p in params]
    optimizer = DreamerV3Optimizer(tensors, **kwargs)
    for update in grads:
        for tensor, g in zip(tensors, update):
            tensor.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step()
    return tensors, optimizer


@pytest.mark.parametrize(("warmup", "decay"), [(0, 0), (5, 0), (5, 12)])
def test_equals_the_twin(warmup: int, decay: int) -> None:
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (5,), (2, 3, 2)]
    params = [rng.normal(size=s) for s in shapes]
    grads = [[rng.normal(size=s) * 10 ** rng.uniform(-3, 2) for s in shapes] for _ in range(20)]
    got, _ = run(params, grads, lr=1e-2, warmup_steps=warmup, decay_steps=decay)
    want = twin([p.copy() for p in params], grads, lr=1e-2, warmup=warmup, decay=decay)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g.detach().numpy(), w, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("start", [[3.0, 4.0], [0.0, 0.0]])
def test_first_step_is_normalised_to_one(start: list[float]) -> None:
    got, _ = run([np.array(start)], [[np.array([30.0, 40.0])]], lr=1e-3, warmup_steps=0)
    np.testing.assert_allclose((torch.tensor(start) - got[0].detach()) / 1e-3, [1, 1], rtol=1e-3)


@pytest.mark.parametrize(("start", "clipped"), [([3.0, 4.0], [0.9, 1.2]), ([0.0, 0.0], [1.8e-4, 2.4e-4])])
def test_clip_uses_the_whole_tensor_and_a_floor(start: list[float], clipped: list[float]) -> None:
    _, optimizer = run([np.array(start)], [[np.array([30.0, 40.0])]], lr=1e-3, warmup_steps=0)
    nu = next(iter(optimizer.state.values()))["nu"]
    np.testing.assert_allclose((nu / 0.001).sqrt(), clipped, rtol=1e-5)


def test_first_update_of_a_warm_up_moves_nothing() -> None:
    got, _ = run([np.ones(3)], [[np.ones(3)]], lr=1.0, warmup_steps=1000)
    assert torch.equal(got[0], torch.ones(3))


def test_zero_gradient_gives_zero_update() -> None:
    got, _ = run([np.ones(3)], [[np.zeros(3)]], lr=1.0, warmup_steps=0)
    assert torch.equal(got[0], torch.ones(3))


def test_state_dict_continues_bitwise() -> None:
    rng = np.random.default_rng(2)
    params, grads = [rng.normal(size=4)], [[rng.normal(size=4)] for _ in range(6)]
    whole, _ = run(params, grads, lr=1e-2, warmup_steps=4)
    half, optimizer = run(params, grads[:3], lr=1e-2, warmup_steps=4)
    again = [nn.Parameter(half[0].detach().clone())]
    other = DreamerV3Optimizer(again, lr=1e-2, warmup_steps=4)
    other.load_state_dict(optimizer.state_dict())
    for update in grads[3:]:
        again[0].grad = torch.tensor(update[0], dtype=torch.float32)
        other.step()
    assert torch.equal(again[0], whole[0])


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"agc": 0.0}, "agc is 0.0"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
    ],
)
def test_refuses_bad_coefficients(kwargs: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DreamerV3Optimizer([nn.Parameter(torch.zeros(1))], **kwargs)  # pyright: ignore[reportArgumentType]


class Pair:
    def __init__(self) -> None:
        self.online, self.slow = torch.ones(3), torch.zeros(3)

    def target_pairs(self):
        yield self.online, self.slow


def test_soft_update() -> None:
    pair = Pair()
    updater = SoftUpdate(pair, tau=0.02)
    updater.step()
    updater.step()
    torch.testing.assert_close(pair.slow, torch.full((3,), 1 - 0.98**2))


def test_hard_update() -> None:
    pair = Pair()
    updater = HardUpdate(pair, interval=3)
    for n in range(1, 4):
        updater.step()
        assert bool((pair.slow == 1).all()) == (n == 3)


def test_updaters_refuse_a_module_without_targets() -> None:
    with pytest.raises(ValueError, match="no target networks"):
        SoftUpdate(nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="tau is 0"):
        SoftUpdate(Pair(), tau=0)
