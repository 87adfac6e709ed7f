"""The DreamerV3 loop: act -> store -> send -> update -> write latents back -> receive -> log -> evaluate -> save."""

from __future__ import annotations

import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from onegraph.config import diff, from_dict, save_json, to_dict
from onegraph.data.replay import Replay
from onegraph.dreamer.policy import DreamerPolicy
from onegraph.envs.vector import VectorEnv
from onegraph.stepper.compile import announce_compiles
from onegraph.train.checkpoint import CheckpointStore
from onegraph.train.clock import Every, Rate, Ratio, Timer
from onegraph.train.collect import (
    CONFIRM_EVAL_SEED,
    EVAL_SEED,
    PERIODIC_EVAL_SEED,
    Collector,
    EpisodeTracker,
    check_rendering,
    evaluate,
    make_batch,
    replay_fields,
)
from onegraph.train.config import MIB, TrainConfig, is_resumable
from onegraph.train.device import pick_device, restore_rng, rng_state, set_threads
from onegraph.train.finite import check_finite, check_finite_state
from onegraph.train.learner import describe, is_compiled, make_learner
from onegraph.train.log import Logger
from onegraph.train.signals import StopRequest, graceful_stop
from onegraph.train.video import require_video


class OnlineTrainer:
    """One DreamerV3 run in one directory.

    Args:
        config: What to run.
        directory: Gets config.json, metrics.jsonl, checkpoints/, videos/ and the learning curve.
        resume: Continue from the latest checkpoint there.
        progress: Show a progress bar or lines.

    Raises:
        ValueError: The directory holds another run, or a resumed run's config differs; the text shows how.
        FileNotFoundError: Nothing to resume.
    """

    def __init__(
        self, config: TrainConfig, directory: Path | str, *, resume: bool = False, progress: bool = True
    ) -> None:
        self.config = config
        self.directory = Path(directory)
        self.store = CheckpointStore(self.directory, keep=config.keep)
        checkpoint = self._claim_directory(resume)
        if config.video:
            require_video()
            check_rendering(config.env)
        self.device = pick_device(config.device)
        torch.manual_seed(config.seed)
        self.stopped_by: str | None = None
        self._is_same_row = True
        self.envs = VectorEnv(config.env, seed=config.seed)
        try:
            threads = set_threads(config.threads, is_parallel=self.envs.is_parallel)
            self._build()
            self.logger = Logger(
                self.directory,
                sinks=config.sinks,
                total_steps=config.steps,
                progress="auto" if progress else False,
                config=to_dict(config),
                resume_step=self._restore(checkpoint),
            )
        except BaseException:
            self.envs.close()
            raise
        self._announce(threads, checkpoint)

    def _claim_directory(self, resume: bool) -> Path | None:
        latest = self.store.latest()
        if not resume:
            if latest is not None or (self.directory / "metrics.jsonl").exists():
                raise ValueError(
                    f"train: {self.directory} holds a run already; add --resume to continue it, --overwrite to start over, "
                    "or choose another --directory"
                )
            self.directory.mkdir(parents=True, exist_ok=True)
            save_json(self.config, self.directory / "config.json")
            return None
        if latest is None:
            raise FileNotFoundError(f"train: {self.directory} has no complete checkpoint; run without --resume")
        saved = from_dict(TrainConfig, self.store.load(latest)[0]["config"])
        differences = [line for line in diff(saved, self.config) if not is_resumable(line.split(":")[0])]
        if differences:
            raise ValueError(
                "train: --resume with a config that differs from the saved run's:\n  "
                + "\n  ".join(differences)
                + "\nrepeat the saved values, or start a new run in another --directory"
            )
        self.store.clean()
        shutil.rmtree(self.directory / "replay", ignore_errors=True)  # memory maps of a killed process
        save_json(self.config, self.directory / "config.json")
        return latest

    def _build(self) -> None:
        c = self.config
        self.mode = c.optimization.resolved(self.device.type)
        self.loss_module, self.stepper = make_learner(
            c, self.envs.observation_specs, self.envs.action_specs, self.device
        )
        self.policy = DreamerPolicy(self.loss_module, compile=self.mode.compile_policy)
        self._is_warm = not is_compiled(self.mode)
        model = self.loss_module.world_model
        self.replay = Replay(
            replay_fields(self.envs.observation_specs, self.envs.action_specs, model.belief_dim, model.state_dim),
            num_streams=c.env.num_envs,
            capacity=c.replay.capacity,
            window=c.batch_length + 1,
            seed=c.seed,
            online=c.replay.online,
            memory_budget=c.replay.memory_mib * MIB,
            directory=self.directory / "replay",
        )
        self.collector = Collector(self.policy, self.envs, self.replay)
        self.tracker = EpisodeTracker(c.env.num_envs)
        self.ratio = Ratio(c.train_ratio / (c.batch_size * c.batch_length))
        self.clocks = {
            "log": Every(c.log_every, initial=False),
            "eval": Every(c.eval_every, initial=False),
            "save": Every(c.save_every, initial=False),
        }
        self.timer, self.rate = Timer(), Rate()
        self.step = self.updates = self.episodes = self.owed = 0
        self.recent: deque[float] = deque(maxlen=20)
        self._sums: TensorDict | None = None
        self._num_sums = 0
        self._updates_per_s: float | None = None
        self._is_solved = False

    def _announce(self, threads: int, checkpoint: Path | None) -> None:
        def entries(specs: Any) -> str:
            return ", ".join(f"{k} {list(s.shape)} {s.dtype}" for k, s in specs.items())

        c, say = self.config, self.logger.message
        count = sum(p.numel() for p in self.loss_module.trained_parameters())
        say(f"task {c.env.task}: observations {entries(self.envs.observation_specs)}; actions "
            f"{entries(self.envs.action_specs)}")  # fmt: skip
        workers = "worker processes" if self.envs.is_parallel else "in line"
        say(f"{count:,} parameters on {self.device}, {describe(self.mode)}, {threads} CPU threads; {c.env.num_envs} "
            f"environments {workers}; {float(self.ratio.ratio):.4g} updates a step")  # fmt: skip
        if checkpoint is not None:
            say(f"resumed from {checkpoint} at step {self.step:,}, update {self.updates:,}")
            if not self._is_same_row:
                say("the environments did not come back to where they were (not deterministic in their seed): all streams "
                    "start new episodes")  # fmt: skip

    def run(self) -> dict[str, float]:
        """Trains until `config.steps` or a signal, and saves.

        Returns:
            Metrics of the final evaluation; empty if a signal ended the run.
        """
        with graceful_stop() as stop:
            try:
                self._loop(stop)
                self._save()
                result = {} if stop else self._finish(stop)
            finally:
                self.close()
        self.stopped_by = stop.requested
        return result

    def close(self) -> None:
        """Ends workers, files and sinks."""
        self.envs.close()
        self.replay.close()
        self.logger.close()

    def _loop(self, stop: StopRequest) -> None:
        self._learn(stop)  # what a signal left undone
        while self.step < self.config.steps and not stop and not self._is_solved:
            with self.timer.section("collect"):
                self.collector.act()
            self.step += self.config.env.num_envs
            if self.replay.num_windows >= self._learning_starts:
                self.owed += self.ratio(self.step)
            else:
                self.ratio.skip(self.step)
            self._learn(stop)
            with self.timer.section("wait"):
                self.collector.receive()
            self._track()
            self._report(stop)

    @property
    def _learning_starts(self) -> int:
        return max(1, self.config.learning_starts or self.config.batch_size * self.config.batch_length)

    def _track(self) -> None:
        for episode in self.tracker.update(self.collector.rows):
            self.episodes += 1
            self.recent.append(episode["episode/return"])
            self.logger.log(self.step, {**self._counters(), **episode})

    def _learn(self, stop: StopRequest) -> None:
        while self.owed and not stop:
            with self.timer.section("sample"):
                sample = self.replay.sample(self.config.batch_size)
                batch = make_batch(sample, self.device)
            if not self._is_warm:
                self._warm_up(batch)
            with self.timer.section("update"):
                metrics = self.stepper.step(self, batch)
            with self.timer.section("write_back"):
                context = batch["replay_context"]
                values = {"belief": context["belief"].float().cpu(), "state": context["state"].to(torch.uint8).cpu()}
                self.replay.write_back(sample, values, offset=1)
            self._sums = metrics if self._sums is None else self._sums + metrics
            self._num_sums += 1
            self.owed -= 1
            self.updates += 1
            self.rate.add()
            self._progress()

    def _warm_up(self, batch: TensorDict) -> None:
        """Compiles before the first update, and says what is being compiled; changes nothing that is trained."""
        started = time.perf_counter()
        with self.timer.section("compile"), announce_compiles(self.logger.message):
            self.stepper.warmup(batch)
        self._is_warm = True
        self.logger.message(f"the update is compiled after {time.perf_counter() - started:.1f} s")

    def _counters(self) -> dict[str, float]:
        return {
            "train/updates": self.updates,
            "train/episodes": self.episodes,
            "env/frames": self.step * self.config.env.frames_per_step,
        }

    def _progress(self) -> None:
        mean = float(np.mean(self.recent)) if self.recent else None
        self.logger.progress(self.step, updates_per_s=self._updates_per_s, episode_return=mean)

    def _report(self, stop: StopRequest) -> None:
        self._progress()
        if self.clocks["log"](self.step):
            self._log_learner()
        if self.clocks["eval"](self.step) and self.config.eval_episodes and self.step < self.config.steps:
            metrics = self._evaluate(stop, PERIODIC_EVAL_SEED)
            target = self.config.stop_return
            if target is not None and metrics.get("eval/return", -np.inf) >= target:
                # Once may be luck: the same policy has to do it again, on episodes that it was not picked for.
                self._is_solved = self._evaluate(stop, CONFIRM_EVAL_SEED).get("eval/return", -np.inf) >= target
                if self._is_solved:
                    self.logger.message(f"two evaluations reach stop_return {target:g}: done")
        if self.clocks["save"](self.step) and self.step < self.config.steps:
            self._save()

    def _log_learner(self) -> None:
        self._updates_per_s = self.rate.read()
        metrics: dict[str, Any] = {**self._counters(), "speed/updates_per_s": self._updates_per_s}
        metrics |= {f"time/{k}": v for k, v in self.timer.fractions().items()} | self.replay.stats()
        if self._sums is not None:
            sums: dict[str, Any] = (self._sums / self._num_sums).to_dict()
            means = {k: float(v) for k, v in sums.items()}
            check_finite(means, self.updates)
            metrics |= means
            self._sums, self._num_sums = None, 0
        self.logger.log(self.step, metrics)

    def _evaluate(self, stop: StopRequest, seed: int) -> dict[str, float]:
        c = self.config
        results = evaluate(
            self.policy,
            c.env,
            episodes=c.eval_episodes,
            seed=c.seed + seed,
            video=c.video,
            should_stop=lambda: bool(stop),
        )
        if results is None:
            return {}
        metrics = results.metrics()
        self.logger.log(self.step, {**self._counters(), **metrics})
        self.logger.message(
            f"step {self.step:,}: evaluation over {c.eval_episodes} episodes: return {metrics['eval/return']:.2f} "
            f"(min {metrics['eval/return_min']:.2f}, max {metrics['eval/return_max']:.2f})"
        )
        if results.frames is not None:
            self.logger.video(self.step, "eval/episode", results.frames)
        if c.video:
            self._record_open_loop()
        return metrics

    def _record_open_loop(self) -> None:
        from onegraph.train.report import open_loop_video

        if self.loss_module.world_model.encoder.image_keys and self.replay.num_windows:
            rng = np.random.default_rng(self.step)
            sample = self.replay.sample(min(6, self.config.batch_size), online=False, rng=rng)
            for key, frames in open_loop_video(self.loss_module, make_batch(sample, self.device)).items():
                self.logger.video(self.step, f"open_loop/{key}", frames, fps=8)

    def _finish(self, stop: StopRequest) -> dict[str, float]:
        from onegraph.train.plot import learning_curve, read_run

        self._log_learner()
        if not self.updates:
            self.logger.message(
                f"no update was possible: {self.replay.num_windows} windows are stored and learning starts at "
                f"{self._learning_starts} (each needs {self.replay.window} consecutive steps of one environment); raise "
                "steps, or lower batch_length, num_envs or learning_starts"
            )
        result = self._evaluate(stop, EVAL_SEED) if self.config.eval_episodes else {}
        if self.episodes or result:
            curves = read_run(self.directory)
            enough = len(curves.get("eval/return", ((), ()))[0]) >= 4  # else the training episodes say more
            key = "eval/return" if enough or not self.episodes else "episode/return"
            path = self.directory / "learning_curve.png"
            learning_curve([self.directory], path, key=key)
            self.logger.message(f"learning curve: {path}")
        return result

    def _save(self) -> None:
        started = time.perf_counter()
        state = {
            "loss_module": self.loss_module.state_dict(),
            "stepper": self.stepper.state_dict(),
            "collector": self.collector.state_dict(),
            "tracker": self.tracker.state_dict(),
            "ratio": self.ratio.state_dict(),
            "clocks": {k: v.state_dict() for k, v in self.clocks.items()},
            "rng": rng_state(self.device),
            "recent": list(self.recent),
            "sums": {} if self._sums is None else {k: v.cpu() for k, v in self._sums.to_dict().items()},
            "num_sums": self._num_sums,
        }
        check_finite_state(state["loss_module"], self.updates, self.store.latest())
        meta = {
            "config": to_dict(self.config),
            "observation_specs": {k: s.to_json() for k, s in self.envs.observation_specs.items()},
            "action_specs": {k: s.to_json() for k, s in self.envs.action_specs.items()},
            "updates": self.updates,
            "episodes": self.episodes,
            "owed": self.owed,
        }
        extras = {"replay": self.replay.save} if self.config.replay.save else {}
        path = self.store.save(self.step, meta=meta, state=state, extras=extras)
        self.logger.message(f"saved {path} in {time.perf_counter() - started:.1f} s")

    def _restore(self, checkpoint: Path | None) -> int | None:
        if checkpoint is None:
            return None
        meta, state = self.store.load(checkpoint)
        self.loss_module.load_state_dict(state["loss_module"])
        self.stepper.load_state_dict(state["stepper"])
        self.step, self.updates = meta["step"], meta["updates"]
        self.episodes = meta["episodes"]
        if (checkpoint / "replay").is_dir():
            self.replay.load(checkpoint / "replay")
            self.owed = meta["owed"]
            self.ratio.load_state_dict(state["ratio"], step=self.step)
        self._is_same_row = self.collector.load_state_dict(state["collector"])
        self.tracker.load_state_dict(state["tracker"])
        if not self._is_same_row:
            self.tracker.update(self.collector.rows)
        for name, clock in self.clocks.items():
            clock.load_state_dict(state["clocks"][name])
        self.recent.extend(state["recent"])
        if state["num_sums"]:
            sums = {k: v.to(self.device) for k, v in state["sums"].items()}
            self._sums, self._num_sums = TensorDict(sums, []), state["num_sums"]
        restore_rng(state["rng"], self.device)
        return self.step
