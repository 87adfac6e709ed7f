"""Golden numbers: arrays that the reference implementation computed for a tiny learner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from onegraph.dreamer.config import DreamerConfig
from onegraph.dreamer.loss import DreamerV3Loss, Noise
from onegraph.dreamer.reference import load_reference
from onegraph.specs import ArraySpec

DATA = Path(__file__).parent / "data"
KINDS = ("continuous", "continuous_mean", "discrete", "image")
FLAGS = {"reward", "is_first", "is_last", "is_terminal"}
CONFIG = DreamerConfig(
    belief_dim=32,
    hidden_dim=16,
    num_categoricals=4,
    num_classes=4,
    num_blocks=4,
    units=16,
    image_depth=2,
    encoder_layers=2,
    decoder_layers=2,
    actor_layers=2,
    value_layers=2,
    imagination_length=4,
    lr=1e-3,
    warmup_steps=0,
)


def observation_specs(arrays: dict[str, np.ndarray]) -> dict[str, ArraySpec]:
    specs = {}
    for name, value in arrays.items():
        key = name.removeprefix("obs/")
        if name.startswith("obs/") and key not in FLAGS:
            classes = (5,) if value.dtype == np.int32 else None
            specs[key] = ArraySpec(shape=value.shape[2:], dtype=value.dtype.name, num_classes=classes)
    return specs


class Golden:
    """One file of arrays, with the learner and the batch that it was computed from."""

    def __init__(self, kind: str):
        self.kind = kind
        with np.load(DATA / f"dreamerv3_tiny_{kind}.npz") as file:
            self.arrays = {name: file[name] for name in file.files}
        self.specs = observation_specs(self.arrays)
        self.is_continuous = kind.startswith("continuous")
        action = ArraySpec(shape=(3,), dtype="float32") if self.is_continuous else None
        self.action_specs = {"action": action or ArraySpec(shape=(), dtype="int32", num_classes=(4,))}

    def tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self.arrays[name]))

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        return {k.removeprefix(prefix): v for k, v in self.arrays.items() if k.startswith(prefix)}

    def config(self) -> dict[str, Any]:
        return json.loads(str(self.arrays["config_json"]))

    def learner(self, config: DreamerConfig = CONFIG) -> DreamerV3Loss:
        loss = DreamerV3Loss(config, self.specs, self.action_specs)
        load_reference(loss, self.group("params/"))
        return loss

    def batch(self) -> TensorDict:
        """The raw replay window, shifted as the training loop shifts it: index 0 is context only."""
        data = {k: torch.from_numpy(np.array(v)) for k, v in self.group("data/").items()}
        now = {k: v[:, 1:] for k, v in data.items()}
        before = {k: v[:, :-1] for k, v in data.items()}
        size = tuple(now["reward"].shape)
        return TensorDict(
            {
                "observation": TensorDict({k: now[k] for k in self.specs}, size),
                "action": TensorDict({"action": before["action"]}, size),
                **{k: now[k] for k in FLAGS},
                "belief": before["dyn/deter"],
                "state": before["dyn/stoch"].flatten(-2),
            },
            size,
        )

    def noise(self, loss: DreamerV3Loss) -> Noise:
        """Draws that make every sample what the golden run took: modes, and mean + std * eps."""
        size = self.arrays["obs/reward"].shape
        noise = Noise(*(torch.ones_like(x) for x in loss.draw_noise(*size)))
        if self.is_continuous:
            noise = noise._replace(action=self.tensor("const/actor_eps").expand_as(noise.action))
        return noise


@pytest.fixture(params=KINDS)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)
