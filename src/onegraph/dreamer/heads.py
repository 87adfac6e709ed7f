"""Heads on RSSM features: two-hot scalars, continuation, and the actor.

Features are `concat(belief, state)`, [..., D + S * C]. Source: danijar/dreamerv3 `embodied/jax/heads.py`, `outs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onegraph.dreamer.observation import one_hot_columns
from onegraph.nn.distributions import (
    bounded_normal,
    normal_entropy,
    normal_log_prob,
    one_hot,
    race,
    symexp_bins,
    two_hot_decode,
    two_hot_loss,
)
from onegraph.nn.layers import MLP, Linear
from onegraph.specs import ArraySpec

ActorOutput = list[tuple[Tensor, ...]]
"""One tuple a sorted action key: (mean, std) of continuous ones, the log-probabilities of each element of discrete ones."""


class TwoHotHead(nn.Module):
    """MLP to logits over a symexp-spaced support; starts at exactly 0.

    Args:
        feat_dim: Columns of the features.
        units: Width.
        num_layers: Layers before the output.
        num_bins: Size of the support.

    Compile: no state, no draws, no synchronisation.
    """

    bins: Tensor

    def __init__(self, feat_dim: int, units: int, num_layers: int, num_bins: int = 255):
        super().__init__()
        self.mlp = MLP(feat_dim, units, num_layers)
        self.head = Linear(units, num_bins, outscale=0.0)
        self.register_buffer("bins", symexp_bins(num_bins), persistent=False)

    def forward(self, feat: Tensor) -> Tensor:
        """[..., F] -> logits [..., num_bins]."""
        return self.head(self.mlp(feat))

    def decode(self, logits: Tensor) -> Tensor:
        """Mean value in raw units, float32 [...]."""
        return two_hot_decode(logits, self.bins)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy against raw targets without gradient, float32 [...]."""
        return two_hot_loss(logits, target, self.bins)


class ContinueHead(nn.Module):
    """MLP to the logit that the episode goes on, discount included.

    Args:
        feat_dim: Columns of the features.
        units: Width.
        num_layers: Layers before the output.

    Compile: no state, no draws, no synchronisation.
    """

    def __init__(self, feat_dim: int, units: int, num_layers: int):
        super().__init__()
        self.mlp = MLP(feat_dim, units, num_layers)
        self.head = Linear(units, 1)

    def forward(self, feat: Tensor) -> Tensor:
        """[..., F] -> float32 logit [...]."""
        return self.head(self.mlp(feat)).squeeze(-1).float()


class Actor(nn.Module):
    """Policy over an action dict of any mixture of continuous and discrete entries.

    Inside the learner an action is one vector, [..., A]: entries in sorted key order, continuous ones as they are,
    discrete elements one-hot. Continuous: normal with bounded mean and deviation, neither squashed nor clipped.
    Discrete: plain categoricals, without uniform mixing.

    Args:
        feat_dim: Columns of the features.
        specs: Action entries.
        units: Width.
        num_layers: Layers before the output.
        min_std: Smallest standard deviation.
        max_std: Largest standard deviation.
        outscale: Factor on the output kernels.

    Compile: mutates nothing and does not synchronise; only `draw_noise` draws, from the device's global generator.
    """

    def __init__(
        self,
        feat_dim: int,
        specs: Mapping[str, ArraySpec],
        units: int,
        num_layers: int,
        *,
        min_std: float = 0.1,
        max_std: float = 1.0,
        outscale: float = 0.01,
    ):
        super().__init__()
        if not specs:
            raise ValueError("actor: the action has no entries; give at least one")
        self.keys = sorted(specs)
        self.specs = {k: specs[k] for k in self.keys}
        self.dims = [specs[k].flat_dim for k in self.keys]
        self.action_dim = sum(self.dims)
        self.min_std = min_std
        self.max_std = max_std
        self.mlp = MLP(feat_dim, units, num_layers)
        self.heads = nn.ModuleList()
        for key, dim in zip(self.keys, self.dims):
            num_outputs = 1 if specs[key].is_discrete else 2
            self.heads.append(nn.ModuleList(Linear(units, dim, outscale=outscale) for _ in range(num_outputs)))

    def forward(self, feat: Tensor) -> ActorOutput:
        """[..., F] -> distribution parameters of each key, float32."""
        x = self.mlp(feat)
        out: ActorOutput = []
        for spec, head in zip(self.specs.values(), self.heads):
            raw = [linear(x).float() for linear in head]  # pyright: ignore[reportGeneralTypeIssues]
            if spec.num_classes is not None:
                out.append(tuple(F.log_softmax(part, -1) for part in raw[0].split(spec.num_classes, -1)))
            else:
                out.append(bounded_normal(raw[0], raw[1], min_std=self.min_std, max_std=self.max_std))
        return out

    def draw_noise(self, batch: tuple[int, ...], device: torch.device | str | None = None) -> Tensor:
        """Noise for `sample`: normal for continuous columns, exponential for discrete ones; float32 [*batch, A]."""
        parts = []
        for spec, dim in zip(self.specs.values(), self.dims):
            part = torch.empty(*batch, dim, device=device)
            parts.append(part.exponential_() if spec.is_discrete else part.normal_())
        return torch.cat(parts, -1)

    def mode_noise(self, like: Tensor) -> Tensor:
        """Noise [..., A] with which `sample` takes means and most likely classes."""
        parts = []
        for spec, part in zip(self.specs.values(), like.split(self.dims, -1)):
            parts.append(torch.ones_like(part) if spec.is_discrete else torch.zeros_like(part))
        return torch.cat(parts, -1)

    def sample(self, output: ActorOutput, noise: Tensor) -> Tensor:
        """Draws an action vector, [..., A], without gradient. Noise 0 (continuous) and 1 (discrete) gives the mode."""
        parts = []
        for spec, params, eps in zip(self.specs.values(), output, noise.split(self.dims, -1)):
            if spec.num_classes is not None:
                for log_probs, e in zip(params, eps.split(spec.num_classes, -1)):
                    parts.append(one_hot(race(log_probs.exp(), e), log_probs.shape[-1]))
            else:
                mean, std = params
                parts.append(mean + std * eps)
        return torch.cat(parts, -1).detach()

    def log_prob(self, output: ActorOutput, action: Tensor) -> Tensor:
        """Log density of an action vector, summed over all entries; float32 [...]."""
        total = torch.zeros(action.shape[:-1], device=action.device)
        for spec, params, value in zip(self.specs.values(), output, action.split(self.dims, -1)):
            if spec.is_discrete:
                total = total + (torch.cat(params, -1) * value).sum(-1)
            else:
                total = total + normal_log_prob(value, *params)
        return total

    def entropy(self, output: ActorOutput) -> Tensor:
        """Entropy in nats, summed over all entries; float32 [...]."""
        parts = []
        for spec, params in zip(self.specs.values(), output):
            if spec.is_discrete:
                parts.extend(-(log_probs.exp() * log_probs).sum(-1) for log_probs in params)
            else:
                parts.append(normal_entropy(params[1]))
        return torch.stack(parts).sum(0)

    def encode(self, action: Mapping[str, Tensor]) -> Tensor:
        """{key: [..., *spec.shape]} -> action vector, float32 [..., A]."""
        parts = []
        for key, spec in self.specs.items():
            value = action[key]
            if spec.is_discrete:
                parts.append(one_hot_columns(value, spec))
            else:
                parts.append(value.float().reshape(*value.shape[: value.dim() - len(spec.shape)], spec.flat_dim))
        return torch.cat(parts, -1)

    def decode(self, vector: Tensor) -> dict[str, Tensor]:
        """Action vector [..., A] -> {key: float32 or int32 [..., *spec.shape]}."""
        out = {}
        for (key, spec), value in zip(self.specs.items(), vector.split(self.dims, -1)):
            if spec.num_classes is not None:
                value = torch.stack([v.argmax(-1) for v in value.split(spec.num_classes, -1)], -1).int()
            out[key] = value.reshape(*vector.shape[:-1], *spec.shape)
        return out
