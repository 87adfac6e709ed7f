"""The command line. The only file that imports tyro; torch is imported only once a command runs."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from onegraph import __version__
from onegraph.config import load_json, suggest, to_dict
from onegraph.dreamer.config import SIZES, sized
from onegraph.train.config import PRESETS, TrainConfig, preset

USAGE = """\
usage: onegraph COMMAND [OPTIONS]

Train robot-learning policies, and prove that the fast path is right.

commands:
  train dreamer   train DreamerV3 on an environment
  eval            run episodes with a checkpoint
  plot            draw learning curves of one or several runs
  config          print presets and the resolved configuration of a run

  onegraph COMMAND --help shows the options of a command.
  --version prints the version.

exit codes: 0 done; 1 a fault of the program or a run whose losses are not finite; 2 a mistake in what was asked;
130 or 143 stopped by SIGINT or SIGTERM after the checkpoint was saved. ONEGRAPH_TRACEBACK=1 shows where an error arose.
"""

# Short forms of options that everybody types.
SHORT = {
    "--task": "--env.task",
    "--num-envs": "--env.num-envs",
    "--workers": "--env.workers",
    "--observations": "--env.observations",
    "--action-repeat": "--env.action-repeat",
    "--image-size": "--env.image-size",
    "--lr": "--agent.lr",
    "--fast": "--optimization.fast",
    "--compile-learner": "--optimization.compile-learner",
    "--compile-rollout": "--optimization.compile-rollout",
    "--mixed-precision": "--optimization.mixed-precision",
}

T = TypeVar("T")


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

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str = "default"
    size: str = ""
    directory: Path | None = None
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    env_kwargs: str = ""


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

    run: tyro.conf.Positional[Path]
    episodes: int | None = None
    seed: int | None = None
    mode: bool = False
    video: Path | None = None
    device: str = "auto"
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class PlotArgs:
    """Draw learning curves: one run as points and a smooth line, several seeds as median and interquartile band.

    Attributes:
        runs: Run directories; those of one task and label are seeds of one curve.
        output: The picture; a JSON summary is written next to it.
        key: Metric to draw.
        labels: Name of the curve that each run belongs to, in the order of the runs.
        reference: File of published curves (.json or .json.gz).
        task: Reference task to compare with; default that of the runs.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    output: Path = Path("learning_curve.png")
    key: str = "episode/return"
    labels: tuple[str, ...] | None = None
    reference: Path | None = None
    task: str | None = None


@dataclass(frozen=True, kw_only=True)
class ConfigArgs:
    """Print the resolved configuration as JSON. Takes every option of `onegraph train dreamer`.

    Attributes:
        config: Options on top of the preset.
        preset: Where the defaults come from.
        size: Model size on top of the preset.
        env_kwargs: Keyword arguments of the environment as a JSON object.
        list: Print the presets and sizes instead.
        run: Print the configuration that this run directory was started with instead.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str = "default"
    size: str = ""
    env_kwargs: str = ""
    list: bool = False
    run: Path | None = None


def _parse(cls: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    kwargs: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(cls, args=list(argv), prog=prog, **kwargs)


def _expand(argv: Sequence[str]) -> list[str]:
    """Replaces short forms, also in `--task=value`."""
    out = []
    for word in argv:
        name, equals, value = word.partition("=")
        out.append(SHORT.get(name.replace("_", "-"), name) + equals + value if name.startswith("--") else word)
    return out


def _pick(argv: Sequence[str], name: str) -> str | None:
    """Value of an option that decides the defaults of the others, read before the real parse."""
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


def _with_kwargs(config: TrainConfig, text: str) -> TrainConfig:
    if not text:
        return config
    try:
        kwargs = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"--env-kwargs {text!r} is not JSON ({error}); give an object such as '{{\"gravity\": 9.8}}'"
        ) from None
    if not isinstance(kwargs, dict):
        raise ValueError(f"--env-kwargs {text!r} is not a JSON object; give one such as '{{\"gravity\": 9.8}}'")
    return replace(config, env=replace(config.env, kwargs=kwargs))


def _base(argv: Sequence[str], saved: TrainConfig | None = None) -> TrainConfig:
    name, size = _pick(argv, "--preset"), _pick(argv, "--size")
    base = saved if saved is not None and name is None else preset(name or "default")
    return replace(base, agent=sized(size, base.agent)) if size else base


def _train_dreamer(argv: Sequence[str]) -> int:
    argv = _expand(argv)
    directory = _pick(argv, "--directory")
    saved = None
    if "--resume" in argv and directory and (Path(directory) / "config.json").is_file():
        saved = load_json(TrainConfig, Path(directory) / "config.json")
    default = TrainArgs(config=_base(argv, saved))
    args = _parse(TrainArgs, argv, "onegraph train dreamer", default)
    config = _with_kwargs(args.config, args.env_kwargs)
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


def _eval(argv: Sequence[str]) -> int:
    args = _parse(EvalArgs, argv, "onegraph eval")

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


def _plot(argv: Sequence[str]) -> int:
    args = _parse(PlotArgs, argv, "onegraph plot")
    if not args.runs:
        raise ValueError("plot: no run is given; name one or more run directories")

    from onegraph.train.plot import learning_curve

    learning_curve(
        list(args.runs), args.output, key=args.key, labels=args.labels, reference=args.reference, task=args.task
    )
    print(args.output)
    return 0


def _config(argv: Sequence[str]) -> int:
    argv = _expand(argv)
    args = _parse(ConfigArgs, argv, "onegraph config", ConfigArgs(config=_base(argv)))
    if args.list:
        for name, make in PRESETS.items():
            print(f"{name:12s} {(make.__doc__ or '').strip()}")
        print(f"\nsizes: {', '.join(SIZES)}")
        return 0
    config = (
        load_json(TrainConfig, args.run / "config.json") if args.run else _with_kwargs(args.config, args.env_kwargs)
    )
    print(json.dumps(to_dict(config), indent=2))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train dreamer": _train_dreamer,
    "eval": _eval,
    "plot": _plot,
    "config": _config,
}


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"onegraph {__version__}")
        return 0
    if argv[0] == "train":
        learners = [name.removeprefix("train ") for name in COMMANDS if name.startswith("train ")]
        if len(argv) < 2 or argv[1] in ("-h", "--help"):
            print(f"usage: onegraph train LEARNER [OPTIONS]\n\nlearners: {', '.join(learners)}")
            return 0 if len(argv) > 1 else 2
        if argv[1] not in learners:
            raise ValueError(f"onegraph train: unknown learner {argv[1]!r}; {suggest(argv[1], learners)}")
        return COMMANDS[f"train {argv[1]}"](argv[2:])
    if argv[0] not in COMMANDS:
        known = [*COMMANDS, "train"]
        close = difflib.get_close_matches(argv[0], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(known)}"
        raise ValueError(f"onegraph: unknown command {argv[0]!r}; {hint}")
    return COMMANDS[argv[0]](argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    # Idle OpenMP threads that spin starve environment workers and slow the learner down many times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError, ImportError) as error:
        return _fail(error, 2)
    except FloatingPointError as error:
        return _fail(error, 1)
    except RuntimeError as error:
        if type(error).__name__ != "EnvError":  # its module is only there once environments run
            raise
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail(RuntimeError("interrupted twice; the last checkpoint stands"), 130)


def _fail(error: BaseException, code: int) -> int:
    if os.environ.get("ONEGRAPH_TRACEBACK"):
        raise error
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
