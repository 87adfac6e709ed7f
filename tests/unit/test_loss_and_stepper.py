"""The objective as one module, the step, and the policy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from onegraph.dreamer.policy import DreamerPolicy
from onegraph.dreamer.stepper import make_stepper
from onegraph.stepper.stepper import OptimizationStepper, total_loss

from ..fakes import IMAGE, MICRO, MOVE, VECTOR, micro_loss, random_batch


def test_result_names_and_gradients() -> None:
    loss = micro_loss({"vector": VECTOR, "image": IMAGE})
    batch = random_batch(loss)
    out = loss(batch)
    names = {k for k in out.keys() if k.startswith("loss_")}  # noqa: SIM118
    want = {"rec/vector", "rec/image", "rew", "con", "dyn", "rep", "policy", "value", "repval"}
    assert names == {f"loss_{n}" for n in want}
    assert out["replay_context"].batch_size == batch.batch_size
    total_loss(out).backward()
    for name, parameter in loss.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
        else:
            assert "slow_value" in name


REACH = {
    "rec/vector": {"dec", "dyn", "enc"},
    "rew": {"rew", "dyn", "enc"},
    "con": {"con", "dyn", "enc"},
    "dyn": {"dyn", "enc"},
    "rep": {"dyn", "enc"},
    "policy": {"pol"},
    "value": {"val"},
    "repval": {"val", "dyn", "enc"},
}


@pytest.mark.parametrize("name", REACH)
def test_which_loss_reaches_which_module(name: str) -> None:
    loss = micro_loss(config=replace(MICRO, free_nats=0.0))
    for module in (loss.world_model.reward, loss.behavior.value, loss.behavior.slow_value):
        nn.init.normal_(module.head.weight, std=0.1)
    model, behavior = loss.world_model, loss.behavior
    groups = {
        "dyn": [model.prior, model.posterior],
        "enc": [model.encoder],
        "dec": [model.decoder],
        "rew": [model.reward],
        "con": [model.continuation],
        "pol": [behavior.actor],
        "val": [behavior.value],
    }
    batch = random_batch(loss)
    loss.evaluate(batch, loss.draw_noise(3, 6)).elements[name].mean().backward()
    reached = set()
    for group, modules in groups.items():
        grads = [p.grad for m in modules for p in m.parameters() if p.grad is not None]
        if any((g != 0).any() for g in grads):
            reached.add(group)
    assert reached == REACH[name]


def test_given_noise_decides_everything() -> None:
    loss = micro_loss()
    batch, noise = random_batch(loss), loss.draw_noise(3, 6)
    first, second = loss.eval()(batch, noise), loss(batch, noise)
    assert torch.equal(total_loss(first), total_loss(second))
    assert not torch.equal(total_loss(first), total_loss(loss(batch)))


def test_eval_mode_leaves_the_normaliser_alone() -> None:
    loss = micro_loss()
    batch = random_batch(loss)
    nn.init.normal_(loss.behavior.value.head.bias)
    loss.eval()(batch)
    assert loss.behavior.return_norm.hi == 0
    loss.train()(batch)
    assert loss.behavior.return_norm.hi != 0


def test_imagination_weight_starts_with_the_starts_continuation() -> None:
    loss = micro_loss()
    head = loss.world_model.continuation
    nn.init.zeros_(head.head.weight)
    feat = torch.zeros(4, 2, loss.world_model.feat_dim)
    targets = loss.behavior.targets(loss.world_model, feat, torch.zeros(4, 2))
    assert targets.weight[:, 0].tolist() == [0.5, 0.25, 0.125]
    nn.init.constant_(head.head.bias, -200.0)
    targets = loss.behavior.targets(loss.world_model, feat, torch.zeros(4, 2))
    assert (targets.weight == 0).all()


def test_imagination_can_start_from_the_last_steps_only() -> None:
    loss = micro_loss(config=replace(MICRO, imagination_last=2))
    elements = loss.evaluate(random_batch(loss), loss.draw_noise(3, 6)).elements
    assert elements["policy"].shape == (3, 2)
    assert elements["repval"].shape == (3, 1)
    assert elements["dyn"].shape == (3, 6)


def test_a_batch_without_time_is_refused() -> None:
    loss = micro_loss()
    with pytest.raises(ValueError, match="it must be \\[B, T\\] with T at least 2"):
        loss(random_batch(loss, (3, 1)))


def test_a_step_changes_parameters_and_returns_features() -> None:
    loss = micro_loss()
    stepper = make_stepper(loss)
    before = {k: v.clone() for k, v in loss.state_dict().items()}
    batch = random_batch(loss)
    metrics = stepper.step(None, batch)
    after = loss.state_dict()
    assert any(not torch.equal(before[k], after[k]) for k in before)
    assert batch["replay_context", "belief"].shape == (3, 6, 16)
    assert not batch["replay_context", "state"].requires_grad
    assert all(v.isfinite() and not v.requires_grad for v in metrics.values())
    kept = metrics.clone()
    stepper.step(None, random_batch(loss))
    assert all(torch.equal(kept[k], metrics[k]) for k in kept.keys())  # noqa: SIM118


class Owner:
    def __init__(self, loss_module: nn.Module):
        self.loss_module = loss_module


def test_another_trainers_loss_is_refused() -> None:
    loss = micro_loss()
    with pytest.raises(ValueError, match="owns another loss module"):
        make_stepper(loss).step(Owner(micro_loss()), random_batch(loss))


class Square(nn.Module):
    def __init__(self, name: str = "loss_square"):
        super().__init__()
        self.name = name
        self.x = nn.Parameter(torch.tensor(3.0))

    def forward(self, batch: TensorDict) -> TensorDict:
        return TensorDict({self.name: (self.x * batch["scale"].mean()).square()}, [])


def test_the_stepper_knows_no_algorithm() -> None:
    loss = Square()
    stepper = OptimizationStepper(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    batch = TensorDict({"scale": torch.ones(4)}, [4])
    for _ in range(50):
        metrics = stepper.step(None, batch)
    assert metrics["loss/total"].item() == pytest.approx(0, abs=1e-6)


def test_a_loss_module_without_losses_is_refused() -> None:
    loss = Square("squares")
    stepper = OptimizationStepper(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="name its losses loss_<name>"):
        stepper.step(None, TensorDict({"scale": torch.ones(4)}, [4]))


def test_policy_carries_no_graph_and_forgets_at_a_reset() -> None:
    loss = micro_loss()
    policy = DreamerPolicy(loss)
    observation = {"vector": torch.randn(2, 3)}
    carry = policy.initial(2)
    for _ in range(3):
        action, carry = policy.act(observation, torch.zeros(2, dtype=torch.bool), carry)
        assert all(not v.requires_grad and v.grad_fn is None for v in (*carry, *action.values()))
    first = torch.ones(2, dtype=torch.bool)
    torch.manual_seed(0)
    fresh, _ = policy.act(observation, first, policy.initial(2))
    torch.manual_seed(0)
    again, _ = policy.act(observation, first, carry)
    assert torch.equal(fresh["action"], again["action"])


def test_policy_equals_one_step_of_the_rollout() -> None:
    loss = micro_loss(action={"action": MOVE})
    policy, model = DreamerPolicy(loss), loss.world_model
    observation = torch.randn(2, 1, 3)
    carry = policy.initial(2)._replace(action=torch.randn(2, 2), belief=torch.randn(2, 16))
    torch.manual_seed(0)
    _, new = policy.act({"vector": observation[:, 0]}, torch.zeros(2, dtype=torch.bool), carry)
    torch.manual_seed(0)
    noise = torch.empty(2, 1, 4, 4).exponential_()
    out = model.observe(
        model.encoder({"vector": observation}),
        carry.action[:, None],
        torch.zeros(2, 1, dtype=torch.bool),
        carry.belief,
        carry.state,
        noise,
    )
    torch.testing.assert_close(new.belief, out.belief[:, 0])
    torch.testing.assert_close(new.state, out.state[:, 0])


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("belief_dim", 0, "agent.belief_dim is 0; it must be at least 1"),
        ("lr", math.nan, "agent.lr is nan"),
        ("unimix", 1.5, "agent.unimix is 1.5; it must lie in 0..1"),
        ("beta1", 1.0, "agent.beta1 is 1; it must be below 1"),
        ("num_blocks", 7, "must be divisible"),
        ("min_std", 2.0, "agent.max_std 1.0 is below agent.min_std 2.0"),
        ("return_low", 0.99, "must lie below"),
        ("recurrent_model", "lstm", "choose 'block_gru' or 'gru'"),
    ],
)
def test_config_errors(field: str, value: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(MICRO, **{field: value})
