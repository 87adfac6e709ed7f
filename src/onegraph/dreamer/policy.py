"""Acting with a trained learner: observation and carried latents in, action out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from onegraph.dreamer.loss import DreamerV3Loss
from onegraph.nn.distributions import sample_one_hot
from onegraph.stepper.compile import Region


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
        compile: Compile the step, one graph for each number of streams; the learner's own graphs are not touched.

    Compile: draws from the device's global generator, outside of what is compiled; mutates nothing.
    """

    def __init__(self, loss: DreamerV3Loss, *, compile: bool = False):
        self.loss = loss
        self._region = Region(_step, "policy") if compile else None

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
        num, device = is_first.shape[0], is_first.device
        latent = (num, model.posterior.num_categoricals, model.posterior.num_classes)
        latent_noise = torch.empty(latent, device=device).exponential_()
        action_noise = actor.draw_noise((num,), device)
        if mode:
            latent_noise, action_noise = torch.ones_like(latent_noise), actor.mode_noise(action_noise)
        step = _step if self._region is None else self._region
        action, carry = step(self.loss, dict(observation), is_first, carry, latent_noise, action_noise)
        return actor.decode(action), carry


def _step(
    loss: DreamerV3Loss,
    observation: dict[str, Tensor],
    is_first: Tensor,
    carry: Carry,
    latent_noise: Tensor,
    action_noise: Tensor,
) -> tuple[Tensor, Carry]:
    """The step without its draws."""
    model, actor = loss.world_model, loss.behavior.actor
    keep = (~is_first).unsqueeze(-1).float()
    belief = model.prior.core(carry.belief * keep, carry.state * keep, carry.action * keep)
    logits = model.posterior.logits(belief, model.encoder(observation))
    state = sample_one_hot(logits, latent_noise, model.posterior.unimix).flatten(-2).to(belief.dtype)
    action = actor.sample(actor(torch.cat([belief, state], -1)), action_noise)
    return action, Carry(belief, state, action)
