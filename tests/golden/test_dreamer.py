"""Features, heads, losses, returns, gradients and one optimizer step equal the reference's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onegraph.dreamer.reference import reference_parameters
from onegraph.optim import DreamerV3Optimizer, SoftUpdate

from .conftest import CONFIG, Golden

FORWARD = 1e-4  # of the array's largest magnitude
GRADIENT = 1e-3  # of the tensor's largest gradient
STEP = 1e-2  # learning rates


def assert_close(got: torch.Tensor, want: np.ndarray, name: str, tolerance: float = FORWARD) -> None:
    value = got.detach().double().numpy()
    assert value.shape == want.shape, f"{name}: shape {value.shape}, reference {want.shape}"
    error = np.abs(value - want).max() / max(1e-6, np.abs(want).max())
    assert error < tolerance, f"{name}: {error:.2e} of its maximum"


def rows(x: torch.Tensor) -> torch.Tensor:
    """[H, N, ...] -> the reference's [N, H, ...]."""
    return x.transpose(0, 1)


def test_forward(golden: Golden) -> None:
    loss = golden.learner()
    batch, g = golden.batch(), golden.arrays
    out = loss.evaluate(batch, golden.noise(loss))
    model, behavior = loss.world_model, loss.behavior
    got = {
        "wm/tokens": model.encoder(batch["observation"]),
        "wm/feat/deter": out.rollout.belief,
        "wm/feat/stoch": out.rollout.state.unflatten(-1, (4, 4)),
        "wm/feat/post_logit": out.rollout.posterior_logits,
        "wm/prior_logit": out.prior_logits,
    }
    feat = torch.cat([out.rollout.belief, out.rollout.state], -1)
    got["wm/feat2tensor"] = feat
    for name, head in (("rew", model.reward), ("val", behavior.value), ("slowval", behavior.slow_value)):
        got[f"wm/{name}_logits"] = head(feat)
        got[f"wm/{name}_pred"] = head.decode(head(feat))
    got["wm/con_logit"] = model.continuation(feat)
    got["wm/con_prob"] = torch.sigmoid(model.continuation(feat))
    policy = behavior.actor(feat)[0]
    if golden.is_continuous:
        got["wm/pol/action/mean"], got["wm/pol/action/stddev"] = policy
    else:
        # The reference keeps raw logits; only differences matter to a softmax.
        assert_close(policy[0], golden.tensor("wm/pol/action/logits").log_softmax(-1).numpy(), "policy logits")
    for key, value in model.decoder(out.rollout.belief, out.rollout.state).items():
        want = g[f"wm/recon/{key}"]
        assert_close(value.reshape(want.shape), want, f"recon/{key}")
    imagined, targets = out.imagination, out.targets
    belief, state = imagined.feat.split([32, 16], -1)
    got["imag/feat/deter"] = rows(belief)
    got["imag/feat/stoch"] = rows(state).unflatten(-1, (4, 4))
    got["imag/con_prob"] = rows(targets.continuation)
    got["imag/val_pred"] = rows(targets.value)
    got["imag/ret"] = rows(targets.returns)
    got["imag/adv"] = rows(targets.advantage)
    got["retnorm/lo_after"] = behavior.return_norm.lo
    got["retnorm/hi_after"] = behavior.return_norm.hi
    got["retnorm/scale_after"] = behavior.return_norm.scale()
    for name, value in got.items():
        assert_close(value, g[name], name)
    actions = rows(imagined.action)
    want = g["imag/action/action"][:, :-1]
    assert_close(actions if golden.is_continuous else actions.argmax(-1), want, "imagined actions")
    assert_close(rows(targets.reward), g["imag/rew_pred"][:, 1:], "imagined rewards")
    assert_close(rows(targets.slow_value), g["imag/slowval_pred"][:, :-1], "imagined slow values")
    assert_close(rows(targets.weight), g["imag/weight"][:, :-1], "imagination weights")


def test_losses(golden: Golden) -> None:
    loss = golden.learner()
    batch, g = golden.batch(), golden.arrays
    noise = golden.noise(loss)
    elements = golden.learner().evaluate(batch, noise).elements
    names = {name.removeprefix("rec/"): value for name, value in elements.items()}
    assert {f"loss/{name}" for name in names} == {name for name in g if name.startswith("loss/")}
    for name, value in names.items():
        assert_close(value, g[f"loss/{name}"], name)
    out = loss(batch, noise)
    total = sum(value for key, value in out.items() if key.startswith("loss_"))
    assert_close(total, g["loss_total"], "loss_total")
    assert_close(out["replay_context", "belief"], g["optA/step1/replay_update/dyn/deter"], "written-back belief")
    want = g["optA/step1/replay_update/dyn/stoch"]
    assert_close(out["replay_context", "state"], want.reshape(*want.shape[:2], -1), "written-back state")
    assert not out["replay_context", "belief"].requires_grad
    assert not out["replay_context", "state"].requires_grad


def backward(golden: Golden):
    loss = golden.learner()
    out = loss(golden.batch(), golden.noise(loss))
    sum(value for key, value in out.items() if key.startswith("loss_")).backward()
    return loss


def is_noise(golden: Golden, path: str) -> bool:
    # Where the sample is the mean, the gradient of the mean is float noise around an exact zero.
    return golden.kind == "continuous_mean" and path.startswith("pol/head/action/mean")


def test_gradients(golden: Golden) -> None:
    loss = backward(golden)
    checked = set()
    for path, tensor, convert in reference_parameters(loss):
        if f"grad/{path}" not in golden.arrays:
            assert tensor.grad is None, f"{path}: the reference does not train it"
            continue
        checked.add(path)
        want = convert(golden.tensor(f"grad/{path}")).reshape(tensor.shape).numpy()
        assert tensor.grad is not None, path
        if not is_noise(golden, path):
            assert_close(tensor.grad, want, path, GRADIENT)
    assert checked == set(golden.group("grad/"))


def test_one_step(golden: Golden) -> None:
    loss = backward(golden)
    optimizer = DreamerV3Optimizer(loss.trained_parameters(), lr=1e-3, warmup_steps=0)
    targets = SoftUpdate(loss, tau=0.02)
    optimizer.step()
    targets.step()
    worst = {}
    for path, tensor, convert in reference_parameters(loss):
        if path.startswith("retnorm") or is_noise(golden, path):
            continue
        want = convert(golden.tensor(f"optA/step1/params/{path}")).reshape(tensor.shape)
        worst[path] = (tensor.detach().double() - want).abs().max().item() / 1e-3
    bad = {path: error for path, error in worst.items() if error > STEP}
    assert not bad, f"distance in learning rates: {bad}"


# Not continuous_mean: the mean head's gradient is float noise there, so its later steps differ by platform.
@pytest.mark.parametrize("kind", ["continuous", "discrete", "image"])
@pytest.mark.parametrize("schedule", ["optA", "optB"])
def test_three_steps(kind: str, schedule: str) -> None:
    golden = Golden(kind)
    lr, warmup = {"optA": (1e-3, 0), "optB": (1e-2, 5)}[schedule]
    loss = golden.learner()
    optimizer = DreamerV3Optimizer(loss.trained_parameters(), lr=lr, warmup_steps=warmup)
    targets = SoftUpdate(loss, tau=0.02)
    batch, noise = golden.batch(), golden.noise(loss)
    for n in (1, 2, 3):
        out = loss(batch, noise)
        total = sum(value for key, value in out.items() if key.startswith("loss_"))
        assert_close(total, golden.arrays[f"{schedule}/step{n}/loss"], f"loss of step {n}", 1e-3)
        assert_close(loss.behavior.return_norm.hi, golden.arrays[f"{schedule}/step{n}/retnorm_hi"], "hi", 1e-3)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        targets.step()
    for path, tensor, convert in reference_parameters(loss):
        if f"{schedule}/step3/params/{path}" in golden.arrays and not path.startswith("retnorm"):
            want = convert(golden.tensor(f"{schedule}/step3/params/{path}")).reshape(tensor.shape)
            assert (tensor.detach().double() - want).abs().max().item() / lr < 0.1, path


def test_config_is_the_golden_one(golden: Golden) -> None:
    agent = golden.config()["agent"]
    dynamics = agent["dyn"]["rssm"]
    assert (dynamics["deter"], dynamics["hidden"]) == (CONFIG.belief_dim, CONFIG.hidden_dim)
    assert (dynamics["stoch"], dynamics["classes"]) == (CONFIG.num_categoricals, CONFIG.num_classes)
    assert dynamics["blocks"] == CONFIG.num_blocks
    assert agent["imag_length"] == CONFIG.imagination_length
