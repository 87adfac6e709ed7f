"""Acting with a trained learner: observation and carried latents in, action out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from onegraph.dreamer.loss import DreamerV3Loss
from onegraph.nn.distributions import sample_one_hot


class Carry(NamedTuple):
    """What a policy remembers between steps; N streams.

    Attributes:
        belief: [N, D].
        state: [N, S * C].
        action: The last action as a vector, [N, A].
    """

    belief: Tensor
    state: Tensor
    action: Tensor


class DreamerPolicy:
    """Encoder, one posterior step and the actor, sharing the learner's parameters.

    It samples, also in evaluation, as the reference does; `mode=True` takes means and most likely classes instead.

    Args:
        loss: The learner.

    Compile: draws from the device's global generator; mutates nothing.
    """

    def __init__(self, loss: DreamerV3Loss):
        self.loss = loss

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.loss.parameters()).device

    def initial(self, num: int) -> Carry:
        """Carry of `num` streams before their first observation: zeros."""
        belief, state = self.loss.world_model.initial(num, self.device)
        return Carry(belief, state, torch.zeros(num, self.loss.behavior.actor.action_dim, device=self.device))

    @torch.no_grad()
    def act(
        self, observation: Mapping[str, Tensor], is_first: Tensor, carry: Carry, *, mode: bool = False
    ) -> tuple[dict[str, Tensor], Carry]:
        """One step of N streams.

        Args:
            observation: {key: [N, *spec.shape]} on the policy's device.
            is_first: True where an episode starts: that stream's carry is ignored, bool [N].
            carry: From the previous call, or `initial`.
            mode: Take the most likely action instead of a sample.

        Returns:
            Actions {key: float32 or int32 [N, *spec.shape]}, not clipped, and the next carry.
        """
        model, actor = self.loss.world_model, self.loss.behavior.actor
        keep = (~is_first).unsqueeze(-1).float()
        belief = model.prior.core(carry.belief * keep, carry.state * keep, carry.action * keep)
        logits = model.posterior.logits(belief, model.encoder(observation))
        latent_noise = torch.empty(logits.shape, device=logits.device).exponential_()
        action_noise = actor.draw_noise((is_first.shape[0],), logits.device)
        if mode:
            latent_noise, action_noise = torch.ones_like(latent_noise), actor.mode_noise(action_noise)
        state = sample_one_hot(logits, latent_noise, model.posterior.unimix).flatten(-2).to(belief.dtype)
        output = actor(torch.cat([belief, state], -1))
        action = actor.sample(output, action_noise)
        return actor.decode(action), Carry(belief, state, action)
