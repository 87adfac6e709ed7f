"""Hyper-parameters of DreamerV3 and its model sizes. Torch-free, so that the command line can read it at once.

Source of every default: danijar/dreamerv3 `dreamerv3/configs.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from onegraph.stepper.modes import check_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class DreamerConfig:
    """Networks, objective and optimizer of one DreamerV3 learner; the defaults are the reference's (200 M parameters).

    Attributes:
        belief_dim: Width of the deterministic state.
        hidden_dim: Width of the RSSM's layers.
        num_categoricals: Latent variables of the stochastic state.
        num_classes: Classes of each.
        num_blocks: Blocks of the recurrent core; divides `belief_dim`.
        recurrent_model: "block_gru" or "gru".
        core_layers: Hidden layers of the recurrent core.
        posterior_layers: Layers of the posterior.
        prior_layers: Layers of the prior.
        units: Width of encoder, decoder and heads.
        image_depth: Channel multiplier of image encoder and decoder.
        encoder_layers: Layers for vector observations.
        decoder_layers: Layers for vector observations.
        decoder_blocks: Blocks of the image decoder's start; divides `belief_dim` and `4 * image_depth`.
        reward_layers: Layers of the reward head.
        continue_layers: Layers of the continuation head.
        actor_layers: Layers of the actor.
        value_layers: Layers of the critics.
        num_bins: Support of reward and value heads.
        unimix: Uniform share in the latent categoricals.
        free_nats: Lower clip of both KL losses.
        min_std: Smallest standard deviation of the continuous actor.
        max_std: Largest standard deviation of the continuous actor.
        imagination_length: Imagined transitions H.
        imagination_last: Imagine from the last K steps of each sequence; 0 means all.
        horizon: Discount is `1 - 1 / horizon` steps.
        lmbda: Of the lambda-returns.
        entropy_scale: Weight of the policy's entropy.
        slow_scale: Weight of the critic's regression to the slow critic.
        slow_tau: Rate at which the slow critic follows.
        return_rate: Rate of the return normaliser's percentiles.
        return_low: Lower percentile, 0..1.
        return_high: Upper percentile, 0..1.
        return_limit: Smallest scale that advantages are divided by.
        reconstruction_scale: Weight of each reconstructed key.
        reward_scale: Weight of the reward loss.
        continue_scale: Weight of the continuation loss.
        dynamics_scale: Weight of the dynamics KL.
        representation_scale: Weight of the representation KL.
        policy_scale: Weight of the policy loss.
        value_scale: Weight of the value loss.
        replay_value_scale: Weight of the value loss on replayed states.
        lr: Learning rate after warm-up.
        warmup_steps: Updates over which the learning rate rises from 0.
        decay_steps: Updates over which the learning rate falls to a tenth; 0 keeps it constant, as the reference does.
        agc: Adaptive gradient clip: largest gradient norm as a share of the parameter norm.
        beta1: Decay of the momentum.
        beta2: Decay of the squared gradients.
        eps: Added to the root of the squared gradients.
    """

    belief_dim: int = 8192
    hidden_dim: int = 1024
    num_categoricals: int = 32
    num_classes: int = 64
    num_blocks: int = 8
    recurrent_model: Literal["block_gru", "gru"] = "block_gru"
    core_layers: int = 1
    posterior_layers: int = 1
    prior_layers: int = 2
    units: int = 1024
    image_depth: int = 64
    encoder_layers: int = 3
    decoder_layers: int = 3
    decoder_blocks: int = 8
    reward_layers: int = 1
    continue_layers: int = 1
    actor_layers: int = 3
    value_layers: int = 3
    num_bins: int = 255
    unimix: float = 0.01
    free_nats: float = 1.0
    min_std: float = 0.1
    max_std: float = 1.0
    imagination_length: int = 15
    imagination_last: int = 0
    horizon: int = 333
    lmbda: float = 0.95
    entropy_scale: float = 3e-4
    slow_scale: float = 1.0
    slow_tau: float = 0.02
    return_rate: float = 0.01
    return_low: float = 0.05
    return_high: float = 0.95
    return_limit: float = 1.0
    reconstruction_scale: float = 1.0
    reward_scale: float = 1.0
    continue_scale: float = 1.0
    dynamics_scale: float = 1.0
    representation_scale: float = 0.1
    policy_scale: float = 1.0
    value_scale: float = 1.0
    replay_value_scale: float = 0.3
    lr: float = 4e-5
    warmup_steps: int = 1000
    decay_steps: int = 0
    agc: float = 0.3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-20

    def __post_init__(self) -> None:
        zero_is_fine = {"imagination_last", "warmup_steps", "decay_steps"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "recurrent_model":
                if value not in ("block_gru", "gru"):
                    raise ValueError(f"agent.recurrent_model is {value!r}; choose 'block_gru' or 'gru'")
            elif field.type == "int":
                lowest = 0 if field.name in zero_is_fine else 1
                if value < lowest:
                    raise ValueError(f"agent.{field.name} is {value}; it must be at least {lowest}")
            elif not 0 <= value < float("inf"):
                raise ValueError(f"agent.{field.name} is {value}; it must be finite and not negative")
        for name in ("unimix", "lmbda", "slow_tau", "return_rate", "return_low", "return_high", "beta1", "beta2"):
            if getattr(self, name) > 1:
                raise ValueError(f"agent.{name} is {getattr(self, name)}; it must lie in 0..1")
        for name in ("lr", "agc", "eps", "return_limit", "min_std"):
            if getattr(self, name) <= 0:
                raise ValueError(f"agent.{name} is {getattr(self, name)}; it must be above 0")
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise ValueError(f"agent.{name} is 1; it must be below 1, or nothing is ever averaged in")
        if self.num_bins < 2:
            raise ValueError(f"agent.num_bins is {self.num_bins}; it must be at least 2")
        if self.horizon < 2:
            raise ValueError(f"agent.horizon is {self.horizon}; it must be at least 2 steps")
        if self.max_std < self.min_std:
            raise ValueError(f"agent.max_std {self.max_std} is below agent.min_std {self.min_std}; raise it")
        if self.return_low >= self.return_high:
            raise ValueError(f"agent.return_low {self.return_low} must lie below agent.return_high {self.return_high}")
        if self.recurrent_model == "block_gru" and self.belief_dim % self.num_blocks:
            raise ValueError(
                f"agent.belief_dim is {self.belief_dim} with {self.num_blocks} blocks; it must be divisible by "
                "agent.num_blocks"
            )


_UNITS = {
    "size1m": 64,
    "size12m": 256,
    "size25m": 384,
    "size50m": 512,
    "size100m": 768,
    "size200m": 1024,
    "size400m": 1536,
}

_TINY: dict[str, Any] = {
    "belief_dim": 128,
    "hidden_dim": 32,
    "num_categoricals": 8,
    "num_classes": 8,
    "num_blocks": 4,
    "units": 32,
    "image_depth": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "actor_layers": 2,
    "value_layers": 2,
}

SIZES = ("tiny", *_UNITS)


def sized(name: str, base: DreamerConfig | None = None) -> DreamerConfig:
    """Returns a config of one of the reference's sizes, or `tiny` for tests and small tasks.

    Args:
        name: One of `SIZES`; the number is the count of parameters on a proprioceptive walker, roughly.
        base: Config whose other fields stay.

    Raises:
        ValueError: Unknown name.
    """
    base = base or DreamerConfig()
    if name == "tiny":
        return replace(base, **_TINY)
    if name not in _UNITS:
        raise ValueError(f"size {name!r} is unknown; choose one of {', '.join(SIZES)}")
    units = _UNITS[name]
    return replace(
        base, belief_dim=units * 8, hidden_dim=units, num_classes=units // 16, units=units, image_depth=units // 16
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DreamerV3OptimizationStepperConfig:
    """Keyword arguments of `DreamerV3OptimizationStepper`.

    Attributes:
        compile_train_step: Compile forward and backward as a whole; None does so on CUDA.
        compile_mode: A torch.compile mode.
        cudagraph: Capture forward and backward in a CUDA graph; None does so on CUDA.
        rssm_scan_unroll: Steps in one compiled call of a rollout inside a compiled step; None leaves rollouts alone.
        warmup_steps: Forward and backward passes of the warm-up.
        mixed_precision: bfloat16 autocast in the forward.
    """

    compile_train_step: bool | None = None
    compile_mode: str = "default"
    cudagraph: bool | None = None
    rssm_scan_unroll: int | None = 8
    warmup_steps: int = 5
    mixed_precision: bool = False

    def __post_init__(self) -> None:
        check_mode(self.compile_mode, "optimization")
        for name in ("rssm_scan_unroll", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"optimization.{name} is {value}; it must be at least 1")
