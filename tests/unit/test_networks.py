"""Initial weights, parameter counts, shapes and error texts of layers and RSSM."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from onegraph.dreamer.config import SIZES, DreamerConfig, sized
from onegraph.dreamer.loss import DreamerV3Loss
from onegraph.dreamer.observation import Decoder, Encoder, one_hot_columns, split_keys
from onegraph.dreamer.rssm import RSSMPosteriorV3, RSSMPriorV3, bound_action
from onegraph.dreamer.scan import Recurrence
from onegraph.nn.layers import BlockLinear, ImageDecoder, ImageEncoder, RMSNorm
from onegraph.specs import ArraySpec
from onegraph.train.audit import random_entry

from ..fakes import FLAGS, GRIP, IMAGE, MOVE, SCALAR, TOKEN, VECTOR, micro_loss

F32 = "float32"
WALKER = (
    {
        "orientations": ArraySpec(shape=(14,), dtype=F32),
        "height": ArraySpec(shape=(), dtype=F32),
        "velocity": ArraySpec(shape=(9,), dtype=F32),
    },
    {"action": ArraySpec(shape=(6,), dtype=F32)},
)
PIXELS = ({"image": IMAGE}, {"action": ArraySpec(shape=(6,), dtype=F32)})
CRAFTER = ({"image": IMAGE}, {"action": ArraySpec(shape=(), dtype="int32", num_classes=(17,))})
ATARI = (
    {"image": ArraySpec(shape=(96, 96, 1), dtype="uint8")},
    {"action": ArraySpec(shape=(), dtype="int32", num_classes=(18,))},
)
COUNTS = {
    "size1m": (640_867, 686_846, 687_875, 769_762),
    "size12m": (9_738_019, 10_494_158, 10_498_259, 11_808_850),
    "size25m": (21_782_947, 23_489_326, 23_495_475, 26_444_402),
    "size50m": (38_612_003, 41_650_062, 41_658_259, 46_900_882),
    "size100m": (86_622_499, 93_468_238, 93_480_531, 105_276_626),
    "size200m": (153_769_507, 165_948_686, 165_965_075, 186_936_082),
    "size400m": (345_473_059, 372_896_398, 372_920_979, 420_106_130),
}


@pytest.mark.parametrize("size", COUNTS)
def test_parameter_counts_are_the_references(size: str) -> None:
    with torch.device("meta"):
        losses = [DreamerV3Loss(sized(size), *task) for task in (WALKER, PIXELS, CRAFTER, ATARI)]
    assert tuple(sum(p.numel() for p in loss.trained_parameters()) for loss in losses) == COUNTS[size]


def test_every_size_is_counted_and_the_default_is_200m() -> None:
    assert set(SIZES) == {"tiny", *COUNTS}
    assert sized("size200m") == DreamerConfig()
    with pytest.raises(ValueError, match="size 'size2m' is unknown; choose one of tiny"):
        sized("size2m")


def test_initial_weights() -> None:
    torch.manual_seed(0)
    loss = DreamerV3Loss(sized("size1m"), *WALKER)
    core = loss.world_model.prior.core
    kernels = {
        "gates": (core.gates.weight, 512),
        "hidden": (core.hidden[0].weight, 2048),
        "belief_in": (core.belief_in.weight, 512),
        "encoder": (loss.world_model.encoder.mlp.linears[1].weight, 64),
    }
    for name, (weight, fan_in) in kernels.items():
        std = 1 / math.sqrt(fan_in)
        assert weight.std().item() == pytest.approx(std, rel=0.03), name
        assert weight.abs().max().item() <= 2 * 1.1368 * std + 1e-6, name
    for head in (loss.world_model.reward, loss.behavior.value):
        assert (head.head.weight == 0).all()
    mean = loss.behavior.actor.heads[0][0].weight
    assert mean.std().item() == pytest.approx(0.01 / math.sqrt(64), rel=0.15)
    for name, parameter in loss.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        if name.endswith("scale"):
            assert (parameter == 1).all(), name
    for online, slow in loss.target_pairs():
        assert torch.equal(online, slow)
        assert not slow.requires_grad


def test_rms_norm_has_its_eps_inside_the_root() -> None:
    x = torch.full((1, 4), 1e-3)
    assert RMSNorm(4)(x)[0, 0].item() == pytest.approx(1e-3 / math.sqrt(1e-6 + 1e-4))
    assert RMSNorm(4)(x.bfloat16()).dtype == torch.bfloat16


def test_block_linear_keeps_blocks_apart() -> None:
    layer = BlockLinear(8, 12, 4)
    x = torch.randn(5, 8)
    y = layer(x)
    parts = [x[:, 2 * k : 2 * k + 2] @ layer.weight[k] for k in range(4)]
    torch.testing.assert_close(y, torch.cat(parts, -1) + layer.bias)
    with pytest.raises(ValueError, match="divisible by the number of blocks"):
        BlockLinear(9, 12, 4)


@pytest.mark.parametrize("side", [48, 64, 96])
def test_images_keep_their_size(side: int) -> None:
    encoder = ImageEncoder((side, side, 3), 2)
    decoder = ImageDecoder((side, side, 3), 16, 8, depth=2, units=8)
    assert encoder(torch.zeros(2, 3, side, side, 3)).shape == (2, 3, (side // 16) ** 2 * 8)
    pixels = decoder(torch.zeros(2, 3, 16), torch.zeros(2, 3, 8))
    assert pixels.shape == (2, 3, side, side, 3)
    assert ((pixels > 0) & (pixels < 1)).all()


@pytest.mark.parametrize("shape", [(63, 64, 3), (32, 32, 3), (512, 512, 3)])
def test_other_image_sizes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="multiple of 16 from 48 to 256"):
        ImageEncoder(shape, 2)


def test_mixed_observations() -> None:
    specs = {"a": VECTOR, "b": SCALAR, "c": TOKEN, "d": FLAGS, "e": IMAGE, "f": IMAGE, "keys": VECTOR, "x.y": SCALAR}
    encoder = Encoder(specs, units=8, num_layers=2, image_depth=2)
    decoder = Decoder(specs, 16, 8, units=8, num_layers=2, image_depth=2, num_blocks=4)
    observation = {k: random_entry(s, (2, 5)) for k, s in specs.items()}
    assert encoder(observation).shape == (2, 5, encoder.out_dim)
    predictions = decoder(torch.randn(2, 5, 16), torch.randn(2, 5, 8))
    losses = decoder.losses(predictions, observation)
    assert set(losses) == set(specs)
    assert all(v.shape == (2, 5) and v.isfinite().all() for v in losses.values())


def test_missing_values_are_zeros() -> None:
    encoder = Encoder({"v": VECTOR, "t": TOKEN}, units=8, num_layers=1, image_depth=2)
    missing = {"v": torch.full((1, 3), -math.inf), "t": torch.tensor([-1])}
    zeros = encoder.mlp(torch.zeros(1, 8))
    torch.testing.assert_close(encoder(missing), zeros)
    decoder = Decoder({"v": VECTOR, "t": TOKEN}, 4, 4, units=8, num_layers=1, image_depth=2, num_blocks=2)
    losses = decoder.losses(decoder(torch.zeros(1, 4), torch.zeros(1, 4)), missing)
    assert all(v.item() == 0 for v in losses.values())


def test_images_of_two_sizes_and_floats_of_three_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="images differ in size"):
        split_keys({"a": IMAGE, "b": ArraySpec(shape=(96, 96, 3), dtype="uint8")})
    with pytest.raises(ValueError, match="images are uint8"):
        split_keys({"a": ArraySpec(shape=(64, 64, 3), dtype=F32)})
    with pytest.raises(ValueError, match="no entries"):
        split_keys({})


def test_one_hot_columns_of_several_elements() -> None:
    code = one_hot_columns(torch.tensor([[1, 2], [0, -1]]), FLAGS)
    assert code.tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 0, 0]]


def test_actions_outside_are_pulled_to_the_edge_without_gradient() -> None:
    action = torch.tensor([0.5, -3.0, 2.0], requires_grad=True)
    bounded = bound_action(action)
    assert bounded.tolist() == [0.5, -1.0, 1.0]
    bounded.sum().backward()
    torch.testing.assert_close(action.grad, torch.tensor([1.0, 1 / 3, 0.5]))


@pytest.mark.parametrize("recurrent_model", ["block_gru", "gru"])
def test_prior_and_posterior_of_any_batch_rank(recurrent_model: str) -> None:
    prior = RSSMPriorV3((2,), 8, 16, 4, 4, recurrent_model=recurrent_model)
    posterior = RSSMPosteriorV3(8, 4, 4, 16, 6)
    for batch in ((), (3,), (2, 3), (0,)):
        logits, state, belief = prior(torch.zeros(*batch, 16), torch.randn(*batch, 16), torch.randn(*batch, 2))
        assert logits.shape == (*batch, 4, 4)
        assert state.shape == belief.shape == (*batch, 16)
        logits, state = posterior(belief, torch.randn(*batch, 6))
        assert logits.shape == (*batch, 4, 4)
        assert state.shape == (*batch, 16)


def test_rssm_error_texts() -> None:
    with pytest.raises(ValueError, match="belief size 15 with 8 blocks; it must be divisible"):
        RSSMPriorV3((2,), 8, 15, 4, 4)
    with pytest.raises(ValueError, match="neither action_shape nor action_dim"):
        RSSMPriorV3(None)
    with pytest.raises(ValueError, match="recurrent_model is 'lstm'"):
        RSSMPriorV3((2,), 8, 16, 4, 4, recurrent_model="lstm")


@pytest.mark.parametrize(
    "action", [{"a": MOVE}, {"a": ArraySpec(shape=(), dtype="int32", num_classes=(5,))}, {"a": MOVE, "b": GRIP}]
)
def test_nothing_leaks_over_a_reset(action: dict[str, ArraySpec]) -> None:
    loss = micro_loss(action=action)
    model, k = loss.world_model, 3
    size = (2, 8)
    observation = {"vector": torch.randn(1, 8, 3).expand(2, 8, 3)}
    vectors = loss.behavior.actor.encode({key: random_entry(s, size) for key, s in action.items()})
    vectors[1, k + 1 :] = vectors[0, k + 1 :]
    reset = torch.zeros(size, dtype=torch.bool)
    reset[:, k] = True
    noise = loss.draw_noise(1, 8).posterior.expand(2, -1, -1, -1)
    out = Recurrence(model.prior, model.posterior)(
        torch.randn(2, 16),
        torch.randn(2, 16),
        vectors,
        model.encoder(observation),
        reset,
        noise,
    )
    assert not torch.equal(out.belief[0, k - 1], out.belief[1, k - 1])
    for value in (*out, model.prior.logits(out.belief)):
        torch.testing.assert_close(value[0, k:], value[1, k:], rtol=0, atol=0)


def test_step_noise_is_not_shared_over_time() -> None:
    loss = micro_loss(config=replace(sized("tiny"), num_categoricals=32, num_classes=64, belief_dim=16))
    model = loss.world_model
    nn.init.zeros_(model.posterior.head.weight)
    torch.manual_seed(0)
    noise = loss.draw_noise(1, 64).posterior
    embedding = model.encoder({"vector": torch.zeros(1, 64, 3)})
    zeros = model.initial(1)
    out = model.observe(embedding, torch.zeros(1, 64, 2), torch.zeros(1, 64, dtype=torch.bool), *zeros, noise)
    index = out.state.reshape(64, 32, 64).argmax(-1)
    agree = (index[1:] == index[:-1]).float().mean().item()
    assert agree < 0.05
