"""Open-loop predictions: what the world model expects to see when it gets no more observations."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from onegraph.dreamer.loss import DreamerV3Loss
from onegraph.dreamer.scan import Recurrence
from onegraph.nn.distributions import sample_one_hot
from onegraph.train.video import grid


@torch.no_grad()
def open_loop(loss: DreamerV3Loss, batch: TensorDictBase, *, context: int = 5) -> dict[str, Tensor]:
    """Filters the first `context` steps, then predicts the rest from the recorded actions alone.

    Resets inside the predicted part are followed. Draws from a generator state of its own; the caller's does not
    advance.

    Args:
        loss: The learner.
        batch: As the learner's, [B, T].
        context: Steps whose observations are seen, at least 1 and less than T.

    Returns:
        {image key: float32 [B, T, H, W, C] in 0..1}; the first `context` steps are reconstructions.
    """
    model = loss.world_model
    size, length = batch.batch_size
    if not 1 <= context < length:
        raise ValueError(f"open_loop: context is {context} of {length} steps; it must be at least 1 and less than that")
    with torch.random.fork_rng([batch["reward"].device] if batch["reward"].is_cuda else []):
        torch.manual_seed(0)
        noise = loss.draw_noise(size, length, batch["reward"].device).posterior
    action, first = loss.behavior.actor.encode(batch["action"]), batch["is_first"]
    seen = slice(None, context)
    # The plain loop: a compiled rollout would compile anew for these shapes.
    rollout = Recurrence(model.prior, model.posterior)(
        batch["belief"][:, 0].float(),
        batch["state"][:, 0].float(),
        action[:, seen],
        model.encoder(batch["observation"])[:, seen],
        first[:, seen],
        noise[:, seen],
    )
    beliefs, states = [*rollout.belief.unbind(1)], [*rollout.state.unbind(1)]
    for t in range(context, length):
        keep = (~first[:, t, None]).float()
        belief = model.prior.core(beliefs[-1] * keep, states[-1] * keep, action[:, t] * keep)
        state = sample_one_hot(model.prior.logits(belief), noise[:, t], model.prior.unimix).flatten(-2)
        beliefs.append(belief)
        states.append(state)
    decoded = model.decoder(torch.stack(beliefs, 1), torch.stack(states, 1))
    return {k: decoded[k] for k in model.decoder.image_keys}


def open_loop_video(loss: DreamerV3Loss, batch: TensorDictBase, *, context: int = 5) -> dict[str, np.ndarray]:
    """Clips of truth, prediction and error above each other, one column a sequence; the context has a green edge.

    Returns:
        {image key: uint8 [T, 3 * H + ..., B * W + ..., 3]}.
    """
    videos = {}
    for key, prediction in open_loop(loss, batch, context=context).items():
        truth = batch["observation", key].float() / 255
        error = ((prediction - truth) + 1) / 2
        panels = []
        for value in (truth, prediction, error):
            frames = (value.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
            frames = np.repeat(frames, 3, -1) if frames.shape[-1] == 1 else frames[..., :3]
            panels.append(_edge(frames, context))
        rows = [clip for panel in panels for clip in panel]
        videos[key] = grid(rows, columns=truth.shape[0])
    return videos


def _edge(frames: np.ndarray, context: int) -> np.ndarray:
    """Two pixels around each frame: green while observations are seen, red while they are not. [B, T, H, W, 3]."""
    out = np.pad(frames, [(0, 0), (0, 0), (2, 2), (2, 2), (0, 0)])
    for part, colour in ((slice(None, context), (40, 160, 60)), (slice(context, None), (200, 50, 40))):
        border = np.ones(out.shape[2:4], bool)
        border[2:-2, 2:-2] = False
        out[:, part][:, :, border] = colour
    return out
