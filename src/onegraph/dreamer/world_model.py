"""World model: encoder, RSSM, decoder, reward and continuation heads, and their losses.

Source: danijar/dreamerv3 `dreamerv3/agent.py`, first half of `loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.dreamer.config import DreamerConfig
from onegraph.dreamer.heads import ContinueHead, TwoHotHead
from onegraph.dreamer.observation import Decoder, Encoder
from onegraph.dreamer.rssm import RSSMPosteriorV3, RSSMPriorV3
from onegraph.dreamer.scan import Recurrence, Rollout, Scope
from onegraph.nn.distributions import binary_cross_entropy, kl_losses
from onegraph.specs import ArraySpec


def features(belief: Tensor, state: Tensor) -> Tensor:
    """`concat(belief, state)`: [..., D], [..., S * C] -> [..., D + S * C], the input of every head."""
    return torch.cat([belief, state], -1)


class WorldModel(nn.Module):
    """Everything that predicts the environment.

    Args:
        config: Sizes.
        observation_specs: Observation entries.
        action_dim: Columns of the action vector.

    Compile: mutates nothing, draws nothing (noise is an argument), does not synchronise.
    """

    def __init__(self, config: DreamerConfig, observation_specs: Mapping[str, ArraySpec], action_dim: int):
        super().__init__()
        c = config
        self.config = config
        self.belief_dim = c.belief_dim
        self.state_dim = c.num_categoricals * c.num_classes
        self.feat_dim = self.belief_dim + self.state_dim
        self.encoder = Encoder(observation_specs, units=c.units, num_layers=c.encoder_layers, image_depth=c.image_depth)
        self.prior = RSSMPriorV3(
            None,
            c.hidden_dim,
            c.belief_dim,
            c.num_categoricals,
            c.num_classes,
            action_dim,
            recurrent_model=c.recurrent_model,
            num_blocks=c.num_blocks,
            num_layers=c.core_layers,
            prior_num_layers=c.prior_layers,
            unimix=c.unimix,
        )
        self.posterior = RSSMPosteriorV3(
            c.hidden_dim,
            c.num_categoricals,
            c.num_classes,
            c.belief_dim,
            self.encoder.out_dim,
            num_layers=c.posterior_layers,
            unimix=c.unimix,
        )
        self.decoder = Decoder(
            observation_specs,
            self.belief_dim,
            self.state_dim,
            units=c.units,
            num_layers=c.decoder_layers,
            image_depth=c.image_depth,
            num_blocks=c.decoder_blocks,
        )
        self.reward = TwoHotHead(self.feat_dim, c.units, c.reward_layers, c.num_bins)
        self.continuation = ContinueHead(self.feat_dim, c.units, c.continue_layers)
        self.recurrence = Recurrence(self.prior, self.posterior)

    def initial(self, num: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Belief [num, D] and state [num, S * C] before any observation: zeros."""
        return (
            torch.zeros(num, self.belief_dim, device=device),
            torch.zeros(num, self.state_dim, device=device),
        )

    def encode(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Observation entries [..., *spec.shape] -> embedding [..., E]."""
        return self.encoder(observation)

    def observe(
        self, embedding: Tensor, action: Tensor, reset: Tensor, belief: Tensor, state: Tensor, noise: Tensor
    ) -> Rollout:
        """Posterior trajectory of embedded observations; see `scan.Recurrence` for the shapes."""
        return self.recurrence(belief, state, action, embedding, reset, noise)

    def compile_rollout(self, scope: Scope, *, unroll: int = 1, compile: bool = True, **compile_kwargs: Any) -> None:
        """Selects the backend of `observe`; see `scan.Recurrence.select`."""
        self.recurrence.select(scope, unroll=unroll, compile=compile, **compile_kwargs)

    @property
    def scope(self) -> Scope | None:
        """Backend selected for `observe`."""
        return self.recurrence.scope

    @property
    def is_compiled(self) -> bool:
        """True if `observe` has a compile scope of its own."""
        return self.recurrence.is_compiled

    def losses(
        self,
        rollout: Rollout,
        observation: Mapping[str, Tensor],
        reward: Tensor,
        is_terminal: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Unweighted model losses of a posterior trajectory.

        Args:
            rollout: The trajectory.
            observation: {key: [B, T, *spec.shape]}.
            reward: Raw rewards that arrived with the observations, [B, T].
            is_terminal: True where the episode really ended, bool [B, T].

        Returns:
            Prior logits [B, T, S, C], and the losses `rec/<key>` for each observation key, `rew`, `con`, `dyn`, `rep`,
            float32 [B, T] each.
        """
        c = self.config
        prior_logits = self.prior.logits(rollout.belief)
        reconstruction = self.decoder.losses(self.decoder(rollout.belief, rollout.state), observation)
        losses = {f"rec/{key}": value for key, value in reconstruction.items()}
        feat = features(rollout.belief, rollout.state)
        losses["rew"] = self.reward.loss(self.reward(feat), reward)
        goes_on = (1.0 - is_terminal.float()) * (1 - 1 / c.horizon)
        losses["con"] = binary_cross_entropy(self.continuation(feat), goes_on)
        losses["dyn"], losses["rep"] = kl_losses(
            rollout.posterior_logits, prior_logits, unimix=c.unimix, free_nats=c.free_nats
        )
        return prior_logits, losses
