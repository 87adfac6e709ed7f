"""`onegraph eval`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onegraph.cli.arguments import OnePath, parse


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Run episodes with a checkpoint and print the returns.

    Attributes:
        run: Run directory or step folder.
        episodes: Episodes to run; default those of the run's own evaluations.
        seed: Of environments and draws; default that of the run's own evaluations, which gives their result again.
        mode: Take the most likely action instead of a sample.
        video: Write a clip of the first episode to this .mp4 or .gif file.
        device: auto, cpu, cuda, ...
        json: Print one JSON object.
    """

    run: OnePath
    episodes: int | None = None
    seed: int | None = None
    mode: bool = False
    video: Path | None = None
    device: str = "auto"
    json: bool = False


def evaluate_run(argv: Sequence[str]) -> int:
    """Runs episodes and prints the returns."""
    args = parse(EvalArgs, argv, "onegraph eval")

    from onegraph.train.collect import EVAL_SEED, evaluate
    from onegraph.train.load import load_agent

    agent = load_agent(args.run, device=args.device)
    config = agent.config
    episodes = config.eval_episodes or 10 if args.episodes is None else args.episodes
    if episodes < 1:
        raise ValueError(f"eval: --episodes is {episodes}; it must be at least 1")
    seed = config.seed + EVAL_SEED if args.seed is None else args.seed
    results = evaluate(
        agent.policy, config.env, episodes=episodes, seed=seed, video=args.video is not None, mode=args.mode
    )
    assert results is not None  # nothing stops it
    metrics = results.metrics()
    if args.video is not None and results.frames is not None:
        from onegraph.train.video import write_video

        write_video(args.video, results.frames)
    if args.json:
        print(json.dumps({"run": str(args.run), "step": agent.step, "seed": seed, **metrics}))
        return 0
    print(f"{config.env.task}, step {agent.step:,}, {episodes} episodes")
    print(
        f"return {metrics['eval/return']:.2f} +- {metrics['eval/return_std']:.2f} (min {metrics['eval/return_min']:.2f}, "
        f"max {metrics['eval/return_max']:.2f}), length {metrics['eval/length']:.1f}"
    )
    success = metrics.get("eval/success")
    print("success " + ("not available" if success is None else f"{success:.0%}"))
    return 0
