"""Encoder and decoder of dict observations: vectors, class indices and images, in any mixture.

Source: danijar/dreamerv3 `dreamerv3/rssm.py`, classes Encoder and Decoder.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onegraph.nn.distributions import symlog
from onegraph.nn.layers import MLP, ImageDecoder, ImageEncoder, Linear
from onegraph.specs import ArraySpec


def one_hot_columns(value: Tensor, spec: ArraySpec) -> Tensor:
    """Class indices [..., *spec.shape] -> float32 [..., spec.flat_dim], one block of columns an element.

    An index outside its classes (-1 marks a missing value) gives zeros.
    """
    counts = spec.num_classes
    assert counts is not None
    elements = value.reshape(*value.shape[: value.dim() - len(spec.shape)], len(counts)).long()
    parts = []
    for i, count in enumerate(counts):
        parts.append(elements[..., i, None] == torch.arange(count, device=value.device))
    return torch.cat(parts, -1).float()


def split_keys(specs: Mapping[str, ArraySpec]) -> tuple[list[str], list[str]]:
    """Sorted names of vector entries and of image entries.

    Raises:
        ValueError: No entry at all, floats of three axes (bytes are expected of images), four or more axes, or images
            of different sizes.
    """
    if not specs:
        raise ValueError("encoder: the observation has no entries; give at least one vector or image")
    images = sorted(k for k, s in specs.items() if s.is_image)
    vectors = sorted(k for k in specs if k not in images)
    for key in vectors:
        if len(specs[key].shape) > 2:
            raise ValueError(
                f"encoder: observation {key!r} has shape {specs[key].shape} and dtype {specs[key].dtype}; images are uint8 "
                "[height, width, channels] and vectors have at most two axes: convert the entry"
            )
    sides = {specs[k].shape[:2] for k in images}
    if len(sides) > 1:
        shapes = ", ".join(f"{k} {specs[k].shape}" for k in images)
        raise ValueError(f"encoder: images differ in size ({shapes}); resize them to one height and width")
    return vectors, images


def _image_shape(specs: Mapping[str, ArraySpec], images: list[str]) -> tuple[int, int, int]:
    height, width, _ = specs[images[0]].shape
    return height, width, sum(specs[k].shape[2] for k in images)


class Encoder(nn.Module):
    """Observation dict to one embedding.

    Vectors: concatenated in sorted key order, floats through symlog, class indices one-hot, then an MLP. Images:
        channels
    concatenated, scaled to [-0.5, 0.5], then convolutions. A float of -inf or an index of -1 counts as missing: zeros.

    Args:
        specs: One entry a key.
        units: Width of the MLP.
        num_layers: Layers of the MLP.
        image_depth: Channel multiplier.

    Compile: no state, no draws, no synchronisation.
    """

    def __init__(self, specs: Mapping[str, ArraySpec], *, units: int, num_layers: int, image_depth: int):
        super().__init__()
        self.specs = dict(specs)
        self.vector_keys, self.image_keys = split_keys(specs)
        self.mlp = self.images = None
        self.out_dim = 0
        if self.vector_keys:
            self.mlp = MLP(sum(specs[k].flat_dim for k in self.vector_keys), units, num_layers)
            self.out_dim += units
        if self.image_keys:
            self.images = ImageEncoder(_image_shape(specs, self.image_keys), image_depth)
            self.out_dim += self.images.out_dim

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """{key: [..., *spec.shape]} -> float32 [..., out_dim]."""
        parts = []
        if self.mlp is not None:
            parts.append(self.mlp(torch.cat([self._columns(k, observation[k]) for k in self.vector_keys], -1)))
        if self.images is not None:
            image = torch.cat([observation[k] for k in self.image_keys], -1)
            parts.append(self.images(image.float() / 255 - 0.5))
        return torch.cat(parts, -1)

    def _columns(self, key: str, value: Tensor) -> Tensor:
        spec = self.specs[key]
        if spec.is_discrete:
            return one_hot_columns(value, spec)
        value = value.float().reshape(*value.shape[: value.dim() - len(spec.shape)], spec.flat_dim)
        return symlog(value.masked_fill(torch.isneginf(value), 0.0))


class Decoder(nn.Module):
    """Belief and state to a reconstruction of every observation key, and its loss.

    Args:
        specs: One entry a key.
        belief_dim: Columns of the belief.
        state_dim: Columns of the flattened state.
        units: Width of the MLP.
        num_layers: Layers of the MLP.
        image_depth: Channel multiplier.
        num_blocks: Blocks of the image decoder's start.

    Compile: no state, no draws, no synchronisation.
    """

    def __init__(
        self,
        specs: Mapping[str, ArraySpec],
        belief_dim: int,
        state_dim: int,
        *,
        units: int,
        num_layers: int,
        image_depth: int,
        num_blocks: int,
    ):
        super().__init__()
        self.specs = dict(specs)
        self.vector_keys, self.image_keys = split_keys(specs)
        self.mlp = self.images = None
        # A list, not a ModuleDict: keys are the user's and may hold dots or the names of methods.
        self.heads = nn.ModuleList()
        if self.vector_keys:
            self.mlp = MLP(state_dim + belief_dim, units, num_layers)
            self.heads.extend(Linear(units, specs[k].flat_dim) for k in self.vector_keys)
        if self.image_keys:
            self.images = ImageDecoder(
                _image_shape(specs, self.image_keys),
                belief_dim,
                state_dim,
                depth=image_depth,
                units=units,
                num_blocks=num_blocks,
            )

    def forward(self, belief: Tensor, state: Tensor) -> dict[str, Tensor]:
        """[..., D], [..., S * C] -> {key: prediction}.

        Floats: symlog values [..., flat_dim]. Classes: logits [..., flat_dim]. Images: pixels in (0, 1), [..., H, W,
            C].
        """
        out = {}
        if self.mlp is not None:
            x = self.mlp(torch.cat([state, belief], -1))  # state first, unlike the heads' features
            out.update({k: head(x).float() for k, head in zip(self.vector_keys, self.heads)})
        if self.images is not None:
            pixels = self.images(belief, state)
            channels = [self.specs[k].shape[2] for k in self.image_keys]
            out.update(zip(self.image_keys, pixels.split(channels, -1)))
        return out

    def losses(self, predictions: Mapping[str, Tensor], observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Negative log-likelihood up to constants, summed over each key's elements: {key: float32 [...]}.

        Floats and images: squared error without 1/2, floats against symlog targets. Classes: cross-entropy.
        """
        out = {}
        for key, prediction in predictions.items():
            spec, target = self.specs[key], observation[key]
            if spec.is_image:
                out[key] = (prediction - target.float() / 255).square().sum((-3, -2, -1))
            elif spec.num_classes is not None:
                log_probs = [F.log_softmax(x, -1) for x in prediction.split(spec.num_classes, -1)]
                out[key] = -(torch.cat(log_probs, -1) * one_hot_columns(target, spec)).sum(-1)
            else:
                target = target.float().reshape(prediction.shape)
                target = torch.where(torch.isneginf(target), prediction.detach(), symlog(target))
                out[key] = (prediction - target).square().sum(-1)
        return out
