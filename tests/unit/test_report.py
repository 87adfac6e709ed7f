"""Open-loop predictions: reconstructions while observations are seen, the model's own future afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onegraph.train.report import open_loop, open_loop_video

from ..fakes import IMAGE, VECTOR, micro_loss, random_batch


def test_the_future_is_predicted_without_its_observations() -> None:
    torch.manual_seed(0)
    loss = micro_loss({"image": IMAGE, "vector": VECTOR})
    # An untrained posterior is nearly uniform: two images would draw the same classes from the same noise.
    torch.nn.init.normal_(loss.world_model.posterior.head.weight, std=10)
    batch = random_batch(loss, (2, 7))
    before = torch.get_rng_state()
    first = open_loop(loss, batch, context=3)["image"]
    assert torch.equal(before, torch.get_rng_state())
    assert first.shape == (2, 7, 64, 64, 3)
    changed = batch.clone()
    changed["observation", "image"][:, 3:] = 255 - changed["observation", "image"][:, 3:]
    second = open_loop(loss, changed, context=3)["image"]
    assert torch.equal(first, second)
    changed["observation", "image"][:, :3] = 255 - changed["observation", "image"][:, :3]
    assert not torch.equal(first[:, :3], open_loop(loss, changed, context=3)["image"][:, :3])


def test_actions_and_resets_steer_the_future() -> None:
    torch.manual_seed(0)
    loss = micro_loss({"image": IMAGE})
    batch = random_batch(loss, (2, 7))
    first = open_loop(loss, batch, context=3)["image"]
    other = batch.clone()
    other["action", "action"][:, 5] += 1
    got = open_loop(loss, other, context=3)["image"]
    assert torch.equal(first[:, :5], got[:, :5])
    assert not torch.equal(first[:, 5:], got[:, 5:])
    other = batch.clone()
    other["is_first"][:, 5] = True
    assert not torch.equal(first[:, 5:], open_loop(loss, other, context=3)["image"][:, 5:])


def test_video_shows_truth_prediction_and_error_for_each_sequence() -> None:
    loss = micro_loss({"image": IMAGE})
    clip = open_loop_video(loss, random_batch(loss, (2, 7)), context=3)["image"]
    assert clip.dtype == np.uint8
    assert clip.shape[0] == 7
    assert clip.shape[1] >= 3 * 64
    assert clip.shape[2] >= 2 * 64
    assert clip.shape[3] == 3
    green, red = clip[0, 0, 0].tolist(), clip[6, 0, 0].tolist()
    assert green[1] > green[0]
    assert red[0] > red[1]


@pytest.mark.parametrize("context", [0, 7])
def test_context_must_leave_something_to_predict(context: int) -> None:
    loss = micro_loss({"image": IMAGE})
    with pytest.raises(ValueError, match=f"context is {context} of 7 steps"):
        open_loop(loss, random_batch(loss, (2, 7)), context=context)
