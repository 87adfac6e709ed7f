"""Behaviour: lambda-returns, return normaliser, and the actor and critic losses on imagined states.

Source: danijar/dreamerv3 `dreamerv3/agent.py` (`imag_loss`, `repl_loss`, `lambda_return`) and `embodied/jax/utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onegraph.dreamer.config import DreamerConfig
from onegraph.dreamer.heads import Actor, TwoHotHead
from onegraph.dreamer.imagine import Imagination
from onegraph.dreamer.world_model import WorldModel
from onegraph.specs import ArraySpec


def lambda_return(
    last: Tensor, terminal: Tensor, reward: Tensor, boot: Tensor, discount: float, lmbda: float
) -> Tensor:
    """Lambda-returns along the last axis.

    `R_n = boot_n`; `R_t = rew_{t+1} + (1 - cont_{t+1}) live_{t+1} boot_{t+1} + live_{t+1} cont_{t+1} R_{t+1}` with
    `live = (1 - terminal) * discount` and `cont = (1 - last) * lmbda`. Index 0 of `last`, `terminal`, `reward` and
    `boot` is not used.

    Args:
        last: 1 where an episode ends for whatever reason, [..., n + 1].
        terminal: 1 (or the probability) where it really ends, [..., n + 1].
        reward: [..., n + 1].
        boot: Values to bootstrap from, [..., n + 1].
        discount: Per step.
        lmbda: Weight of the longer return.

    Returns:
        R_0 .. R_{n-1}, [..., n]; without gradient, for they are targets.

    Raises:
        ValueError: Shapes differ or there are fewer than two steps.
    """
    shapes = {tuple(x.shape) for x in (last, terminal, reward, boot)}
    if len(shapes) > 1 or reward.shape[-1] < 2:
        raise ValueError(
            f"lambda_return: shapes {sorted(shapes)}; last, terminal, reward and boot must share one of at least 2 steps"
        )
    live = (1 - terminal) * discount
    cont = (1 - last) * lmbda
    interim = reward + (1 - cont) * live * boot
    return _lambda_sum(interim[..., 1:], (live * cont)[..., 1:], boot[..., -1])


# One operator for torch.compile: unrolled, the steps of the recursion were the slowest kernel to compile.
@torch.library.custom_op("onegraph::lambda_sum", mutates_args=())
def _lambda_sum(interim: Tensor, carry: Tensor, value: Tensor) -> Tensor:
    returns = []
    for now, weight in zip(interim.unbind(-1)[::-1], carry.unbind(-1)[::-1]):
        value = now + weight * value
        returns.append(value)
    return torch.stack(returns[::-1], -1)


@_lambda_sum.register_fake
def _(interim: Tensor, carry: Tensor, value: Tensor) -> Tensor:
    return interim.new_empty(interim.shape)


class ReturnNormaliser(nn.Module):
    """Running 5th and 95th percentile of the imagined returns; advantages are divided by their distance.

    Args:
        rate: Share of each new percentile.
        low: Lower percentile, 0..1.
        high: Upper percentile, 0..1.
        limit: Smallest scale.

    Compile: `update` overwrites the buffers `lo` and `hi` in place.
    """

    lo: Tensor
    hi: Tensor

    def __init__(self, rate: float = 0.01, low: float = 0.05, high: float = 0.95, limit: float = 1.0):
        super().__init__()
        self.rate, self.low, self.high, self.limit = rate, low, high, limit
        self.register_buffer("lo", torch.zeros(()))
        self.register_buffer("hi", torch.zeros(()))
        self.register_buffer("quantiles", torch.tensor([low, high]), persistent=False)

    @torch.no_grad()
    def update(self, returns: Tensor) -> None:
        """Moves the percentiles towards those of `returns`, any shape."""
        low, high = torch.quantile(returns.flatten().float(), self.get_buffer("quantiles")).unbind()
        self.lo.copy_((1 - self.rate) * self.lo + self.rate * low)
        self.hi.copy_((1 - self.rate) * self.hi + self.rate * high)

    def scale(self) -> Tensor:
        """`max(limit, hi - lo)`, float32 []."""
        return (self.hi - self.lo).clamp(min=self.limit)


class ImaginedTargets(NamedTuple):
    """What the actor and critic losses regress to; no gradients. H steps, N starts.

    Attributes:
        reward: Predicted for each state after the start, [H, N].
        continuation: Probability to go on, discount included, [H + 1, N].
        value: Online critic, [H + 1, N].
        slow_value: Slow critic, [H, N].
        weight: Product of the continuations up to and including each state, [H, N].
        returns: Lambda-returns, [H, N].
        advantage: [H, N].
    """

    reward: Tensor
    continuation: Tensor
    value: Tensor
    slow_value: Tensor
    weight: Tensor
    returns: Tensor
    advantage: Tensor


class Behavior(nn.Module):
    """Actor, critic and slow critic, and everything they learn from.

    Args:
        config: Sizes and coefficients.
        action_specs: Action entries.
        feat_dim: Columns of the features.

    Compile: `losses` updates the return normaliser in place in training mode; nothing else is mutated, nothing drawn.
    """

    def __init__(self, config: DreamerConfig, action_specs: Mapping[str, ArraySpec], feat_dim: int):
        super().__init__()
        c = config
        self.config = config
        self.actor = Actor(feat_dim, action_specs, c.units, c.actor_layers, min_std=c.min_std, max_std=c.max_std)
        self.value = TwoHotHead(feat_dim, c.units, c.value_layers, c.num_bins)
        self.slow_value = deepcopy(self.value).requires_grad_(False)
        self.return_norm = ReturnNormaliser(c.return_rate, c.return_low, c.return_high, c.return_limit)

    @torch.no_grad()
    def targets(self, world_model: WorldModel, feat: Tensor, value: Tensor) -> ImaginedTargets:
        """Returns, advantages and weights of imagined features [H + 1, N, F] with online values [H + 1, N].

        In training mode the return normaliser takes these returns in before its scale is used.
        """
        reward = world_model.reward.decode(world_model.reward(feat[1:]))
        continuation = torch.sigmoid(world_model.continuation(feat))
        slow_value = self.slow_value.decode(self.slow_value(feat[:-1]))
        # Index 0 of the reward is never read by the recursion; any row of the right shape serves.
        rewards = torch.cat([reward[:1], reward])
        returns = lambda_return(
            torch.zeros_like(continuation).T, (1 - continuation).T, rewards.T, value.T, 1.0, self.config.lmbda
        ).T
        if self.training:
            self.return_norm.update(returns)
        advantage = (returns - value[:-1]) / self.return_norm.scale()
        weight = torch.cumprod(continuation, 0)[:-1]
        return ImaginedTargets(reward, continuation, value, slow_value, weight, returns, advantage)

    def losses(
        self, world_model: WorldModel, imagination: Imagination
    ) -> tuple[dict[str, Tensor], ImaginedTargets, dict[str, Tensor]]:
        """Actor and critic losses on imagined states.

        Returns:
            Elementwise losses `policy` and `value`, float32 [H, N]; the targets; metrics without gradient.
        """
        feat = imagination.feat
        logits = self.value(feat)
        value = self.value.decode(logits.detach())
        targets = self.targets(world_model, feat, value)
        output = self.actor(feat[:-1])
        log_prob = self.actor.log_prob(output, imagination.action)
        entropy = self.actor.entropy(output)
        policy = -targets.weight * (log_prob * targets.advantage + self.config.entropy_scale * entropy)
        logits = logits[:-1]
        critic = self.value.loss(logits, targets.returns)
        critic = critic + self.config.slow_scale * self.value.loss(logits, targets.slow_value)
        metrics = {
            "behavior/entropy": entropy.mean(),
            "behavior/return": targets.returns.mean(),
            "behavior/return_scale": self.return_norm.scale(),
            "behavior/reward": targets.reward.mean(),
            "behavior/continuation": targets.continuation.mean(),
            "behavior/value": targets.value.mean(),
            "behavior/advantage_magnitude": targets.advantage.abs().mean(),
            "behavior/weight": targets.weight.mean(),
        }
        return (
            {"policy": policy, "value": targets.weight * critic},
            targets,
            {k: v.detach() for k, v in metrics.items()},
        )

    def replay_value_loss(
        self, feat: Tensor, reward: Tensor, is_last: Tensor, is_terminal: Tensor, boot: Tensor
    ) -> Tensor:
        """Critic loss on replayed states, whose gradient also reaches the world model.

        Args:
            feat: Posterior features with gradient, [B, K, F].
            reward: [B, K].
            is_last: bool [B, K].
            is_terminal: bool [B, K].
            boot: Imagined return of the rollout that started at each state, [B, K].

        Returns:
            float32 [B, K - 1]; 0 where an episode ends.
        """
        c = self.config
        last = is_last.float()
        returns = lambda_return(last, is_terminal.float(), reward.float(), boot, 1 - 1 / c.horizon, c.lmbda)
        feat = feat[:, :-1]
        logits = self.value(feat)
        with torch.no_grad():
            slow_value = self.slow_value.decode(self.slow_value(feat))
        loss = self.value.loss(logits, returns) + c.slow_scale * self.value.loss(logits, slow_value)
        return (1 - last[:, :-1]) * loss
