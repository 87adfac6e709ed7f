"""Small learners and batches for tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from tensordict import TensorDict

from onegraph.dreamer.config import DreamerConfig, sized
from onegraph.dreamer.loss import DreamerV3Loss
from onegraph.specs import ArraySpec
from onegraph.train.audit import random_entry

MICRO = replace(
    sized("tiny"),
    belief_dim=16,
    hidden_dim=8,
    num_categoricals=4,
    num_classes=4,
    units=8,
    image_depth=2,
    imagination_length=3,
    warmup_steps=0,
    lr=1e-3,
)

VECTOR = ArraySpec(shape=(3,), dtype="float32")
SCALAR = ArraySpec(shape=(), dtype="float32")
TOKEN = ArraySpec(shape=(), dtype="int32", num_classes=(5,))
FLAGS = ArraySpec(shape=(2,), dtype="int32", num_classes=(2, 3))
IMAGE = ArraySpec(shape=(64, 64, 3), dtype="uint8")
MOVE = ArraySpec(shape=(2,), dtype="float32")
GRIP = ArraySpec(shape=(), dtype="int32", num_classes=(4,))


def micro_loss(
    observation: dict[str, ArraySpec] | None = None,
    action: dict[str, ArraySpec] | None = None,
    config: DreamerConfig = MICRO,
) -> DreamerV3Loss:
    return DreamerV3Loss(config, observation or {"vector": VECTOR}, action or {"action": MOVE})


def random_batch(loss: DreamerV3Loss, size: tuple[int, int] = (3, 6)) -> TensorDict:
    model = loss.world_model
    zeros = torch.zeros(size, dtype=torch.bool)
    is_first = zeros.clone()
    is_first[0, 0] = True
    if size[1] > 3:
        is_first[1, 3] = True
    return TensorDict(
        {
            "observation": TensorDict({k: random_entry(s, size) for k, s in loss.observation_specs.items()}, size),
            "action": TensorDict({k: random_entry(s, size) for k, s in loss.action_specs.items()}, size),
            "reward": torch.randn(size),
            "is_first": is_first,
            "is_last": is_first.roll(-1, 1),
            "is_terminal": zeros,
            "belief": torch.randn(*size, model.belief_dim),
            "state": torch.zeros(*size, model.state_dim, dtype=torch.uint8),
        },
        size,
    )
