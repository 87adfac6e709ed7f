"""Prints the README's parity table: `python -m tests.golden.report`."""

from __future__ import annotations

import torch

from onegraph.dreamer.reference import reference_parameters
from onegraph.optim import DreamerV3Optimizer, SoftUpdate
from onegraph.stepper.stepper import total_loss

from .conftest import KINDS, Golden


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference as a share of the largest magnitude."""
    want = want.double()
    return ((got.detach().double() - want).abs().max() / want.abs().max().clamp(min=1e-6)).item()


def measure(kind: str) -> dict[str, float]:
    golden = Golden(kind)
    loss = golden.learner()
    batch, noise = golden.batch(), golden.noise(loss)
    out = loss.evaluate(batch, noise)
    features = {
        "wm/feat/deter": out.rollout.belief,
        "wm/feat/stoch": out.rollout.state.unflatten(-1, (4, 4)),
        "wm/feat/post_logit": out.rollout.posterior_logits,
        "wm/prior_logit": out.prior_logits,
    }
    worst = {
        "features": max(error(v, golden.tensor(k)) for k, v in features.items()),
        "loss terms": max(error(v, golden.tensor(f"loss/{k.removeprefix('rec/')}")) for k, v in out.elements.items()),
        "imagined returns": error(out.targets.returns.T, golden.tensor("imag/ret")),
    }
    loss = golden.learner()
    total_loss(loss(batch, noise)).backward()
    optimizer = DreamerV3Optimizer(loss.trained_parameters(), lr=1e-3, warmup_steps=0)
    targets = SoftUpdate(loss, tau=0.02)
    gradients = [
        error(tensor.grad, convert(golden.tensor(f"grad/{path}")).reshape(tensor.shape))
        for path, tensor, convert in reference_parameters(loss)
        if tensor.grad is not None and not (kind == "continuous_mean" and path.startswith("pol/head/action/mean"))
    ]
    worst["gradients"] = max(gradients)
    optimizer.step()
    targets.step()
    steps = [
        (tensor.detach() - convert(golden.tensor(f"optA/step1/params/{path}")).reshape(tensor.shape)).abs().max() / 1e-3
        for path, tensor, convert in reference_parameters(loss)
        if not path.startswith("retnorm")
        and not (kind == "continuous_mean" and path.startswith("pol/head/action/mean"))
    ]
    worst["parameters after a step, in learning rates"] = max(steps).item()
    return worst


def main() -> None:
    torch.set_num_threads(1)
    columns = {kind: measure(kind) for kind in KINDS}
    print("| largest difference, relative to the tensor's maximum | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in next(iter(columns.values())):
        print(f"| {name} | " + " | ".join(f"{c[name]:.1e}" for c in columns.values()) + " |")


if __name__ == "__main__":
    main()
