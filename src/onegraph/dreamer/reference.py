"""Parameters of the reference implementation (danijar/dreamerv3, JAX), by its path names, into a `DreamerV3Loss`.

Layouts there: linear kernels [in, out], convolutions [height, width, in, out], block-linear [blocks, in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from onegraph.dreamer.heads import Actor, ContinueHead, TwoHotHead
from onegraph.dreamer.loss import DreamerV3Loss
from onegraph.dreamer.observation import Decoder, Encoder
from onegraph.dreamer.rssm import BlockGRU
from onegraph.nn.layers import MLP, BlockLinear, Conv2d, ImageDecoder, ImageEncoder, Linear, RMSNorm

_Entry = tuple[str, Tensor, Callable[[Tensor], Tensor]]


def _same(x: Tensor) -> Tensor:
    return x


def _transposed(x: Tensor) -> Tensor:
    return x.T


def _conv(x: Tensor) -> Tensor:
    return x.permute(3, 2, 0, 1)


def _leaf(path: str, module: nn.Module) -> Iterator[_Entry]:
    """Entries of one layer that has a counterpart in the reference."""
    if isinstance(module, RMSNorm):
        yield f"{path}/scale", module.scale, _same
        return
    layer = cast("Linear | Conv2d | BlockLinear", module)
    layout = {Linear: _transposed, Conv2d: _conv, BlockLinear: _same}[type(layer)]
    yield f"{path}/kernel", layer.weight, layout
    assert layer.bias is not None
    yield f"{path}/bias", layer.bias, _same


def _numbered(mlp: MLP, linear: str, norm: str) -> Iterator[_Entry]:
    for i, (layer, layer_norm) in enumerate(zip(mlp.linears, mlp.norms)):
        yield from _leaf(linear.format(i), layer)
        yield from _leaf(norm.format(i), layer_norm)


def _encoder(encoder: Encoder) -> Iterator[_Entry]:
    if encoder.mlp is not None:
        yield from _numbered(encoder.mlp, "enc/mlp{}", "enc/mlp{}norm")
    if encoder.images is not None:
        images: ImageEncoder = encoder.images
        for i, (conv, norm) in enumerate(zip(images.convs, images.norms)):
            yield from _leaf(f"enc/cnn{i}", conv)
            yield from _leaf(f"enc/cnn{i}norm", norm)


def _decoder(decoder: Decoder) -> Iterator[_Entry]:
    if decoder.mlp is not None:
        yield from _numbered(decoder.mlp, "dec/mlp/linear{}", "dec/mlp/norm{}")
        for key, head in zip(decoder.vector_keys, decoder.heads):
            yield from _leaf(f"dec/vec/{key}/{'logits' if decoder.specs[key].is_discrete else 'pred'}", head)
    if decoder.images is not None:
        images: ImageDecoder = decoder.images
        yield from _leaf("dec/sp0", images.belief_start)
        yield from _leaf("dec/sp1", images.state_hidden)
        yield from _leaf("dec/sp1norm", images.state_norm)
        yield from _leaf("dec/sp2", images.state_start)
        yield from _leaf("dec/spnorm", images.start_norm)
        for i, conv, norm in zip((2, 1, 0), images.convs, images.norms):
            yield from _leaf(f"dec/conv{i}", conv)
            yield from _leaf(f"dec/conv{i}norm", norm)
        yield from _leaf("dec/imgout", images.out_conv)


def _head(path: str, head: TwoHotHead | ContinueHead, output: str) -> Iterator[_Entry]:
    yield from _numbered(head.mlp, path + "/mlp/linear{}", path + "/mlp/norm{}")
    yield from _leaf(f"{path}/head/{output}", head.head)


def _actor(actor: Actor) -> Iterator[_Entry]:
    yield from _numbered(actor.mlp, "pol/mlp/linear{}", "pol/mlp/norm{}")
    for key, head in zip(actor.keys, actor.heads):
        names = ("logits",) if actor.specs[key].is_discrete else ("mean", "stddev")
        for name, linear in zip(names, cast(nn.ModuleList, head)):
            yield from _leaf(f"pol/head/{key}/{name}", linear)


def reference_parameters(loss: DreamerV3Loss) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Tensor]]]:
    """Every tensor of the learner that the reference has too.

    Yields:
        Its path there, our tensor, and a function from the reference's layout to ours.

    Raises:
        ValueError: The learner's core is not the reference's block-GRU.
    """
    model, behavior = loss.world_model, loss.behavior
    core = model.prior.core
    if not isinstance(core, BlockGRU):
        raise ValueError(
            f"reference: the core is {type(core).__name__}; only recurrent_model 'block_gru' has a counterpart"
        )
    for i, (linear, norm) in enumerate(
        [
            (core.belief_in, core.belief_norm),
            (core.state_in, core.state_norm),
            (core.action_in, core.action_norm),
        ]
    ):
        yield from _leaf(f"dyn/dynin{i}", linear)
        yield from _leaf(f"dyn/dynin{i}norm", norm)
    for i, (hidden, norm) in enumerate(zip(core.hidden, core.hidden_norms)):
        yield from _leaf(f"dyn/dynhid{i}", hidden)
        yield from _leaf(f"dyn/dynhid{i}norm", norm)
    yield from _leaf("dyn/dyngru", core.gates)
    yield from _numbered(model.posterior.layers, "dyn/obs{}", "dyn/obs{}norm")
    yield from _leaf("dyn/obslogit", model.posterior.head)
    yield from _numbered(model.prior.layers, "dyn/prior{}", "dyn/prior{}norm")
    yield from _leaf("dyn/priorlogit", model.prior.head)
    yield from _encoder(model.encoder)
    yield from _decoder(model.decoder)
    yield from _head("rew", model.reward, "logits")
    yield from _head("con", model.continuation, "logit")
    yield from _actor(behavior.actor)
    yield from _head("val", behavior.value, "logits")
    yield from _head("slowval", behavior.slow_value, "logits")
    yield "retnorm/lo/value", behavior.return_norm.lo, _same
    yield "retnorm/hi/value", behavior.return_norm.hi, _same


@torch.no_grad()
def load_reference(loss: DreamerV3Loss, values: Mapping[str, Any]) -> None:
    """Copies parameters, slow critic and return normaliser of the reference into `loss`.

    Args:
        loss: Learner of the same sizes, observations and actions.
        values: Arrays by reference path (`dyn/dynin0/kernel`). The slow critic's count, which follows from nothing that
            we keep, is ignored.

    Raises:
        ValueError: A path is missing, is not known, or has another shape; nothing is copied then.
    """
    entries = {path: (target, convert) for path, target, convert in reference_parameters(loss)}
    missing = sorted(set(entries) - set(values))
    unknown = sorted(set(values) - set(entries) - {"slowval_count/value"})
    if missing or unknown:
        raise ValueError(
            f"reference: {len(missing)} paths are missing (first: {missing[:3]}) and {len(unknown)} have no counterpart "
            f"(first: {unknown[:3]}); build the learner with the checkpoint's sizes, observations and actions"
        )
    converted = {}
    for path, (target, convert) in entries.items():
        value = convert(torch.from_numpy(np.array(values[path], dtype=np.float32)))
        if value.numel() != target.numel() or (value.dim() > 1 and value.shape != target.shape):
            raise ValueError(
                f"reference: {path} has shape {tuple(value.shape)}, the learner expects {tuple(target.shape)}"
            )
        converted[path] = value.reshape(target.shape)
    for path, (target, _) in entries.items():
        target.copy_(converted[path])
