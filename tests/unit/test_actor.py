"""The actor over continuous, discrete and mixed action dicts."""

from __future__ import annotations

import math

import pytest
import torch

from onegraph.dreamer.heads import Actor
from onegraph.specs import ArraySpec

from ..fakes import MOVE, micro_loss, random_batch

DISCRETE = {
    "direction": ArraySpec(shape=(), dtype="int32", num_classes=(5,)),
    "foil": ArraySpec(shape=(), dtype="int32", num_classes=(2,)),
}
MULTI = {"action": ArraySpec(shape=(3,), dtype="int32", num_classes=(3, 3, 2))}
MIXED = {"move": MOVE, "grip": ArraySpec(shape=(), dtype="int32", num_classes=(2,))}


def make(specs: dict[str, ArraySpec]) -> Actor:
    return Actor(6, specs, 8, 1)


@pytest.mark.parametrize(
    ("specs", "entropy"),
    [(DISCRETE, math.log(5) + math.log(2)), (MULTI, 2 * math.log(3) + math.log(2))],
)
def test_entropy_of_a_new_discrete_actor_is_that_of_uniform_choices(specs, entropy: float) -> None:
    actor = make(specs)
    got = actor.entropy(actor(torch.randn(50, 6))).mean().item()
    assert got == pytest.approx(entropy, rel=0.01)


@pytest.mark.parametrize("specs", [DISCRETE, MULTI, MIXED, {"action": MOVE}])
def test_decode_inverts_encode_and_stays_in_range(specs) -> None:
    actor = make(specs)
    output = actor(torch.randn(40, 6))
    vector = actor.sample(output, actor.draw_noise((40,)))
    assert vector.shape == (40, actor.action_dim)
    assert not vector.requires_grad
    action = actor.decode(vector)
    torch.testing.assert_close(actor.encode(action), vector)
    for key, spec in specs.items():
        assert action[key].shape == (40, *spec.shape)
        if spec.num_classes is not None:
            assert action[key].dtype == torch.int32
            assert (action[key].reshape(40, -1) < torch.tensor(spec.num_classes)).all()
            assert (action[key] >= 0).all()


def test_log_prob_is_the_sum_over_entries() -> None:
    actor = make(MIXED)
    output = actor(torch.randn(30, 6))
    grip_log_probs, (mean, std) = output[0][0], output[1]
    vector = actor.sample(output, actor.draw_noise((30,)))
    action = actor.decode(vector)
    want = grip_log_probs.gather(-1, action["grip"].long()[:, None]).squeeze(-1)
    want = want + torch.distributions.Normal(mean, std).log_prob(action["move"]).sum(-1)
    torch.testing.assert_close(actor.log_prob(output, vector), want)


def test_samples_have_the_actors_distribution() -> None:
    actor = make({"a": MOVE, "b": ArraySpec(shape=(), dtype="int32", num_classes=(3,))})
    torch.nn.init.normal_(actor.heads[1][0].bias)
    output = actor(torch.zeros(1, 6).expand(50_000, 6))
    torch.manual_seed(0)
    action = actor.decode(actor.sample(output, actor.draw_noise((50_000,))))
    mean, std = output[0]
    torch.testing.assert_close(action["a"].mean(0), mean[0], atol=0.02, rtol=0)
    torch.testing.assert_close(action["a"].std(0), std[0], atol=0.02, rtol=0)
    share = torch.bincount(action["b"], minlength=3) / 50_000
    torch.testing.assert_close(share, output[1][0][0].exp(), atol=0.01, rtol=0)


def test_mode_noise_gives_means_and_likeliest_classes() -> None:
    actor = make(MIXED)
    output = actor(torch.randn(9, 6))
    action = actor.decode(actor.sample(output, actor.mode_noise(actor.draw_noise((9,)))))
    torch.testing.assert_close(action["move"], output[1][0])
    assert torch.equal(action["grip"].long(), output[0][0].argmax(-1))


def test_an_actor_without_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="no entries"):
        make({})


@pytest.mark.parametrize("specs", [DISCRETE, MULTI, MIXED])
def test_every_action_kind_trains(specs) -> None:
    loss = micro_loss(action=specs)
    out = loss(random_batch(loss))
    sum(v for k, v in out.items() if k.startswith("loss_")).backward()
    for name, parameter in loss.behavior.actor.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
