"""The recurrence over time: posterior states of a sequence, given its actions, embeddings and noise.

Everything that is not sequential stays outside: action embeddings come in for all steps, prior logits are computed from
the stacked beliefs afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onegraph.dreamer.rssm import RSSMPosteriorV3, RSSMPriorV3
from onegraph.nn.distributions import sample_one_hot


class Rollout(NamedTuple):
    """Posterior trajectory.

    Attributes:
        belief: [B, T, D].
        state: Straight-through one-hot samples, [B, T, S * C].
        posterior_logits: [B, T, S, C].
    """

    belief: Tensor
    state: Tensor
    posterior_logits: Tensor


def observe_loop(
    prior: RSSMPriorV3,
    posterior: RSSMPosteriorV3,
    belief: Tensor,
    state: Tensor,
    action: Tensor,
    embedding: Tensor,
    reset: Tensor,
    noise: Tensor,
) -> Rollout:
    """Runs core and posterior step by step in Python.

    Args:
        prior: Holds the recurrent core.
        posterior: Posterior head.
        belief: Initial belief, [B, D].
        state: Initial state, [B, S * C].
        action: The action that led to each step, [B, T, A].
        embedding: Observation embeddings, [B, T, E].
        reset: True where an episode starts: belief, state and action are zeroed before that step, bool [B, T].
        noise: Exponential draws, float32 [B, T, S, C].

    Returns:
        The trajectory.

    Compile: mutates nothing, draws nothing, does not synchronise.
    """
    keep = (~reset).unsqueeze(-1).to(belief.dtype)
    action_embedding = prior.core.embed_action(action * keep)
    beliefs, states, logits = [], [], []
    for t in range(action.shape[1]):
        belief, state = belief * keep[:, t], state * keep[:, t]
        belief = prior.core.step(belief, state, action_embedding[:, t])
        step_logits = posterior.logits(belief, embedding[:, t])
        state = sample_one_hot(step_logits, noise[:, t], posterior.unimix).flatten(-2).to(belief.dtype)
        beliefs.append(belief)
        states.append(state)
        logits.append(step_logits)
    return Rollout(torch.stack(beliefs, 1), torch.stack(states, 1), torch.stack(logits, 1))
