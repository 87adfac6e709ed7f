"""Layers of the DreamerV3 networks: initialisation, norms, block-linear maps, image encoder and decoder.

Source of every constant: danijar/dreamerv3 `embodied/jax/nets.py` and `dreamerv3/rssm.py` (order linear -> norm ->
SiLU, RMS norm with eps 1e-4 and no shift, truncated-normal kernels scaled by fan-in, biases zero).

Compile: nothing here mutates state, draws random numbers after construction, or synchronises.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# 1 / standard deviation of a standard normal truncated to [-2, 2]: undoes the variance that truncation removes.
TRUNCATION_GAIN = 1.1368
NORM_EPS = 1e-4


def init_kernel_(weight: Tensor, fan_in: int, outscale: float) -> Tensor:
    """Fills a kernel in place with a truncated normal of variance `outscale ** 2 / fan_in`; `outscale` 0 gives zeros."""
    if outscale == 0:
        return nn.init.zeros_(weight)
    nn.init.trunc_normal_(weight, mean=0.0, std=1.0, a=-2.0, b=2.0)
    with torch.no_grad():
        return weight.mul_(outscale * TRUNCATION_GAIN * fan_in**-0.5)


class Linear(nn.Linear):
    """`nn.Linear` with DreamerV3's initialisation: truncated normal kernel, zero bias.

    Args:
        in_dim: Columns in.
        out_dim: Columns out.
        outscale: Factor on the kernel's standard deviation; 0 for heads that must start at a constant.
    """

    def __init__(self, in_dim: int, out_dim: int, *, outscale: float = 1.0):
        self.outscale = outscale
        super().__init__(in_dim, out_dim)

    def reset_parameters(self) -> None:
        """Draws the initial kernel from the global generator."""
        init_kernel_(self.weight, self.in_features, self.outscale)
        nn.init.zeros_(self.bias)


class RMSNorm(nn.Module):
    """`x * rsqrt(mean(x ** 2) + eps) * scale` over the last axis, in float32, cast back to the input's dtype.

    Args:
        dim: Size of the last axis.
        eps: Added inside the root.
    """

    def __init__(self, dim: int, *, eps: float = NORM_EPS):
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim], same dtype."""
        return F.rms_norm(x.float(), (self.dim,), self.scale, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return f"{self.dim}, eps={self.eps}"


class BlockLinear(nn.Module):
    """Block-diagonal linear map: each of `num_blocks` contiguous groups of the input has a kernel of its own.

    The kernel's scale counts the full input width as fan-in, not the width of one block (`nets.py`, class BlockLinear),
    so pre-activations start with a variance of 1 / num_blocks.

    Args:
        in_dim: Columns in, divisible by `num_blocks`.
        out_dim: Columns out, divisible by `num_blocks`.
        num_blocks: Number of groups.
        outscale: Factor on the kernel's standard deviation.

    Raises:
        ValueError: A width is not divisible by `num_blocks`.
    """

    def __init__(self, in_dim: int, out_dim: int, num_blocks: int, *, outscale: float = 1.0):
        super().__init__()
        if in_dim % num_blocks or out_dim % num_blocks:
            raise ValueError(
                f"BlockLinear: widths {in_dim} -> {out_dim} with {num_blocks} blocks; both must be divisible by the "
                "number of blocks: choose another width or number of blocks"
            )
        self.num_blocks = num_blocks
        self.weight = nn.Parameter(torch.empty(num_blocks, in_dim // num_blocks, out_dim // num_blocks))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        init_kernel_(self.weight, in_dim, outscale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_dim] -> [..., out_dim]."""
        return self.forward_blocks(x.unflatten(-1, (self.num_blocks, -1)))

    def forward_blocks(self, x: Tensor) -> Tensor:
        """The same map from inputs that are grouped already: [..., num_blocks, in_dim / num_blocks] -> [..., out_dim]."""
        batch = x.shape[:-2]
        rows = x.reshape(-1, *x.shape[-2:]).transpose(0, 1)
        y = torch.bmm(rows, self.weight).transpose(0, 1)
        return y.reshape(*batch, self.bias.shape[0]) + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        blocks, in_dim, out_dim = self.weight.shape
        return f"{blocks} x ({in_dim} -> {out_dim})"


class MLP(nn.Module):
    """`num_layers` times (linear, RMS norm, SiLU).

    Args:
        in_dim: Columns in.
        hidden_dim: Columns of each layer, and out.
        num_layers: At least 1.
        norm_eps: Of the norms.
    """

    def __init__(self, in_dim: int, hidden_dim: int, num_layers: int, *, norm_eps: float = NORM_EPS):
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"MLP: num_layers is {num_layers}; it must be at least 1")
        dims = [in_dim] + [hidden_dim] * num_layers
        self.linears = nn.ModuleList(Linear(i, o) for i, o in pairwise(dims))
        self.norms = nn.ModuleList(RMSNorm(hidden_dim, eps=norm_eps) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_dim] -> [..., hidden_dim]."""
        for linear, norm in zip(self.linears, self.norms):
            x = F.silu(norm(linear(x)))
        return x


class Conv2d(nn.Conv2d):
    """5 x 5 convolution, stride 1, same size out, with DreamerV3's initialisation.

    Args:
        in_channels: Channels in.
        out_channels: Channels out.
        outscale: Factor on the kernel's standard deviation.
    """

    def __init__(self, in_channels: int, out_channels: int, *, outscale: float = 1.0):
        self.outscale = outscale
        super().__init__(in_channels, out_channels, 5, padding=2)

    def reset_parameters(self) -> None:
        """Draws the initial kernel from the global generator."""
        fan_in = self.in_channels * self.kernel_size[0] * self.kernel_size[1]
        init_kernel_(self.weight, fan_in, self.outscale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _norm_act_channels(x: Tensor, norm: nn.Module) -> Tensor:
    # The norm runs over channels only; with channels-last memory both permutations are views.
    return F.silu(norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class ImageEncoder(nn.Module):
    """Four times (5 x 5 convolution, 2 x 2 max-pool, RMS norm over channels, SiLU), flattened height, width, channel.

    Args:
        image_shape: (height, width, channels); both sides a multiple of 16 from 48 to 256.
        depth: Channels are `depth * (2, 3, 4, 4)`.
        norm_eps: Of the norms.

    Raises:
        ValueError: The image's sides leave a final map outside 3..16 pixels.
    """

    def __init__(self, image_shape: tuple[int, int, int], depth: int, *, norm_eps: float = NORM_EPS):
        super().__init__()
        height, width, channels = image_shape
        check_image_sides(height, width)
        dims = [channels, *(depth * m for m in (2, 3, 4, 4))]
        self.convs = nn.ModuleList(Conv2d(i, o) for i, o in pairwise(dims))
        self.norms = nn.ModuleList(RMSNorm(o, eps=norm_eps) for o in dims[1:])
        self.out_dim = (height // 16) * (width // 16) * dims[-1]

    def forward(self, image: Tensor) -> Tensor:
        """Float images in [-0.5, 0.5], [..., H, W, C] -> [..., out_dim]."""
        batch = image.shape[:-3]
        x = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2)
        for conv, norm in zip(self.convs, self.norms):
            x = _norm_act_channels(F.max_pool2d(conv(x), 2), norm)
        return x.permute(0, 2, 3, 1).reshape(*batch, self.out_dim)


class ImageDecoder(nn.Module):
    """Belief and state to images: a spatial start of H/16 x W/16, then four nearest upsamplings with convolutions.

    The start is `silu(norm(BlockLinear(belief) + Linear(silu(norm(Linear(state))))))`; each block of the belief's map
    makes one contiguous group of channels for all pixels (`rssm.py`, class Decoder).

    Args:
        image_shape: (height, width, channels) of all images together, channels concatenated.
        belief_dim: Columns of the belief.
        state_dim: Columns of the flattened state.
        depth: Channels are `depth * (4, 3, 2)` on the way up, `4 * depth` at the start.
        units: The state's hidden layer has `2 * units` columns.
        num_blocks: Blocks of the belief's map.
        norm_eps: Of the norms.

    Raises:
        ValueError: Sides outside 48..256 or not a multiple of 16, or widths that the blocks do not divide.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        belief_dim: int,
        state_dim: int,
        *,
        depth: int,
        units: int,
        num_blocks: int = 8,
        norm_eps: float = NORM_EPS,
    ):
        super().__init__()
        height, width, channels = image_shape
        check_image_sides(height, width)
        start_channels = depth * 4
        if start_channels % num_blocks:
            raise ValueError(
                f"ImageDecoder: {start_channels} channels (4 x depth {depth}) with {num_blocks} blocks; the channels must "
                "be divisible by the number of blocks: choose another depth or number of blocks"
            )
        self.num_blocks = num_blocks
        self.start_shape = (height // 16, width // 16, start_channels)
        start_dim = self.start_shape[0] * self.start_shape[1] * start_channels
        self.belief_start = BlockLinear(belief_dim, start_dim, num_blocks)
        self.state_hidden = Linear(state_dim, 2 * units)
        self.state_norm = RMSNorm(2 * units, eps=norm_eps)
        self.state_start = Linear(2 * units, start_dim)
        self.start_norm = RMSNorm(start_channels, eps=norm_eps)
        dims = [start_channels, *(depth * m for m in (4, 3, 2))]
        self.convs = nn.ModuleList(Conv2d(i, o) for i, o in pairwise(dims))
        self.norms = nn.ModuleList(RMSNorm(o, eps=norm_eps) for o in dims[1:])
        self.out_conv = Conv2d(dims[-1], channels)

    def forward(self, belief: Tensor, state: Tensor) -> Tensor:
        """[..., belief_dim], [..., state_dim] -> pixels in (0, 1), [..., H, W, C]."""
        batch = belief.shape[:-1]
        height, width, channels = self.start_shape
        y0 = self.belief_start(belief).reshape(-1, self.num_blocks, height, width, channels // self.num_blocks)
        y0 = y0.permute(0, 2, 3, 1, 4).reshape(-1, height, width, channels)
        y1 = self.state_start(F.silu(self.state_norm(self.state_hidden(state)))).reshape(-1, height, width, channels)
        x = F.silu(self.start_norm(y0 + y1)).permute(0, 3, 1, 2)
        for conv, norm in zip(self.convs, self.norms):
            x = _norm_act_channels(conv(F.interpolate(x, scale_factor=2.0, mode="nearest")), norm)
        x = self.out_conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return torch.sigmoid(x.float()).permute(0, 2, 3, 1).reshape(*batch, *x.shape[2:], x.shape[1])


def check_image_sides(height: int, width: int) -> None:
    """Refuses images that four halvings do not take to a map of 3 to 16 pixels.

    Raises:
        ValueError: A side is not a multiple of 16 or lies outside 48..256.
    """
    for name, side in (("height", height), ("width", width)):
        if side % 16 or not 48 <= side <= 256:
            raise ValueError(
                f"image encoder: {name} is {side}; each side must be a multiple of 16 from 48 to 256: resize the image "
                "(64 is usual)"
            )
