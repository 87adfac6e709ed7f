"""What a DreamerV3 run is: environments, agent, replay, loop. Torch-free, so that the command line can read it at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from onegraph.dreamer.config import DreamerConfig, DreamerV3OptimizationStepperConfig, sized
from onegraph.envs.config import EnvConfig

MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """Where the steps are kept.

    Attributes:
        capacity: Steps in all streams together; the oldest go first.
        memory_mib: Beyond this the largest entries move to memory-mapped files.
        online: Train on each newest window once before sampling at random.
        save: Keep the replay in checkpoints. Without it a resumed run collects anew before it learns.
    """

    capacity: int = 5_000_000
    memory_mib: int = 4096
    online: bool = True
    save: bool = True

    def __post_init__(self) -> None:
        for name in ("capacity", "memory_mib"):
            if getattr(self, name) < 1:
                raise ValueError(f"replay.{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationConfig(DreamerV3OptimizationStepperConfig):
    """How the learner's update runs. Speed is a mode: nothing here changes what is computed.

    Attributes:
        fast: The fastest way on the device; fields given beside it are kept.
        compile_learner: Compile the losses in parts: "losses", or "all" with the imagination rollout.
        compile_rollout: Compile the recurrence over time: "step" or "scan".
        compile_policy: Compile the acting policy, one graph for each number of environments.
        compile_train_step: Compile forward and backward as a whole, in place of the parts.
        compile_mode: A torch.compile mode.
        cudagraph: Capture forward and backward in a CUDA graph.
        rssm_scan_unroll: Steps in one compiled call of the recurrence inside a compiled step; None leaves it alone.
        warmup_steps: Forward and backward passes of the warm-up.
        mixed_precision: bfloat16 autocast in the forward. The one field here that does change the numbers.
    """

    fast: bool = False
    compile_learner: Literal["losses", "all"] | None = None
    compile_rollout: Literal["step", "scan"] | None = None
    compile_policy: bool = False
    compile_train_step: bool | None = False
    cudagraph: bool | None = False
    warmup_steps: int = 2

    def __post_init__(self) -> None:
        DreamerV3OptimizationStepperConfig.__post_init__(self)
        if self.compile_train_step and (self.compile_learner or self.compile_rollout):
            parts = "compile_learner" if self.compile_learner else "compile_rollout"
            raise ValueError(
                f"optimization: compile_train_step and {parts} are both set; one compile scope owns the modules: leave "
                "out one of the two"
            )

    def resolved(self, device: str) -> OptimizationConfig:
        """With `fast` put into effect for a kind of device, "cpu" or "cuda"."""
        if not self.fast:
            return self
        if device == "cuda":
            parts = self.compile_learner or self.compile_rollout
            whole = {} if parts else {"compile_train_step": True}
            return replace(self, fast=False, cudagraph=True, compile_policy=True, **whole)
        if self.compile_train_step:
            return replace(self, fast=False)
        return replace(
            self,
            fast=False,
            compile_learner=self.compile_learner or "all",
            compile_rollout=self.compile_rollout or "step",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One DreamerV3 run. A step is one action of one environment stream.

    Attributes:
        env: Task and environments.
        agent: Networks, objective and optimizer.
        replay: Where the steps are kept.
        optimization: How the learner's update runs: eager, compiled, captured.
        steps: Environment steps of the whole run, all streams together.
        seed: Of parameters, environments, replay and every draw.
        batch_size: Sequences in a batch.
        batch_length: Steps of a sequence that are trained on; one more step gives the context.
        train_ratio: Replayed steps for each environment step: updates per step are `train_ratio / (batch_size *
            batch_length)`.
        learning_starts: Windows that the replay must hold before the first update; 0 means batch_size * batch_length.
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", "mps".
        threads: CPU threads of the learner; 0 means one beside worker processes and PyTorch's own choice otherwise.
        log_every: Steps between rows of averaged learner metrics.
        eval_every: Steps between evaluations; 0 means only at the end.
        eval_episodes: Episodes of an evaluation; 0 for none.
        stop_return: End the run early, once the mean return of an evaluation reaches this, and that of another on other
            episodes too; None never does.
        save_every: Steps between checkpoints; 0 means only at the end.
        keep: Checkpoints to keep, the newest.
        video: Record one episode at each evaluation; for image observations also the model's open-loop prediction.
        sinks: Where metrics go besides metrics.jsonl: "tensorboard", "wandb".
    """

    env: EnvConfig = field(default_factory=lambda: EnvConfig(task="CartPole-v1"))
    agent: DreamerConfig = field(default_factory=DreamerConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    steps: int = 1_100_000
    seed: int = 0
    batch_size: int = 16
    batch_length: int = 64
    train_ratio: float = 1024.0
    learning_starts: int = 0
    device: str = "auto"
    threads: int = 0
    log_every: int = 1000
    eval_every: int = 0
    eval_episodes: int = 10
    stop_return: float | None = None
    save_every: int = 50_000
    keep: int = 2
    video: bool = False
    sinks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lowest = {
            "steps": 1,
            "seed": 0,
            "batch_size": 1,
            "batch_length": 2,
            "train_ratio": 0,
            "learning_starts": 0,
            "threads": 0,
            "log_every": 1,
            "eval_every": 0,
            "eval_episodes": 0,
            "save_every": 0,
            "keep": 1,
        }
        for name, bound in lowest.items():
            value = getattr(self, name)
            if not bound <= value < float("inf"):
                raise ValueError(f"train: {name} is {value}; it must be finite and at least {bound}")
        if self.stop_return is not None and not (self.eval_every and self.eval_episodes):
            raise ValueError("train: stop_return needs evaluations along the way; set eval_every and eval_episodes")
        unknown = set(self.sinks) - {"tensorboard", "wandb"}
        if unknown:
            raise ValueError(f"train: sinks {sorted(unknown)} are unknown; choose tensorboard or wandb")
        shortest = self.env.num_envs * (self.batch_length + 1)
        if self.replay.capacity < shortest:
            raise ValueError(
                f"train: replay.capacity is {self.replay.capacity}, but {self.env.num_envs} streams of windows of "
                f"{self.batch_length + 1} steps need at least {shortest}; raise it or lower batch_length or env.num_envs"
            )


# Fields that a resumed run may change: none of them alters what has been learned so far.
RESUMABLE = (
    "steps",
    "device",
    "threads",
    "log_every",
    "eval_every",
    "eval_episodes",
    "stop_return",
    "save_every",
    "keep",
    "video",
    "sinks",
    "env.workers",
    "replay.save",
    "replay.memory_mib",
)
KEEPS_NUMBERS = frozenset(OptimizationConfig.__dataclass_fields__) - {"mixed_precision"}


def is_resumable(name: str) -> bool:
    """True if a resumed run may change the field of this dotted name."""
    part, _, rest = name.partition(".")
    return name in RESUMABLE or (part == "optimization" and rest in KEEPS_NUMBERS)


def _run(task: str, steps: int, num_envs: int, train_ratio: float, **env: object) -> TrainConfig:
    return TrainConfig(
        env=EnvConfig(task=task, num_envs=num_envs, **env),  # pyright: ignore[reportArgumentType]
        steps=steps,
        train_ratio=train_ratio,
    )


def _default() -> TrainConfig:
    """Any task with the reference's defaults at size1m."""
    return replace(TrainConfig(), agent=sized("size1m"))


def _dmc_proprio() -> TrainConfig:
    """DeepMind Control from vectors: walker_walk, size1m, 16 environments, one update a step."""
    run = _run("dmc/walker_walk", 1_100_000, 16, 1024, observations="proprio")
    return replace(run, agent=sized("size1m"))


def _dmc_vision() -> TrainConfig:
    """DeepMind Control from 64 x 64 pixels: walker_walk, 200 M parameters."""
    return _run("dmc/walker_walk", 1_100_000, 16, 256, observations="pixels")


def _atari() -> TrainConfig:
    """Atari with sticky actions, 96 x 96 gray, 51 M steps (204 M frames)."""
    return _run("atari/pong", 51_000_000, 16, 32)


def _atari100k() -> TrainConfig:
    """Atari with 110 k steps (440 k frames), 64 x 64 colour."""
    return _run("atari100k/pong", 110_000, 1, 256)


def _crafter() -> TrainConfig:
    """Crafter with rewards, 1.1 M steps."""
    return _run("crafter/reward", 1_100_000, 1, 512)


def _tiny() -> TrainConfig:
    """Small networks and batches for trying any task on a laptop; not meant for scores."""
    agent = replace(sized("tiny"), lr=4e-4, warmup_steps=200, imagination_last=8)
    return TrainConfig(
        env=EnvConfig(task="CartPole-v1", num_envs=4),
        agent=agent,
        replay=ReplayConfig(capacity=200_000),
        steps=10_000,
        batch_size=8,
        batch_length=16,
        train_ratio=64.0,
        save_every=5000,
    )


def _quick(task: str, num_envs: int, **changes: Any) -> TrainConfig:
    """Tiny networks, short windows, a high learning rate: small tasks on one CPU core, where operator calls cost most."""
    agent = replace(sized("tiny"), lr=1e-3, warmup_steps=100, horizon=100, imagination_last=8)
    run = TrainConfig(
        env=EnvConfig(task=task, num_envs=num_envs),
        agent=agent,
        replay=ReplayConfig(capacity=200_000),
        batch_size=16,
        batch_length=16,
        learning_starts=128,
        threads=1,
        save_every=5000,
    )
    return replace(run, **changes)


def _demo() -> TrainConfig:
    """CartPole-v1 on a laptop CPU in minutes; ends once twice ten episodes average 475 of 500 (make demo)."""
    run = _quick("CartPole-v1", 8, steps=20_000, train_ratio=64.0, eval_every=500, stop_return=475.0)
    return replace(run, agent=replace(run.agent, entropy_scale=3e-3, decay_steps=5000))


def _pendulum() -> TrainConfig:
    """Pendulum-v1 on a laptop CPU in minutes (make learn)."""
    run = _quick("Pendulum-v1", 4, steps=3500, train_ratio=256.0, eval_every=500, eval_episodes=20, log_every=500)
    return replace(run, agent=replace(run.agent, decay_steps=3500))


PRESETS = {
    "default": _default,
    "dmc_proprio": _dmc_proprio,
    "dmc_vision": _dmc_vision,
    "atari": _atari,
    "atari100k": _atari100k,
    "crafter": _crafter,
    "tiny": _tiny,
    "demo": _demo,
    "pendulum": _pendulum,
}


def preset(name: str) -> TrainConfig:
    """Builds a preset run.

    Raises:
        ValueError: Unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]()
