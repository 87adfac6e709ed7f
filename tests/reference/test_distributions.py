"""Two-hot codes, KL, symlog and sampling equal float64 twins and hand-computed values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onegraph.nn.distributions import (
    binary_cross_entropy,
    bounded_normal,
    categorical_kl,
    kl_losses,
    normal_entropy,
    normal_log_prob,
    race,
    sample_one_hot,
    symexp,
    symexp_bins,
    symlog,
    two_hot_decode,
    two_hot_encode,
    two_hot_loss,
    unimix_probs,
)

BINS = symexp_bins()


@given(st.floats(-1e8, 1e8, allow_subnormal=False))
def test_symexp_inverts_symlog(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float64)
    torch.testing.assert_close(symexp(symlog(value)), value, rtol=1e-9, atol=1e-9)


def test_bins_are_sorted_symmetric_and_centred() -> None:
    assert BINS.shape == (255,)
    assert (BINS[1:] > BINS[:-1]).all()
    assert torch.equal(BINS, -BINS.flip(0))
    assert BINS[127] == 0
    assert BINS[-1].item() == pytest.approx(np.expm1(20), rel=1e-6)


@pytest.mark.parametrize("shape", [(), (16,), (16, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit", [0.0, 0.37, -5.0])
def test_uniform_decodes_to_exactly_zero(shape: tuple[int, ...], dtype: torch.dtype, logit: float) -> None:
    mean = two_hot_decode(torch.full((*shape, 255), logit, dtype=dtype), BINS)
    assert mean.dtype == torch.float32
    assert (mean == 0).all()


@pytest.mark.parametrize(
    ("target", "mass"),
    [
        (0.0, {127: 1.0}),
        (0.1, {127: 0.413688, 128: 0.586312}),
        (1.0, {131: 0.617329, 132: 0.382671}),
        (37.5, {150: 0.829828, 151: 0.170172}),
        (-1000.0, {83: 0.861551, 84: 0.138449}),
        (5e8, {254: 1.0}),
        (1e12, {254: 1.0}),
        (-1e12, {0: 1.0}),
        (math.inf, {254: 1.0}),
        (-math.inf, {0: 1.0}),
    ],
)
def test_two_hot_code(target: float, mass: dict[int, float]) -> None:
    code = two_hot_encode(torch.tensor(target), BINS)
    found = {i: code[i].item() for i in torch.nonzero(code).flatten().tolist()}
    assert found == pytest.approx(mass, abs=2e-4)
    assert two_hot_loss(torch.randn(255), torch.tensor(target), BINS).isfinite()


def test_nan_stays_visible() -> None:
    nan = torch.tensor(math.nan)
    assert two_hot_encode(nan, BINS).isnan().any()
    assert two_hot_loss(torch.zeros(255), nan, BINS).isnan()
    assert two_hot_decode(torch.full((255,), math.nan), BINS).isnan()


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40, unique=True), st.data())
def test_code_keeps_the_mean_inside_any_support(values: list[float], data: st.DataObject) -> None:
    bins = torch.tensor(sorted(set(np.float32(values).tolist())))
    if len(bins) < 2:
        return
    target = data.draw(st.floats(bins[0].item(), bins[-1].item()))
    code = two_hot_encode(torch.tensor(target), bins).double()
    assert code.sum().item() == pytest.approx(1, abs=1e-6)
    scale = bins.abs().max().item() + 1e-6
    assert (code * bins.double()).sum().item() == pytest.approx(np.float32(target), abs=1e-5 * scale)


@given(st.integers(2, 300), st.integers(0, 2**31))
def test_decode_equals_float64_on_any_support(num_bins: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bins = torch.sort(torch.randn(num_bins, generator=generator) * 100).values
    logits = torch.randn(5, num_bins, generator=generator)
    terms = torch.softmax(logits.double(), -1) * bins.double()
    error = (two_hot_decode(logits, bins).double() - terms.sum(-1)).abs()
    assert (error <= 1e-6 * terms.abs().max(-1).values * num_bins**0.5).all()


def test_loss_is_cross_entropy_of_the_code() -> None:
    logits, target = torch.randn(64, 255), torch.randn(64) * 1000
    want = -(two_hot_encode(target, BINS) * torch.log_softmax(logits, -1)).sum(-1)
    torch.testing.assert_close(two_hot_loss(logits, target, BINS), want)


def test_no_gradient_reaches_the_target() -> None:
    target = torch.zeros(3, requires_grad=True)
    logits = torch.zeros(3, 255, requires_grad=True)
    two_hot_loss(logits, target, BINS).sum().backward()
    assert target.grad is None
    assert logits.grad is not None


def slow_kl(post, prior, unimix):
    p = (1 - unimix) * np.exp(post) / np.exp(post).sum(-1, keepdims=True) + unimix / post.shape[-1]
    q = (1 - unimix) * np.exp(prior) / np.exp(prior).sum(-1, keepdims=True) + unimix / post.shape[-1]
    return (p * (np.log(p) - np.log(q))).sum((-2, -1))


def test_kl_equals_its_twin() -> None:
    post, prior = np.random.default_rng(0).normal(size=(2, 7, 5, 4)) * 2
    got = categorical_kl(torch.tensor(post), torch.tensor(prior), 0.01)
    np.testing.assert_allclose(got, slow_kl(post, prior, 0.01), rtol=1e-5)


def test_free_nats_clip_after_the_sum_and_stop_the_gradient() -> None:
    post = torch.tensor([[[0.1, 0.0]], [[9.0, 0.0]]], requires_grad=True)  # below and above the clip
    prior = torch.tensor([[[0.0, 0.0]], [[0.0, 9.0]]], requires_grad=True)
    dynamics, representation = kl_losses(post, prior, unimix=0.01, free_nats=1.0)
    assert dynamics[0] == representation[0] == 1.0
    assert dynamics[1] == representation[1] > 1.0
    (dynamics.sum() + 0.1 * representation.sum()).backward()
    assert post.grad is not None
    assert prior.grad is not None
    assert (post.grad[0] == 0).all()
    assert (prior.grad[0] == 0).all()
    assert (prior.grad[1] != 0).any()
    assert (post.grad[1] != 0).any()


def test_samples_follow_the_mixed_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, -20.0])
    torch.manual_seed(0)
    noise = torch.empty(200_000, 4).exponential_()
    one_hot = sample_one_hot(logits.expand(200_000, 4), noise, 0.1)
    torch.testing.assert_close(one_hot.mean(0), unimix_probs(logits, 0.1), atol=4e-3, rtol=0)


def test_straight_through_value_is_one_hot_and_gradient_that_of_the_probabilities() -> None:
    logits = torch.randn(6, 5, requires_grad=True)
    weight = torch.randn(6, 5)
    sample = sample_one_hot(logits, torch.ones(6, 5), 0.01)
    assert torch.equal(sample.detach().sum(-1), torch.ones(6))
    assert set(sample.detach().unique().tolist()) == {0.0, 1.0}
    (got,) = torch.autograd.grad((sample * weight).sum(), logits)
    (want,) = torch.autograd.grad((unimix_probs(logits, 0.01) * weight).sum(), logits)
    torch.testing.assert_close(got, want)


def test_noise_of_ones_gives_the_mode() -> None:
    probs = torch.tensor([[0.2, 0.5, 0.3]])
    assert race(probs, torch.ones_like(probs)).item() == 1


def test_bounded_normal_starts_wide_and_stays_inside() -> None:
    mean, std = bounded_normal(torch.zeros(1), torch.zeros(1))
    assert mean.item() == 0
    assert std.item() == pytest.approx(0.8927, abs=1e-4)
    mean, std = bounded_normal(torch.tensor([50.0]), torch.tensor([-50.0]))
    assert mean.item() == 1
    assert std.item() == pytest.approx(0.1)


def test_normal_log_prob_and_entropy() -> None:
    value, mean, std = torch.randn(4, 3), torch.randn(4, 3), torch.rand(4, 3) + 0.1
    normal = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(normal_log_prob(value, mean, std), normal.log_prob(value).sum(-1))
    torch.testing.assert_close(normal_entropy(std), normal.entropy().sum(-1))


def test_binary_cross_entropy_of_soft_targets() -> None:
    logit, y = torch.tensor([0.3, -2.0]), torch.tensor([1 - 1 / 333, 0.0])
    p = torch.sigmoid(logit)
    torch.testing.assert_close(binary_cross_entropy(logit, y), -(y * p.log() + (1 - y) * (1 - p).log()))
