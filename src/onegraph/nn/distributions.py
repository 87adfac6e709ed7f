"""Distributions and scalar codes of DreamerV3: symlog, two-hot, mixed categoricals, bounded normal, KL with free nats.

All functions compute in float32 whatever dtype comes in. Random draws are arguments: a categorical sample is the winner
of an exponential race, `argmax(p / e)` with `e ~ Exp(1)`, so that eager, compiled and captured runs that are given the
same noise draw the same classes, and noise of ones gives the mode.

Compile: nothing here mutates state, draws random numbers or synchronises.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def symlog(x: Tensor) -> Tensor:
    """`sign(x) * log(1 + |x|)`; inverse of `symexp`."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Tensor) -> Tensor:
    """`sign(x) * (exp(|x|) - 1)`; inverse of `symlog`."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


def symexp_bins(num_bins: int = 255, limit: float = 20.0) -> Tensor:
    """Support of the scalar heads: `symexp(linspace(-limit, limit))`, mirrored exactly about 0, float32 [num_bins].

    Raises:
        ValueError: Fewer than 2 bins.
    """
    if num_bins < 2:
        raise ValueError(f"symexp_bins: num_bins is {num_bins}; it must be at least 2")
    half = symexp(torch.linspace(-limit, limit, num_bins, dtype=torch.float64)[: num_bins // 2]).float()
    middle = torch.zeros(num_bins % 2)
    return torch.cat([half, middle, -half.flip(0)])


def _neighbours(target: Tensor, bins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the bins below and above each target, and the weight of the upper one."""
    last = bins.shape[0] - 1
    above = torch.bucketize(target.contiguous(), bins, right=True)
    lower, upper = (above - 1).clamp(0, last), above.clamp(0, last)
    to_lower = torch.abs(bins[lower] - target)
    to_upper = torch.abs(bins[upper] - target)
    # Only outside the support do both indices meet: all mass goes to that end bin, whatever the weight.
    weight = torch.where(lower == upper, 0.5, to_lower / (to_lower + to_upper))
    # bucketize sorts NaN above every bin, which would turn it into the largest value: keep it visible instead.
    return lower, upper, torch.where(torch.isnan(target), target, weight)


def two_hot_encode(target: Tensor, bins: Tensor) -> Tensor:
    """Mass on the two bins that enclose each target, linear in raw units; values outside clip to the end bins.

    Args:
        target: [...], any float dtype, in raw units (not symlog-ed). Infinite values clip; NaN gives NaN.
        bins: Sorted support, [K].

    Returns:
        float32 [..., K]; each row sums to 1.
    """
    lower, upper, weight = _neighbours(target.float(), bins)
    code = torch.zeros(*target.shape, bins.shape[0], device=target.device)
    code.scatter_add_(-1, lower.unsqueeze(-1), (1 - weight).unsqueeze(-1))
    return code.scatter_add_(-1, upper.unsqueeze(-1), weight.unsqueeze(-1))


def two_hot_loss(logits: Tensor, target: Tensor, bins: Tensor) -> Tensor:
    """Cross-entropy of the two-hot code of `target` under `logits`, without building the code.

    Args:
        logits: [..., K], any float dtype.
        target: [...], raw units; no gradient flows into it. Infinite values clip; NaN gives NaN.
        bins: Sorted support, [K].

    Returns:
        float32 [...].
    """
    lower, upper, weight = _neighbours(target.detach().float(), bins)
    log_probs = F.log_softmax(logits.float(), -1)
    at_lower = log_probs.gather(-1, lower.unsqueeze(-1)).squeeze(-1)
    at_upper = log_probs.gather(-1, upper.unsqueeze(-1)).squeeze(-1)
    return -((1 - weight) * at_lower + weight * at_upper)


def two_hot_decode(logits: Tensor, bins: Tensor) -> Tensor:
    """Mean of the categorical over `bins`, exactly 0 for uniform probabilities over a symmetric support.

    Mirrored bins are paired first, `(p_up - p_low) * b_up + p_low * (b_up + b_low)`: each pair of a symmetric support
    is then exactly 0 where its probabilities are equal, so no order of reduction can leave a remainder. (A plain sum of
    `p * b` with bins up to 4.9e8 gives 0.3 or 0.75 for zero logits, depending on how the sum is split.)

    Args:
        logits: [..., K], any float dtype.
        bins: Sorted support, [K], even or odd length, symmetric or not.

    Returns:
        float32 [...].
    """
    probs = F.softmax(logits.float(), -1)
    half = bins.shape[0] // 2
    low, up = probs[..., :half], probs[..., -half:].flip(-1)
    bins_low, bins_up = bins[:half], bins[-half:].flip(0)
    pairs = (up - low) * bins_up + low * (bins_up + bins_low)
    mean = pairs.sum(-1)
    if bins.shape[0] % 2:
        mean = mean + probs[..., half] * bins[half]
    return mean


def race(probs: Tensor, noise: Tensor) -> Tensor:
    """Class indices drawn from `probs` [..., C] with exponential `noise` of the same shape; ones give the mode."""
    return torch.argmax(probs / noise, -1)


def unimix_probs(logits: Tensor, unimix: float) -> Tensor:
    """`(1 - unimix) * softmax(logits) + unimix / C` in float32, [..., C]."""
    logits = logits.float()
    # Written out: the softmax kernel is four times slower than this where the last axis has 4 or 8 entries.
    exp = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    probs = exp / exp.sum(-1, keepdim=True)
    return (1 - unimix) * probs + unimix / logits.shape[-1] if unimix else probs


def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """[...] -> float32 [..., num_classes]; unlike the library's function it does not look at the values."""
    code = torch.zeros(*index.shape, num_classes, device=index.device)
    return code.scatter_(-1, index.unsqueeze(-1), 1.0)


def sample_one_hot(logits: Tensor, noise: Tensor, unimix: float) -> Tensor:
    """Straight-through one-hot sample of the mixed categorical.

    The value is exactly one-hot; the gradient is that of the probabilities, mixing included.

    Args:
        logits: [..., S, C].
        noise: Exponential draws, float32 [..., S, C].
        unimix: Share of the uniform distribution.

    Returns:
        float32 [..., S, C].
    """
    probs = unimix_probs(logits, unimix)
    code = one_hot(race(probs.detach(), noise), logits.shape[-1])
    return code + (probs - probs.detach())


def categorical_kl(logits: Tensor, other: Tensor, unimix: float) -> Tensor:
    """KL(logits || other) of mixed categoricals, summed over the S latents: [..., S, C] twice -> float32 [...]."""
    probs = unimix_probs(logits, unimix)
    log_ratio = torch.log(probs) - torch.log(unimix_probs(other, unimix))
    return (probs * log_ratio).sum((-2, -1))


def kl_losses(posterior: Tensor, prior: Tensor, *, unimix: float, free_nats: float) -> tuple[Tensor, Tensor]:
    """Dynamics and representation losses, each clipped from below after the sum over latents.

    Args:
        posterior: Logits [..., S, C].
        prior: Logits [..., S, C].
        unimix: Share of the uniform distribution in both.
        free_nats: Lower clip; no gradient where it holds.

    Returns:
        `dynamics` (gradient to the prior) and `representation` (gradient to the posterior), float32 [...].
    """
    probs = unimix_probs(posterior, unimix)
    log_probs, log_prior = torch.log(probs), torch.log(unimix_probs(prior, unimix))
    dynamics = (probs.detach() * (log_probs.detach() - log_prior)).sum((-2, -1))
    representation = (probs * (log_probs - log_prior.detach())).sum((-2, -1))
    return dynamics.clamp(min=free_nats), representation.clamp(min=free_nats)


def bounded_normal(mean: Tensor, std: Tensor, *, min_std: float = 0.1, max_std: float = 1.0) -> tuple[Tensor, Tensor]:
    """Parameters of the continuous actor from raw outputs: mean in (-1, 1), standard deviation in (min_std, max_std)."""
    spread = (max_std - min_std) * torch.sigmoid(std.float() + 2.0) + min_std
    return torch.tanh(mean.float()), spread


def normal_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log density of independent normals, summed over the last axis: [..., A] -> float32 [...]."""
    normalised = (value - mean) / std
    return (-0.5 * normalised.square() - torch.log(std) - 0.5 * math.log(2 * math.pi)).sum(-1)


def normal_entropy(std: Tensor) -> Tensor:
    """Entropy of independent normals in nats, summed over the last axis: [..., A] -> float32 [...]."""
    return (torch.log(std) + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def binary_cross_entropy(logit: Tensor, target: Tensor) -> Tensor:
    """`-(y log p + (1 - y) log(1 - p))` from a logit, for soft targets in [0, 1]; float32, elementwise."""
    return F.binary_cross_entropy_with_logits(logit.float(), target, reduction="none")
