"""`onegraph plot`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onegraph.cli.arguments import Paths, parse


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

    runs: Paths
    output: Path = Path("learning_curve.png")
    key: str = "episode/return"
    labels: tuple[str, ...] | None = None
    reference: Path | None = None
    task: str | None = None


def plot_runs(argv: Sequence[str]) -> int:
    """Draws the picture and prints its name."""
    args = parse(PlotArgs, argv, "onegraph plot")
    if not args.runs:
        raise ValueError("plot: no run is given; name one or more run directories")

    from onegraph.train.plot import learning_curve

    learning_curve(
        list(args.runs), args.output, key=args.key, labels=args.labels, reference=args.reference, task=args.task
    )
    print(args.output)
    return 0
