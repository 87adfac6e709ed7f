"""Learning curves as PNG: one seed as points and a smoothed line, several as median and interquartile band."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onegraph.config import suggest

Curve = tuple[np.ndarray, np.ndarray]
_MAX_POINTS = 3000
_FEW_POINTS = 50  # the window's width is a 50th of the axis: with fewer, it holds no two of them
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by colour-blind readers
_REFERENCE_COLORS = ("#555555", "#999999", "#333333")


def read_run(directory: Path | str) -> dict[str, Curve]:
    """Reads the metrics of a run.

    Args:
        directory: The run's directory, which holds `metrics.jsonl`.

    Returns:
        For each metric, such as `episode/return`: simulator frames (`env/frames`; where that is not logged, steps)
        float64 [N], ascending, and values float64 [N]. Rows without
        the metric, or with null, are left out; so is a line that is still being written.

    Raises:
        FileNotFoundError: There is no metrics file.
        ValueError: The file has no metrics.
    """
    path = Path(directory) / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give the directory of a run")
    columns: dict[str, list[tuple[float, float]]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            step = row.pop("step")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        row.pop("time_s", None)
        frames = row.pop("env/frames", None)
        step = step if frames is None else frames
        for key, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                columns.setdefault(key, []).append((step, value))
    if not columns:
        raise ValueError(f"{path}: no metrics in it yet; let the run log something or leave it out")
    return {key: _sorted(*zip(*pairs)) for key, pairs in columns.items()}


def learning_curve(
    runs: Sequence[Path | str],
    output: Path | str,
    *,
    key: str = "episode/return",
    labels: Sequence[str] | None = None,
    reference: Path | str | None = None,
    task: str | None = None,
    bins: int = 50,
) -> dict[str, Any]:
    """Draws runs against environment steps, a panel for each task, and writes the numbers next to the picture.

    Runs of the same task and label are seeds of one curve. Each seed is averaged within `bins` equal bins of steps
    (bins without data are interpolated between those with data); the curve is the median over seeds, the band their
    interquartile range, and it ends where fewer than half of the seeds have data. Reference curves are made alike.

    Args:
        runs: Run directories; the task and the label are read from each `config.json` (`task` or `env.task`; `method`).
        output: The picture, usually `.png`; the summary goes to the same name with `.json`.
        key: The metric to draw.
        labels: One for each run, in place of the method; runs with the same label are grouped.
        reference: Published curves: a JSON file (or .json.gz) with a list of `task`, `method`, `seed`, `xs`
            (environment steps), `ys`. Only tasks of the runs are drawn.
        task: Task of all runs, in place of those in their configs.
        bins: Number of bins, at least 2.

    Returns:
        The summary: `key`, `bins`, `image`, and `curves`, each with `task`, `label`, `kind` (`run` or `reference`),
        `num_seeds`, `final_step`, `final_median`, `final_lower_quartile`, `final_upper_quartile` (of the last bin),
        and the lists `steps`, `median`, `lower_quartile`, `upper_quartile`.

    Raises:
        FileNotFoundError: A run has no metrics file, or there is no reference file.
        ValueError: No runs, an empty run, an unknown metric, no reference for any task, or a wrong argument.
    """
    output = Path(output)
    if not runs:
        raise ValueError("plot: no runs were given; give at least one run directory")
    if labels is not None and len(labels) != len(runs):
        raise ValueError(f"plot: {len(labels)} labels for {len(runs)} runs; give one label for each run")
    if bins < 2:
        raise ValueError(f"plot: {bins} bins; give at least 2")
    if output.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"plot: the output {output.name!r} must end in .png, .pdf or .svg")
    groups = _group_runs([Path(run) for run in runs], key, labels, task)
    if reference is not None:
        groups += _group_reference(Path(reference), {group.task for group in groups})
    for group in groups:
        group.summarize(bins)
    _draw(groups, key, output)
    curves = [group.summary() for group in groups]
    summary = {"key": key, "bins": bins, "image": output.name, "curves": curves}
    output.with_suffix(".json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return summary


@dataclass(slots=True, kw_only=True)
class _Group:
    """Seeds of one curve."""

    task: str
    label: str
    kind: str
    seeds: list[Curve] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0))
    quartiles: np.ndarray = field(default_factory=lambda: np.zeros((3, 0)))  # lower, median, upper

    def summarize(self, bins: int) -> None:
        edges = np.linspace(0, max(max(x[-1] for x, _ in self.seeds), 1), bins + 1)
        centers = (edges[1:] + edges[:-1]) / 2
        table = np.stack([_binned(x, y, edges, centers) for x, y in self.seeds])  # [seeds, bins]
        enough = np.isfinite(table).sum(0) * 2 >= len(self.seeds)
        if not enough.any():
            raise ValueError(f"plot: the {len(self.seeds)} seeds of {self.label!r} share no steps; label them apart")
        self.steps = centers[enough]
        self.quartiles = np.nanpercentile(table[:, enough], [25, 50, 75], axis=0)

    def summary(self) -> dict[str, Any]:
        lower, median, upper = (row.tolist() for row in self.quartiles)
        return {
            "task": self.task,
            "label": self.label,
            "kind": self.kind,
            "num_seeds": len(self.seeds),
            "final_step": self.steps[-1].item(),
            "final_median": median[-1],
            "final_lower_quartile": lower[-1],
            "final_upper_quartile": upper[-1],
            "runs": self.sources,
            "steps": self.steps.tolist(),
            "median": median,
            "lower_quartile": lower,
            "upper_quartile": upper,
        }


def _group_runs(runs: list[Path], key: str, labels: Sequence[str] | None, task: str | None) -> list[_Group]:
    groups: dict[tuple[str, str], _Group] = {}
    for i, run in enumerate(runs):
        curves = read_run(run)
        if key not in curves:
            raise ValueError(f"{run}: no metric {key!r}; {suggest(key, sorted(curves))}")
        config = _read_config(run)
        env = config.get("env")
        found = config.get("task") or (env.get("task") if isinstance(env, dict) else None)
        name = str(task or found or "")
        label = labels[i] if labels is not None else str(config.get("method") or "onegraph")
        group = groups.setdefault((name, label), _Group(task=name, label=label, kind="run"))
        group.seeds.append(curves[key])
        group.sources.append(str(run))
    return list(groups.values())


def _group_reference(path: Path, tasks: set[str]) -> list[_Group]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give a .json or .json.gz file of reference curves")
    try:
        raw = path.read_bytes()
        entries = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        known = sorted({entry["task"] for entry in entries})
        wanted = {_plain_task(task): task for task in tasks}
        groups: dict[tuple[str, str], _Group] = {}
        for entry in entries:
            task = wanted.get(_plain_task(entry["task"]))
            if task is None:
                continue
            label = f"reference: {entry['method']}"
            group = groups.setdefault((task, label), _Group(task=task, label=label, kind="reference"))
            group.seeds.append(_sorted(entry["xs"], entry["ys"]))
            group.sources.append(f"{path.name} seed {entry['seed']}")
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a list of runs with task, method, seed, xs and ys ({error!r})") from error
    if not groups:
        some = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        given = ", ".join(sorted(repr(task) for task in tasks))
        raise ValueError(f"{path}: no reference curve for the task {given}; name the task as one of: {some}")
    return list(groups.values())


def _read_config(run: Path) -> dict[str, Any]:
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _plain_task(task: str) -> str:
    """One spelling for `dmc_walker_walk`, `dmc/walker-walk` and `dm_control/walker-walk-v0`."""
    plain = re.sub(r"[^a-z0-9]+", "_", re.sub(r"-v\d+$", "", task.lower()))
    return re.sub(r"^dm_control_", "dmc_", plain)


def _sorted(xs: Any, ys: Any) -> Curve:
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    if x.ndim != 1 or x.shape != y.shape or x.size == 0:
        raise ValueError(f"steps {list(x.shape)} and values {list(y.shape)} must be equally long, and not empty")
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def _binned(x: np.ndarray, y: np.ndarray, edges: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Means of `y` in each bin (low, high]; NaN before the first and after the last bin with data."""
    index = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(centers) - 1)
    count = np.bincount(index, minlength=len(centers))
    total = np.bincount(index, weights=y, minlength=len(centers))
    filled = count > 0
    means = total[filled] / count[filled]
    return np.interp(centers, centers[filled], means, left=np.nan, right=np.nan)


def _smooth(x: np.ndarray, y: np.ndarray) -> Curve:
    """Local straight lines under a Gaussian window, at 200 places: unbiased at both ends, whatever the spacing.

    Points too few to average come back as they are: a window between two of them would draw stairs.
    """
    if len(x) <= _FEW_POINTS:
        return x, y
    places = np.linspace(x[0], x[-1], 200) if x[-1] > x[0] else x[:1]
    width = max((x[-1] - x[0]) / 50, 1e-9)
    values = np.empty_like(places)
    for i, place in enumerate(places):
        near = np.abs(x - place)
        weight = np.exp(-0.5 * ((near - near.min()) / width) ** 2)  # less the nearest distance: never all zero
        weight /= weight.sum()
        mean_x, mean_y = weight @ x, weight @ y
        variance = weight @ (x - mean_x) ** 2
        slope = weight @ ((x - mean_x) * (y - mean_y)) / variance if variance > (0.1 * width) ** 2 else 0.0
        values[i] = mean_y + slope * (place - mean_x)
    return places, values


def _draw(groups: list[_Group], key: str, output: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    tasks = list(dict.fromkeys(group.task for group in groups))
    columns = min(len(tasks), 3)
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(5.2 * columns + (2.0 if columns == 1 else 0.0), 4.2 * rows), dpi=150, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    own = list(dict.fromkeys(group.label for group in groups if group.kind == "run"))
    references = list(dict.fromkeys(group.label for group in groups if group.kind == "reference"))
    for i, axes in enumerate(grid.flat):
        if i >= len(tasks):
            axes.set_axis_off()
            continue
        panel = [group for group in groups if group.task == tasks[i]]
        for group in sorted(panel, key=lambda g: g.kind == "run"):  # own runs on top
            if group.kind == "run":
                color, style = _COLORS[own.index(group.label) % len(_COLORS)], "-"
            else:
                color, style = _REFERENCE_COLORS[references.index(group.label) % len(_REFERENCE_COLORS)], "--"
            count = len(group.seeds)
            label = f"{group.label} ({count} seed{'s' if count > 1 else ''})"
            if count == 1:
                x, y = group.seeds[0]
                thin = np.linspace(0, len(x) - 1, min(len(x), _MAX_POINTS)).astype(int)
                axes.plot(x[thin], y[thin], ".", color=color, markersize=5, alpha=0.5, markeredgewidth=0)
                axes.plot(*_smooth(x, y), style, color=color, linewidth=2, label=label)
            else:
                lower, median, upper = group.quartiles
                axes.fill_between(group.steps, lower, upper, color=color, alpha=0.2, linewidth=0)
                axes.plot(group.steps, median, style, color=color, linewidth=2, label=label)
        axes.set_title(tasks[i])
        axes.set_xlabel("environment steps")
        axes.set_ylabel(key.replace("/", " "))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(left=0)
        axes.grid(True, color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small", loc="best")
    figure.savefig(output, dpi=150)
