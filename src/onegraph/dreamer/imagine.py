"""Imagination: the prior rolled forward under the actor, without gradients.

Source: danijar/dreamerv3 `dreamerv3/agent.py`, `loss`, and `dreamerv3/rssm.py`, `imagine`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onegraph.dreamer.heads import Actor
from onegraph.dreamer.rssm import RSSMPriorV3
from onegraph.nn.distributions import sample_one_hot
from onegraph.stepper.scan import Scan


class Imagination(NamedTuple):
    """A rollout in the model, without gradients. Time is the first axis: H + 1 states, H actions, N starts.

    Attributes:
        feat: [H + 1, N, F]; index 0 are the starts.
        action: The action taken in each state but the last, [H, N, A].
    """

    feat: Tensor
    action: Tensor


class ImagineStep(nn.Module):
    """One imagined step: actor, core, prior.

    Args:
        prior: Core and prior.
        actor: The policy.

    Compile: mutates nothing, draws nothing, does not synchronise.
    """

    def __init__(self, prior: RSSMPriorV3, actor: Actor):
        super().__init__()
        self.prior = prior
        self.actor = actor

    def forward(
        self, belief: Tensor, state: Tensor, action_noise: Tensor, state_noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of N trajectories.

        Args:
            belief: [N, D].
            state: [N, S * C].
            action_noise: [N, A], see `Actor.draw_noise`.
            state_noise: Exponential draws, float32 [N, S, C].

        Returns:
            Next belief and state in the dtypes they came in with, and the action that led there, [N, A].
        """
        action = self.actor.sample(self.actor(torch.cat([belief, state], -1)), action_noise)
        next_belief = self.prior.core(belief, state, action.to(belief.dtype)).to(belief.dtype)
        logits = self.prior.logits(next_belief)
        next_state = sample_one_hot(logits, state_noise, self.prior.unimix).flatten(-2).to(state.dtype)
        return next_belief, next_state, action


class Imagine:
    """Rolls out an `ImagineStep`; a Python loop, or one operator over a compiled step.

    Not a module: it owns no parameters. Inside an enclosing compiled step it is always the operator, so that one step
    is traced and not the whole horizon.

    Args:
        prior: Core and prior.
        actor: The policy.
    """

    def __init__(self, prior: RSSMPriorV3, actor: Actor):
        self.step = ImagineStep(prior, actor)
        self.is_compiled = False
        self._scan = Scan(self.step, "imagination step")

    def select(self, is_compiled: bool, **region: Any) -> None:
        """Compiles the step on its own, or goes back to the plain loop.

        Args:
            is_compiled: Compile it.
            region: Settings of the compiled region, see `stepper.compile.Region`.
        """
        self.is_compiled = is_compiled
        self._scan = Scan(self.step, "imagination step", **region)

    @torch.no_grad()
    def __call__(self, belief: Tensor, state: Tensor, action_noise: Tensor, state_noise: Tensor) -> Imagination:
        """Rolls H steps.

        Args:
            belief: Starts, [N, D].
            state: Starts, [N, S * C].
            action_noise: [H, N, A], see `Actor.draw_noise`.
            state_noise: Exponential draws, [H, N, S, C].

        Compile: mutates nothing, draws nothing, does not synchronise.
        """
        belief, state = belief.detach(), state.detach()
        if (self.is_compiled or torch.compiler.is_compiling()) and belief.shape[0]:
            beliefs, states, actions = self._scan(
                (belief.contiguous(), state.contiguous()), (action_noise, state_noise)
            )
        else:
            outputs, carry = [], (belief, state)
            for noise in zip(action_noise, state_noise):
                out = self.step(*carry, *noise)
                carry = out[:2]
                outputs.append(out)
            beliefs, states, actions = (torch.stack(y) for y in zip(*outputs))
        starts, later = torch.cat([belief, state], -1), torch.cat([beliefs, states], -1)
        return Imagination(torch.cat([starts.unsqueeze(0), later]), actions)
