"""Recurrent state-space model: the block-GRU core with its prior, and the posterior.

Names: belief is the deterministic state h, [..., D]; state is the stochastic state z, one-hot and flattened, [..., S *
C].
Source: danijar/dreamerv3 `dreamerv3/rssm.py`, class RSSM.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onegraph.nn.distributions import sample_one_hot
from onegraph.nn.layers import MLP, NORM_EPS, BlockLinear, Linear, RMSNorm

RecurrentModel = Literal["block_gru", "gru"]


def bound_action(action: Tensor) -> Tensor:
    """`a / max(1, |a|)` elementwise, the divisor without gradient: actions outside [-1, 1] are pulled back to the edge."""
    return action / action.detach().abs().clamp(min=1.0)


class BlockGRU(nn.Module):
    """Recurrent core: belief, state and action to the next belief.

    Args:
        state_dim: Columns of the flattened state.
        belief_dim: Columns of the belief, divisible by `num_blocks`.
        action_dim: Columns of the action vector.
        hidden_dim: Columns of each of the three input embeddings.
        num_blocks: Groups of the block-diagonal layers.
        num_layers: Block-linear hidden layers.
        norm_eps: Of the norms.

    Compile: no state, no draws, no synchronisation.
    """

    def __init__(
        self,
        *,
        state_dim: int,
        belief_dim: int,
        action_dim: int,
        hidden_dim: int,
        num_blocks: int = 8,
        num_layers: int = 1,
        norm_eps: float = NORM_EPS,
    ):
        super().__init__()
        if belief_dim % num_blocks:
            raise ValueError(
                f"RSSM: belief size {belief_dim} with {num_blocks} blocks; it must be divisible by the number of blocks"
            )
        self.num_blocks = num_blocks
        self.belief_in = Linear(belief_dim, hidden_dim)
        self.belief_norm = RMSNorm(hidden_dim, eps=norm_eps)
        self.state_in = Linear(state_dim, hidden_dim)
        self.state_norm = RMSNorm(hidden_dim, eps=norm_eps)
        self.action_in = Linear(action_dim, hidden_dim)
        self.action_norm = RMSNorm(hidden_dim, eps=norm_eps)
        dims = [belief_dim + 3 * hidden_dim * num_blocks] + [belief_dim] * num_layers
        self.hidden = nn.ModuleList(BlockLinear(i, o, num_blocks) for i, o in pairwise(dims))
        self.hidden_norms = nn.ModuleList(RMSNorm(belief_dim, eps=norm_eps) for _ in range(num_layers))
        self.gates = BlockLinear(dims[-1], 3 * belief_dim, num_blocks)

    def embed_action(self, action: Tensor) -> Tensor:
        """Action vector [..., A] -> [..., hidden_dim]; depends on nothing recurrent, so it can run for all steps at once."""
        return F.silu(self.action_norm(self.action_in(bound_action(action))))

    def step(self, belief: Tensor, state: Tensor, action_embedding: Tensor) -> Tensor:
        """One transition from an embedded action: [N, D], [N, S * C], [N, hidden_dim] -> next belief [N, D]."""
        blocks = self.num_blocks
        inputs = torch.cat(
            [
                F.silu(self.belief_norm(self.belief_in(belief))),
                F.silu(self.state_norm(self.state_in(state))),
                action_embedding.to(belief.dtype),
            ],
            -1,
        )
        shared = inputs.unsqueeze(-2).expand(*inputs.shape[:-1], blocks, inputs.shape[-1])
        grouped = torch.cat([belief.unflatten(-1, (blocks, -1)), shared], -1)
        x = grouped.flatten(-2)
        for layer, norm in zip(self.hidden, self.hidden_norms):
            x = F.silu(norm(layer(x)))
        # Reset, candidate and update lie side by side within each block, not across the whole width.
        gates = self.gates(x).unflatten(-1, (blocks, 3, -1))
        reset, candidate, update = (gate.flatten(-2) for gate in gates.unbind(-2))
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1)
        return update * candidate + (1 - update) * belief

    def forward(self, belief: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """One transition: belief [..., D], state [..., S * C], action [..., A] -> next belief [..., D]."""
        return self.step(belief, state, self.embed_action(action))


class GRU(nn.Module):
    """Plain recurrent core: an MLP layer on state and action, then a standard GRU cell.

    Arguments as in `BlockGRU`; `num_blocks` does not apply.
    """

    def __init__(
        self,
        *,
        state_dim: int,
        belief_dim: int,
        action_dim: int,
        hidden_dim: int,
        num_layers: int = 1,
        norm_eps: float = NORM_EPS,
    ):
        super().__init__()
        self.action_dim = action_dim
        self.inputs = MLP(state_dim + action_dim, hidden_dim, num_layers, norm_eps=norm_eps)
        self.cell = nn.GRUCell(hidden_dim, belief_dim)

    def embed_action(self, action: Tensor) -> Tensor:
        """Bounded action vector, [..., A]: the first layer mixes it with the state, so nothing else can run ahead."""
        return bound_action(action)

    def step(self, belief: Tensor, state: Tensor, action_embedding: Tensor) -> Tensor:
        """One transition: [N, D], [N, S * C], [N, A] -> next belief [N, D]."""
        x = self.inputs(torch.cat([state, action_embedding.to(state.dtype)], -1))
        batch = belief.shape[:-1]
        y = self.cell(x.reshape(-1, x.shape[-1]), belief.reshape(-1, belief.shape[-1]))
        return y.reshape(*batch, y.shape[-1])

    def forward(self, belief: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """One transition: belief [..., D], state [..., S * C], action [..., A] -> next belief [..., D]."""
        return self.step(belief, state, self.embed_action(action))


class RSSMPriorV3(nn.Module):
    """Recurrent core and prior over the next state, before its observation is seen.

    Args:
        action_shape: Shape of one action; its product is the width of the action vector. Give this or `action_dim`.
        hidden_dim: Width of the core's embeddings and of the prior's layers.
        rnn_hidden_dim: Width of the belief.
        num_categoricals: Latent variables S.
        num_classes: Classes C of each.
        action_dim: Width of the action vector.
        recurrent_model: "block_gru" or "gru".
        num_blocks: Blocks of the block-GRU.
        num_layers: Hidden layers of the core.
        prior_num_layers: Layers between belief and prior logits.
        norm_eps: Of the RMS norms.
        unimix: Share of the uniform distribution in each categorical.

    Raises:
        ValueError: No action width, a belief not divisible by the blocks, or an unknown recurrent model.

    Compile: draws from the global generator of the input's device unless `noise` is given; mutates nothing.
    """

    def __init__(
        self,
        action_shape: Sequence[int] | None = None,
        hidden_dim: int = 1024,
        rnn_hidden_dim: int = 8192,
        num_categoricals: int = 32,
        num_classes: int = 64,
        action_dim: int | None = None,
        *,
        recurrent_model: RecurrentModel = "block_gru",
        num_blocks: int = 8,
        num_layers: int = 1,
        prior_num_layers: int = 2,
        norm_eps: float = NORM_EPS,
        unimix: float = 0.01,
    ):
        super().__init__()
        if action_dim is None and action_shape is None:
            raise ValueError("RSSMPriorV3: neither action_shape nor action_dim is given; give one of them")
        if recurrent_model not in ("block_gru", "gru"):
            raise ValueError(f"RSSMPriorV3: recurrent_model is {recurrent_model!r}; choose 'block_gru' or 'gru'")
        self.num_categoricals = num_categoricals
        self.num_classes = num_classes
        self.unimix = unimix
        self.belief_dim = rnn_hidden_dim
        self.state_dim = num_categoricals * num_classes
        widths = {
            "state_dim": self.state_dim,
            "belief_dim": rnn_hidden_dim,
            "action_dim": prod(action_shape or ()) if action_dim is None else action_dim,
            "hidden_dim": hidden_dim,
            "num_layers": num_layers,
            "norm_eps": norm_eps,
        }
        self.core = BlockGRU(num_blocks=num_blocks, **widths) if recurrent_model == "block_gru" else GRU(**widths)
        self.layers = MLP(rnn_hidden_dim, hidden_dim, prior_num_layers, norm_eps=norm_eps)
        self.head = Linear(hidden_dim, self.state_dim)

    def logits(self, belief: Tensor) -> Tensor:
        """Prior logits of a belief: [..., D] -> [..., S, C]. Needs no recurrence: call it on all steps at once."""
        return self.head(self.layers(belief)).unflatten(-1, (self.num_categoricals, self.num_classes))

    def forward(
        self, state: Tensor, belief: Tensor, action: Tensor, *, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One transition and a sample of the prior.

        Args:
            state: [..., S * C].
            belief: [..., D].
            action: [..., A].
            noise: Exponential draws, float32 [..., S, C]; drawn here if None.

        Returns:
            Prior logits [..., S, C], sampled next state [..., S * C], next belief [..., D].
        """
        belief = self.core(belief, state, action)
        logits = self.logits(belief)
        return logits, _sample(logits, noise, self.unimix), belief


class RSSMPosteriorV3(nn.Module):
    """Posterior over the state, from the belief and the observation's embedding.

    Args:
        hidden_dim: Width of the layers.
        num_categoricals: Latent variables S.
        num_classes: Classes C of each.
        rnn_hidden_dim: Width of the belief.
        obs_embed_dim: Width of the embedding.
        num_layers: Layers before the logits.
        norm_eps: Of the RMS norms.
        unimix: Share of the uniform distribution in each categorical.

    Compile: draws from the global generator of the input's device unless `noise` is given; mutates nothing.
    """

    def __init__(
        self,
        hidden_dim: int = 1024,
        num_categoricals: int = 32,
        num_classes: int = 64,
        rnn_hidden_dim: int = 8192,
        obs_embed_dim: int = 1024,
        *,
        num_layers: int = 1,
        norm_eps: float = NORM_EPS,
        unimix: float = 0.01,
    ):
        super().__init__()
        self.num_categoricals = num_categoricals
        self.num_classes = num_classes
        self.unimix = unimix
        self.layers = MLP(rnn_hidden_dim + obs_embed_dim, hidden_dim, num_layers, norm_eps=norm_eps)
        self.head = Linear(hidden_dim, num_categoricals * num_classes)

    def logits(self, belief: Tensor, embedding: Tensor) -> Tensor:
        """[..., D], [..., E] -> [..., S, C]."""
        y = self.layers(torch.cat([belief, embedding.to(belief.dtype)], -1))
        return self.head(y).unflatten(-1, (self.num_categoricals, self.num_classes))

    def forward(self, belief: Tensor, embedding: Tensor, *, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Posterior logits and a sample.

        Args:
            belief: [..., D].
            embedding: [..., E].
            noise: Exponential draws, float32 [..., S, C]; drawn here if None.

        Returns:
            Logits [..., S, C] and state [..., S * C].
        """
        logits = self.logits(belief, embedding)
        return logits, _sample(logits, noise, self.unimix)


def _sample(logits: Tensor, noise: Tensor | None, unimix: float) -> Tensor:
    if noise is None:
        noise = torch.empty(logits.shape, device=logits.device).exponential_()
    return sample_one_hot(logits, noise, unimix).flatten(-2).to(logits.dtype)
