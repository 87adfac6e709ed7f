"""The complete DreamerV3 objective as one module: a batch of replayed sequences in, weighted losses out.

Source: danijar/dreamerv3 `dreamerv3/agent.py`, `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from onegraph.dreamer.behavior import Behavior, ImaginedTargets
from onegraph.dreamer.config import DreamerConfig
from onegraph.dreamer.imagine import Imagination, Imagine
from onegraph.dreamer.scan import Rollout
from onegraph.dreamer.world_model import WorldModel, features
from onegraph.specs import ArraySpec
from onegraph.stepper.compile import Region, compiled_scope

LearnerScope = Literal["losses", "all"]


class Noise(NamedTuple):
    """Every random number of one update. B sequences, T steps, K imagination starts a sequence, N = B * K, horizon H.

    Attributes:
        posterior: Exponential draws, [B, T, S, C].
        action: See `Actor.draw_noise`, [H, N, A].
        prior: Exponential draws, [H, N, S, C].
    """

    posterior: Tensor
    action: Tensor
    prior: Tensor


class Evaluation(NamedTuple):
    """One evaluation of the objective, before any mean.

    Attributes:
        elements: Unweighted losses, each as it enters its mean: [B, T], policy and value [B, K], repval [B, K - 1].
        rollout: Posterior trajectory.
        prior_logits: [B, T, S, C].
        imagination: Imagined rollout.
        targets: Imagined returns and their parts.
        metrics: Detached scalars.
    """

    elements: dict[str, Tensor]
    rollout: Rollout
    prior_logits: Tensor
    imagination: Imagination
    targets: ImaginedTargets
    metrics: dict[str, Tensor]


class DreamerV3Loss(nn.Module):
    """World model, actor, value and replay-value losses; owns every parameter of the learner once.

    The batch is a TensorDict [B, T]. At each step t it holds the observation and what led to it:
        ("observation", key): [B, T, *shape].
        ("action", key): The action taken before this observation, [B, T, *shape].
        "reward": Arrived with this observation, float [B, T].
        "is_first", "is_last", "is_terminal": bool [B, T].
        "belief", "state": Stored latents before each step, [B, T, D] and [B, T, S * C]; only t = 0 is read.

    The result is a TensorDict []:
        "loss_<name>": Weighted scalar losses with gradient; their sum is the objective.
        "metrics": Detached scalars named area/name.
        "replay_context": Detached posterior "state" and "belief", TensorDict [B, T], to be written back into replay.

    Args:
        config: Sizes and coefficients.
        observation_specs: Observation entries.
        action_specs: Action entries.

    Compile: draws `Noise` from the global generator of the batch's device unless it is given; in training mode the
    return normaliser's buffers are updated in place; does not synchronise.
    """

    def __init__(
        self,
        config: DreamerConfig,
        observation_specs: Mapping[str, ArraySpec],
        action_specs: Mapping[str, ArraySpec],
    ):
        super().__init__()
        self.config = config
        self.observation_specs = dict(observation_specs)
        self.action_specs = dict(action_specs)
        action_dim = sum(spec.flat_dim for spec in action_specs.values())
        self.world_model = WorldModel(config, observation_specs, action_dim)
        self.behavior = Behavior(config, action_specs, self.world_model.feat_dim)
        self.imagine = Imagine(self.world_model.prior, self.behavior.actor)
        self.learner_scope: LearnerScope | None = None
        self._regions: dict[str, Callable[..., Any]] = {}

    def compile_learner(self, scope: LearnerScope | None, **compile_kwargs: Any) -> None:
        """Compiles the losses in parts, each a region of its own; the rollout has `world_model.compile_rollout`.

        Args:
            scope: "losses": encoder; decoder, prior, reward and continuation heads with the model losses; actor, critic
                and slow critic with their losses on imagined states; the replay-value loss. "all": also the
                imagination rollout, its draws passed in as everywhere. None: back to eager.
            compile_kwargs: Settings of torch.compile; `dynamic` defaults to False.

        Raises:
            ValueError: Unknown scope, or a module of the learner has been compiled on its own.
        """
        if scope not in (None, "losses", "all"):
            raise ValueError(f"compile_learner: scope is {scope!r}; choose None, 'losses' or 'all'")
        taken = compiled_scope(self)
        if scope and taken:
            raise ValueError(
                f"compile_learner: {taken} has been compiled on its own; one compile scope owns a module: leave out one"
            )
        self.learner_scope = scope
        self.imagine.select(scope == "all", **compile_kwargs)
        parts: dict[str, Callable[..., Any]] = {
            "encoder": self.world_model.encode,
            "model losses": self.world_model.losses,
            "actor and critic losses": self.behavior.losses,
            "replay-value loss": self.behavior.replay_value_loss,
        }
        self._regions = {name: Region(fn, name, **compile_kwargs) for name, fn in parts.items()} if scope else {}

    def _run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        return self._regions.get(name, function)(*args)

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that the optimizer steps: all but the slow critic's."""
        return (p for p in self.parameters() if p.requires_grad)

    def target_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(online, slow) parameter pairs for a target updater."""
        yield from zip(self.behavior.value.parameters(), self.behavior.slow_value.parameters())

    def num_starts(self, length: int) -> int:
        """Imagination starts K of a sequence of `length` steps."""
        return min(self.config.imagination_last or length, length)

    def check_batch(self, batch: TensorDictBase) -> None:
        """Refuses a batch of the wrong form.

        Raises:
            ValueError: It is not [B, T] with T at least 2.
        """
        if batch.batch_dims != 2 or batch.batch_size[1] < 2:
            raise ValueError(
                f"DreamerV3Loss: batch size {tuple(batch.batch_size)}; it must be [B, T] with T at least 2"
            )

    def draw_noise(self, batch_size: int, length: int, device: torch.device | str | None = None) -> Noise:
        """Draws the noise of one update, in a fixed order, from the device's global generator."""
        c = self.config
        latent = (c.num_categoricals, c.num_classes)
        starts = batch_size * self.num_starts(length)
        return Noise(
            posterior=torch.empty(batch_size, length, *latent, device=device).exponential_(),
            action=self.behavior.actor.draw_noise((c.imagination_length, starts), device),
            prior=torch.empty(c.imagination_length, starts, *latent, device=device).exponential_(),
        )

    def evaluate(self, batch: TensorDictBase, noise: Noise) -> Evaluation:
        """All losses, elementwise. Arguments as in `forward`."""
        model, behavior = self.world_model, self.behavior
        observation = {key: batch["observation", key] for key in self.observation_specs}
        is_last, is_terminal, reward = batch["is_last"], batch["is_terminal"], batch["reward"].float()
        rollout = model.observe(
            self._run("encoder", model.encode, observation),
            behavior.actor.encode({key: batch["action", key] for key in self.action_specs}),
            batch["is_first"],
            batch["belief"][:, 0].float(),
            batch["state"][:, 0].float(),
            noise.posterior,
        )
        prior_logits, elements = self._run("model losses", model.losses, rollout, observation, reward, is_terminal)

        starts = self.num_starts(is_last.shape[1])
        belief, state = rollout.belief[:, -starts:], rollout.state[:, -starts:]
        imagination = self.imagine(belief.flatten(0, 1), state.flatten(0, 1), noise.action, noise.prior)
        imagined, targets, metrics = self._run("actor and critic losses", behavior.losses, model, imagination)
        elements |= {name: loss.mean(0).unflatten(0, (-1, starts)) for name, loss in imagined.items()}
        elements["repval"] = self._run(
            "replay-value loss",
            behavior.replay_value_loss,
            features(belief, state),
            reward[:, -starts:],
            is_last[:, -starts:],
            is_terminal[:, -starts:],
            targets.returns[0].unflatten(0, (-1, starts)),
        )
        return Evaluation(elements, rollout, prior_logits, imagination, targets, metrics)

    def forward(self, batch: TensorDictBase, noise: Noise | None = None) -> TensorDict:
        """The objective on one batch.

        Args:
            batch: See the class.
            noise: Draws to use; None draws them here.

        Raises:
            ValueError: The batch has fewer than 2 steps, or entries are missing.
        """
        self.check_batch(batch)
        batch_size, length = batch.batch_size
        if noise is None:
            noise = self.draw_noise(batch_size, length, batch["reward"].device)
        out = self.evaluate(batch, noise)
        means = {name: loss.mean() for name, loss in out.elements.items()}
        metrics = {f"loss/{name}": mean.detach() for name, mean in means.items()} | out.metrics
        result: dict[str, Any] = {f"loss_{name}": self._scale(name) * mean for name, mean in means.items()}
        result["metrics"] = TensorDict(metrics, [])
        result["replay_context"] = TensorDict(
            {"state": out.rollout.state.detach(), "belief": out.rollout.belief.detach()}, [batch_size, length]
        )
        return TensorDict(result, [])

    def _scale(self, name: str) -> float:
        c = self.config
        if name.startswith("rec/"):
            return c.reconstruction_scale
        return {
            "rew": c.reward_scale,
            "con": c.continue_scale,
            "dyn": c.dynamics_scale,
            "rep": c.representation_scale,
            "policy": c.policy_scale,
            "value": c.value_scale,
            "repval": c.replay_value_scale,
        }[name]
