from __future__ import annotations

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from onegraph.train.plot import _smooth, learning_curve, read_run

PNG = b"\x89PNG\r\n"


def make_run(directory, *, seed=0, task="dmc_walker_walk", method=None, steps=50_000, final=900.0, config=True):
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(500, steps + 1, 500):
            value = final * (1 - np.exp(-step / 15_000)) + rng.normal(0, 40) + 20 * seed
            row = {"step": step, "time_s": 1.0, "loss/model": 1.0, "episode/return": value}
            if step % 5000 == 0:
                row["eval/return"] = value
            file.write(json.dumps(row) + "\n")
        file.write('{"step": 60000, "episode/ret')
    if config:
        values = {"env": {"task": task}} | ({} if method is None else {"method": method})
        (directory / "config.json").write_text(json.dumps(values))
    return directory


def make_reference(path, tasks=("dmc_walker_walk", "dmc_cheetah_run")):
    entries = [
        {
            "task": t,
            "method": "dreamerv3",
            "seed": str(s),
            "xs": [1e4, 2e4, 3e4, 4e4],
            "ys": [100, 300, 600 + s, 800 + s],
        }
        for t in tasks
        for s in range(5)
    ]
    path.write_bytes(gzip.compress(json.dumps(entries).encode()))
    return path


def test_read_run(tmp_path):
    curves = read_run(make_run(tmp_path / "a"))
    assert set(curves) == {"episode/return", "eval/return", "loss/model"}
    steps, values = curves["episode/return"]
    assert steps.dtype == values.dtype == np.float64
    assert steps.tolist() == list(range(500, 50_001, 500))
    assert len(curves["eval/return"][0]) == 10
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text(
        '{"step": 2, "a": 5}\n{"step": 1, "a": null, "b": 1}\n{"step": 1, "a": 4}\n'
    )
    steps, values = read_run(tmp_path / "b")["a"]
    assert (steps.tolist(), values.tolist()) == ([1, 2], [4, 5])


def test_one_seed(tmp_path):
    run = make_run(tmp_path / "a")
    summary = learning_curve([run], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    assert json.loads((tmp_path / "curve.json").read_text()) == summary
    (curve,) = summary["curves"]
    assert (curve["task"], curve["label"], curve["kind"], curve["num_seeds"]) == (
        "dmc_walker_walk",
        "onegraph",
        "run",
        1,
    )
    assert curve["final_median"] == curve["final_lower_quartile"] == curve["final_upper_quartile"]
    assert curve["final_median"] == pytest.approx(900, abs=100)
    assert curve["runs"] == [str(run)]


def test_several_seeds_with_reference(tmp_path):
    runs = [make_run(tmp_path / f"s{i}", seed=i) for i in range(4)]
    reference = make_reference(tmp_path / "ref.json.gz")
    summary = learning_curve(runs, tmp_path / "curve.png", reference=reference, bins=10)
    own, published = summary["curves"]
    assert own["num_seeds"] == 4
    assert own["steps"] == [2500.0 + 5000 * i for i in range(10)]
    finals = []
    for run in runs:
        steps, values = read_run(run)["episode/return"]
        finals.append(values[steps > 45_000].mean())
    assert own["final_median"] == pytest.approx(np.median(finals))
    assert own["final_lower_quartile"] == pytest.approx(np.percentile(finals, 25))
    assert own["final_step"] == 47_500
    assert (published["kind"], published["label"], published["num_seeds"]) == ("reference", "reference: dreamerv3", 5)
    assert published["final_median"] == 802


def test_seeds_of_different_length_end_where_half_of_them_end(tmp_path):
    runs = [make_run(tmp_path / f"s{i}", seed=i, steps=n) for i, n in enumerate((50_000, 30_000, 30_000))]
    (curve,) = learning_curve(runs, tmp_path / "curve.png", bins=10)["curves"]
    assert curve["final_step"] == 27_500


def test_tasks_get_panels_and_labels_group(tmp_path):
    runs = [make_run(tmp_path / f"{t}{s}", seed=s, task=t) for t in ("a", "b", "c", "d") for s in range(2)]
    summary = learning_curve(runs, tmp_path / "curve.svg", labels=["x", "y"] * 4, key="eval/return")
    assert [(c["task"], c["label"]) for c in summary["curves"]] == [(t, m) for t in "abcd" for m in "xy"]
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    config = make_run(tmp_path / "m", method="dreamer", config=True)
    assert learning_curve([config], tmp_path / "c.png", task="e")["curves"][0]["label"] == "dreamer"


@pytest.mark.parametrize("task", ["dmc_walker_walk", "dmc/walker-walk", "dm_control/walker-walk-v0", "DMC_Walker_Walk"])
def test_task_spellings_meet_the_reference(tmp_path, task):
    run = make_run(tmp_path / "a", task=task)
    assert (
        len(learning_curve([run], tmp_path / "c.png", reference=make_reference(tmp_path / "r.json.gz"))["curves"]) == 2
    )


def test_errors(tmp_path):
    run, out = make_run(tmp_path / "a", config=False), tmp_path / "c.png"
    reference = make_reference(tmp_path / "r.json.gz")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl: no such file; give the directory of a run"):
        learning_curve([empty], out)
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no metrics in it yet"):
        learning_curve([run, empty], out)
    with pytest.raises(ValueError, match="no metric 'episode/retrun'; did you mean 'episode/return'"):
        learning_curve([run], out, key="episode/retrun")
    with pytest.raises(ValueError, match="no runs were given"):
        learning_curve([], out)
    with pytest.raises(ValueError, match="2 labels for 1 runs"):
        learning_curve([run], out, labels=["a", "b"])
    with pytest.raises(ValueError, match="1 bins"):
        learning_curve([run], out, bins=1)
    with pytest.raises(ValueError, match=r"'c\.json' must end in \.png"):
        learning_curve([run], tmp_path / "c.json")
    with pytest.raises(
        ValueError, match="no reference curve for the task 'hopper'; name the task as one of: dmc_cheetah_run, "
    ):
        learning_curve([run], out, reference=reference, task="hopper")
    with pytest.raises(FileNotFoundError, match=r"give a \.json or \.json\.gz file"):
        learning_curve([run], out, reference=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('[{"task": 1}]')
    with pytest.raises(ValueError, match="not a list of runs with task, method, seed, xs and ys"):
        learning_curve([run], out, reference=tmp_path / "bad.json", task="dmc_walker_walk")
    assert not out.exists()


def test_no_global_state_and_no_torch(tmp_path):
    run = make_run(tmp_path / "a")
    code = (
        "import sys; from onegraph.train.plot import learning_curve; assert 'matplotlib' not in sys.modules;"
        "learning_curve([sys.argv[1]], sys.argv[1] + '/c.png');"
        "sys.exit('matplotlib.pyplot' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run)], check=False).returncode == 0


def test_few_points_are_joined_and_many_are_smoothed():
    x = np.arange(8) * 500.0
    y = np.array([20.0, 48, 94, 128, 209, 208, 395, 500])
    assert all(got is want for got, want in zip(_smooth(x, y), (x, y)))
    x = np.arange(1000.0)
    noise = np.random.default_rng(0).normal(size=1000)
    places, values = _smooth(x, 2 * x + noise)
    assert np.abs(values - 2 * places).max() < 1.0  # the noise itself reaches 3
