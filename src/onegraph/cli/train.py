"""`onegraph train dreamer`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onegraph.cli.arguments import TrainOptions, base_config, expand, parse, pick, with_env_kwargs
from onegraph.config import load_json
from onegraph.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Train DreamerV3.

    Options without a prefix belong to the run, those under --env, --agent, --replay and --optimization to its parts.
    Short forms: --task, --num-envs, --workers, --observations, --action-repeat, --image-size (of --env.*), --lr (of
    --agent.lr), --fast, --compile-learner, --compile-rollout, --mixed-precision (of --optimization.*).

    Attributes:
        config: What to run.
        preset: Where the defaults come from; see `onegraph config --list`.
        size: Model size on top of the preset: tiny, size1m .. size400m.
        directory: Of the run; default runs/<task>-<seed>.
        resume: Continue the run in the directory from its latest checkpoint; its saved config gives the defaults.
        overwrite: Delete a run that lies in the directory first.
        quiet: No progress.
        env_kwargs: Keyword arguments of the environment as a JSON object, for example '{"gravity": 9.8}'.
    """

    config: TrainOptions
    preset: str = "default"
    size: str = ""
    directory: Path | None = None
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    env_kwargs: str = ""


def train_dreamer(argv: Sequence[str]) -> int:
    """Trains; 130 or 143 where a signal ended the run."""
    argv = expand(argv)
    directory = pick(argv, "--directory")
    saved = None
    if "--resume" in argv and directory and (Path(directory) / "config.json").is_file():
        saved = load_json(TrainConfig, Path(directory) / "config.json")
    default = TrainArgs(config=base_config(argv, saved))
    args = parse(TrainArgs, argv, "onegraph train dreamer", default)
    config = with_env_kwargs(args.config, args.env_kwargs)
    run_dir = args.directory or Path("runs") / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', config.env.task)}-{config.seed}"
    if args.overwrite and args.resume:
        raise ValueError("train: --resume and --overwrite exclude each other; give one of them")
    if args.overwrite and run_dir.exists():
        if not (run_dir / "config.json").is_file():
            raise ValueError(
                f"train: --overwrite: {run_dir} is not a run directory (no config.json); nothing was deleted"
            )
        shutil.rmtree(run_dir)

    from onegraph.train.online import OnlineTrainer

    trainer = OnlineTrainer(config, run_dir, resume=args.resume, progress=not args.quiet)
    trainer.run()
    if trainer.stopped_by is not None:
        print(f"stopped by {trainer.stopped_by}; continue with --resume --directory {run_dir}", file=sys.stderr)
        return {"SIGINT": 130, "SIGTERM": 143}[trainer.stopped_by]
    return 0
