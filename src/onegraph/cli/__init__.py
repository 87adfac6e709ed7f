"""The command line: finds the command and turns errors into exit codes; torch is imported only once a command runs."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence

from onegraph import __version__
from onegraph.cli.config import show_config
from onegraph.cli.eval import evaluate_run
from onegraph.cli.plot import plot_runs
from onegraph.cli.train import train_dreamer
from onegraph.config import suggest

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

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train dreamer": train_dreamer,
    "eval": evaluate_run,
    "plot": plot_runs,
    "config": show_config,
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
