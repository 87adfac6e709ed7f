"""The audit finds what it is for: right modes pass, and each seeded fault is named."""

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from onegraph.stepper.audit import Audit, Subject, audit
from onegraph.stepper.stepper import OptimizationStepper


class Line(nn.Module):
    """Least squares; `fault` is done inside the loss."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.fault = fault
        self.calls = 0
        self.skewed = False

    def forward(self, batch: TensorDictBase) -> TensorDict:
        loss = (self.layer(batch["x"])[:, 0] - batch["y"]).square().mean()
        if self.fault == "break":
            torch._dynamo.graph_break()
        if self.fault == "item" and loss.item() < 0:
            loss = loss * 2
        if self.fault == "recompile":
            self.calls += 1
            loss = loss + 0.0 * self.calls
        if self.skewed:
            loss = loss * 1.001
        return TensorDict({"loss_line": loss})


def learner(fault: str = "") -> Subject:
    loss = Line(fault)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.01)
    stepper = OptimizationStepper(loss, optimizer, compile_train_step=False, cudagraph=False)

    def skew(stepper: OptimizationStepper) -> None:
        loss.skewed = True

    return Subject(stepper=stepper, batch=batch, modes={"skew": skew})


def batch(update: int) -> TensorDict:
    x: Tensor = torch.randn(8, 3)
    return TensorDict({"x": x, "y": x.sum(-1)}, [8])


def run(fault: str, *modes: str) -> Audit:
    return audit(lambda: learner(fault), modes, updates=2, further=3)


def test_right_modes_pass() -> None:
    found = run("", "eager", "cudagraph", "train_step")
    assert [m.name for m in found.modes] == ["eager", "cudagraph", "train_step"]
    assert found.is_ok, found
    assert all(len(m.updates) == 2 for m in found.modes)
    assert found.modes[1].is_emulated  # this learner lives on the CPU, whatever the machine has
    assert found.modes[2].num_graphs > 0


def test_another_result_is_named() -> None:
    (mode,) = run("", "skew").modes
    assert not mode.is_ok
    first = mode.first
    assert first is not None
    assert first[0] == 0
    assert first[1].relative > 1e-5


def test_a_graph_break_is_found() -> None:
    (mode,) = run("break", "train_step").modes
    assert not mode.is_ok
    assert mode.breaks


def test_a_value_read_is_found() -> None:
    (mode,) = run("item", "cudagraph").modes
    assert not mode.is_ok
    assert mode.breaks


def test_a_recompile_is_found() -> None:
    (mode,) = run("recompile", "train_step").modes
    assert not mode.is_ok
    assert mode.recompiles or mode.num_late_graphs


@pytest.mark.parametrize(("modes", "words"), [(["train-step"], "unknown mode"), ([], "no mode")])
def test_bad_modes_are_refused(modes: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        audit(learner, modes, updates=1, further=0)
