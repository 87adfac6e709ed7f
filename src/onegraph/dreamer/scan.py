"""The recurrence over time: posterior states of a sequence, given its actions, embeddings and noise.

Everything that is not sequential stays outside: action embeddings come in for all steps, prior logits are computed from
the stacked beliefs afterwards. Three backends compute the same: an explicit loop, the loop over a compiled step, and a
scan, one operator whose step is compiled.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from onegraph.dreamer.rssm import RSSMPosteriorV3, RSSMPriorV3
from onegraph.nn.distributions import sample_one_hot
from onegraph.stepper.compile import Region, compiled_scope
from onegraph.stepper.scan import Scan

Scope = Literal["step", "scan"]


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


class ObserveStep(nn.Module):
    """One step of the recurrence: core, then posterior.

    Args:
        prior: Holds the recurrent core.
        posterior: Posterior head.

    Compile: mutates nothing, draws nothing, does not synchronise.
    """

    def __init__(self, prior: RSSMPriorV3, posterior: RSSMPosteriorV3):
        super().__init__()
        self.core = prior.core
        self.posterior = posterior

    def forward(
        self, belief: Tensor, state: Tensor, action_embedding: Tensor, embedding: Tensor, keep: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of B sequences.

        Args:
            belief: [B, D].
            state: [B, S * C].
            action_embedding: Of the action that led to this step, [B, H].
            embedding: [B, E].
            keep: 0 where an episode starts, in the belief's dtype, [B, 1].
            noise: Exponential draws, float32 [B, S, C].

        Returns:
            Belief and state of this step, in the dtypes they came in with whatever autocast does in between, and the
            posterior logits [B, S, C].
        """
        belief, state = belief * keep, state * keep.to(state.dtype)
        next_belief = self.core.step(belief, state, action_embedding).to(belief.dtype)
        logits = self.posterior.logits(next_belief, embedding)
        next_state = sample_one_hot(logits, noise, self.posterior.unimix).flatten(-2).to(state.dtype)
        return next_belief, next_state, logits


class Recurrence:
    """Runs a prior and a posterior over sequences with the backend that was selected; the explicit loop by default.

    Not a module: it owns no parameters, so `state_dict` does not change with the backend.

    Args:
        prior: Holds the recurrent core.
        posterior: Posterior head.
    """

    def __init__(self, prior: RSSMPriorV3, posterior: RSSMPosteriorV3):
        self.prior, self.posterior = prior, posterior
        self.step = ObserveStep(prior, posterior)
        self.scope: Scope | None = None
        self.is_compiled = False
        self._region: Region | None = None
        self._scan: Scan | None = None

    def select(self, scope: Scope, *, unroll: int = 1, compile: bool = True, **compile_kwargs: Any) -> None:
        """Selects a backend, in place of one selected before.

        Args:
            scope: "step" compiles one step of the explicit loop; "scan" runs all steps as one operator.
            unroll: Steps in one compiled call of the scan.
            compile: False selects the backend without a compile scope of its own, for an enclosing compiled step;
                outside of one it then runs the plain loop.
            compile_kwargs: Settings of torch.compile; `dynamic` defaults to False.

        Raises:
            ValueError: Unknown scope, bad `unroll`, or the modules have been compiled on their own.
        """
        if scope not in ("step", "scan"):
            raise ValueError(f"compile_rollout: scope is {scope!r}; choose 'step' or 'scan'")
        if not isinstance(unroll, int) or isinstance(unroll, bool) or unroll < 1:
            raise ValueError(f"compile_rollout: unroll is {unroll!r}; it must be a whole number of at least 1")
        taken = compiled_scope(self.prior) or compiled_scope(self.posterior)
        if compile and taken:
            raise ValueError(
                f"compile_rollout: {taken} has been compiled on its own; one compile scope owns a module: leave out one"
            )
        self.scope, self.is_compiled = scope, compile
        self._region = self._scan = None
        if scope == "scan":
            self._scan = Scan(self.step, "RSSM step", unroll=unroll, **compile_kwargs)
        elif compile:
            self._region = Region(_call, "RSSM step", **compile_kwargs)

    def __call__(
        self, belief: Tensor, state: Tensor, action: Tensor, embedding: Tensor, reset: Tensor, noise: Tensor
    ) -> Rollout:
        """Posterior trajectory.

        Args:
            belief: Initial belief, [B, D].
            state: Initial state, [B, S * C].
            action: The action that led to each step, [B, T, A].
            embedding: Observation embeddings, [B, T, E].
            reset: True where an episode starts: belief, state and action are zeroed before that step, bool [B, T].
            noise: Exponential draws, float32 [B, T, S, C].

        Compile: mutates nothing, draws nothing, does not synchronise.
        """
        keep = (~reset).unsqueeze(-1).to(belief.dtype)
        action_embedding = self.prior.core.embed_action(action * keep.to(action.dtype))
        is_scan = self._scan is not None and (self.is_compiled or torch.compiler.is_compiling())
        if is_scan and action.shape[0]:
            assert self._scan is not None
            xs = tuple(x.transpose(0, 1).contiguous() for x in (action_embedding, embedding, keep, noise))
            return Rollout(*(y.transpose(0, 1) for y in self._scan((belief.contiguous(), state.contiguous()), xs)))
        outputs = []
        for t in range(action.shape[1]):
            args = (belief, state, action_embedding[:, t], embedding[:, t], keep[:, t], noise[:, t])
            out = self.step(*args) if self._region is None else self._region(self.step, *args)
            belief, state = out[:2]
            outputs.append(out)
        return Rollout(*(torch.stack(y, 1) for y in zip(*outputs)))


def _call(step: ObserveStep, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return step(*args)
