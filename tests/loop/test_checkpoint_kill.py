"""Kills a process that saves in a tight loop, at random moments; what stays must always load."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import torch

from onegraph.train.checkpoint import CheckpointStore

TRIALS = 20

# One helper imports torch once and forks a writer for each trial; it prints the writer's process id.
HELPER = """
import os, sys
import torch
from onegraph.train.checkpoint import CheckpointStore

torch.set_num_threads(1)
for line in sys.stdin:
    start, same = map(int, line.split())
    pid = os.fork()
    if pid == 0:
        store = CheckpointStore(sys.argv[1])
        store.clean()
        n = start
        while True:
            step = 10**9 - 1 if same else n
            state = {"n": n, "w": torch.full((20_000,), float(n)), "b": torch.full((7,), n)}
            store.save(step, meta={"n": n}, state=state, extras={"extra.txt": lambda p: p.write_text(str(n))})
            os.write(1, b"saved %d\\n" % n)
            n += 1
    print("pid", pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    draw = random.Random(0)
    helper = subprocess.Popen(
        [sys.executable, "-c", HELPER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    reached = 0
    leftovers = 0
    try:
        for trial in range(TRIALS):
            same = trial >= TRIALS // 2  # the second half replaces one and the same step
            helper.stdin.write(f"{reached + 1} {int(same)}\n")
            helper.stdin.flush()
            pid, acknowledged = None, reached
            lines = iter(helper.stdout.readline, "")
            for line in lines:
                if line.startswith("pid"):
                    pid = int(line.split()[1])
                elif line.startswith("saved"):
                    acknowledged = int(line.split()[1])
                if pid is not None and acknowledged > reached:
                    break
            assert pid is not None
            time.sleep(draw.uniform(0.0, 0.06))
            os.kill(pid, signal.SIGKILL)
            for line in lines:
                if line.startswith("saved"):
                    acknowledged = int(line.split()[1])
                elif line.startswith("dead"):
                    break

            store = CheckpointStore(tmp_path)
            path = store.latest()
            assert path is not None
            meta, state = store.load(path)
            n = meta["n"]
            assert acknowledged <= n <= acknowledged + 1, "a save that was reported is lost, or one was made up"
            assert state["n"] == n
            assert bool((state["w"] == n).all())
            assert bool((state["b"] == n).all())
            assert (path / "extra.txt").read_text() == str(n)
            leftovers += sum(entry.name.startswith(".") for entry in store.folder.iterdir())
            reached = n
    finally:
        helper.stdin.close()
        helper.wait(timeout=10)
    assert leftovers > 0, "no kill fell into a save, so nothing was tested"
    store = CheckpointStore(tmp_path)
    before = store.load(store.latest() or tmp_path)[0]
    store.clean()
    after = store.load(store.latest() or tmp_path)[0]
    assert after == before
    assert not [name for name in os.listdir(store.folder) if name.startswith(".")]
    assert torch.is_tensor(store.load(store.latest() or tmp_path)[1]["w"])
