"""Times the learner's update, sampling and write-back, and prints a Markdown table and one JSON line.

    python benchmarks/learner.py [--sizes tiny size1m] [--repeats 7] [--threads 1]

Batches are 16 x 64 of a walker-like task (vectors of 14, 1 and 9, six continuous actions), horizon 15, float32, eager.
Each figure is the median of the repeats after two warm-up rounds; the three parts alternate, so that other work on the
machine hits them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from onegraph import ArraySpec, DreamerV3Loss, sized
from onegraph.data.replay import Replay
from onegraph.dreamer.stepper import make_stepper
from onegraph.train.collect import make_batch, replay_fields

F32 = "float32"
OBSERVATIONS = {
    "orientations": ArraySpec(shape=(14,), dtype=F32),
    "height": ArraySpec(shape=(), dtype=F32),
    "velocity": ArraySpec(shape=(9,), dtype=F32),
}
ACTIONS = {"action": ArraySpec(shape=(6,), dtype=F32)}
STREAMS, BATCH, LENGTH = 16, 16, 64


def filled_replay(belief_dim: int, state_dim: int, steps: int) -> Replay:
    fields = replay_fields(OBSERVATIONS, ACTIONS, belief_dim, state_dim)
    replay = Replay(fields, num_streams=STREAMS, capacity=steps, window=LENGTH + 1)
    rng = np.random.default_rng(0)
    for i in range(steps // STREAMS):
        step = {k: rng.normal(size=(STREAMS, *shape)).astype(dtype) for k, (shape, dtype) in fields.items()}
        for name in ("is_first", "is_last", "is_terminal"):
            step[name] = np.full(STREAMS, name == "is_first" and i % 500 == 0)
        step["state"] = np.zeros((STREAMS, state_dim), np.uint8)
        replay.add(step)
    return replay


def measure(size: str, repeats: int, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    loss = DreamerV3Loss(sized(size), OBSERVATIONS, ACTIONS)
    stepper = make_stepper(loss)
    model = loss.world_model
    replay = filled_replay(model.belief_dim, model.state_dim, steps)
    times: dict[str, list[float]] = {"sample": [], "update": [], "write_back": []}
    for _ in range(repeats + 2):
        t0 = time.perf_counter()
        sample = replay.sample(BATCH)
        batch = make_batch(sample, torch.device("cpu"))
        t1 = time.perf_counter()
        stepper.step(None, batch)
        t2 = time.perf_counter()
        context = batch["replay_context"]
        values = {"belief": context["belief"], "state": context["state"].to(torch.uint8)}
        replay.write_back(sample, values, offset=1)
        t3 = time.perf_counter()
        for name, span in zip(times, (t1 - t0, t2 - t1, t3 - t2)):
            times[name].append(span * 1e3)
    medians = {f"{name}_ms": statistics.median(values[2:]) for name, values in times.items()}
    share = (medians["sample_ms"] + medians["write_back_ms"]) / medians["update_ms"]
    return {**medians, "replay_share": share, "parameters": sum(p.numel() for p in loss.trained_parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "size1m"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20_000, help="steps in the replay")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = {size: measure(size, args.repeats, args.steps) for size in args.sizes}
    print("| size | parameters | update ms | sample ms | write back ms | replay share of the update |")
    print("|---|---|---|---|---|---|")
    for size, r in results.items():
        print(
            f"| {size} | {r['parameters']:,} | {r['update_ms']:.0f} | {r['sample_ms']:.2f} | {r['write_back_ms']:.2f} | "
            f"{r['replay_share']:.2%} |"
        )
    machine = {"torch": torch.__version__, "threads": args.threads, "cpu": platform.processor() or platform.machine()}
    print(json.dumps({"machine": machine, "repeats": args.repeats, "results": results}))


if __name__ == "__main__":
    main()
