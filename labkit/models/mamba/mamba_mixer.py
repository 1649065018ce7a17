"""The mixer of a Mamba-2 layer, cut over the tensor-parallel group (arXiv 2405.21060, section 8).

    z, x, b, c, dt = in_proj(norm(hidden))      column-parallel, f inside
    x, b, c        = silu(conv(x, b, c))        each channel with its own K weights
    y              = scan(x, softplus(dt + dt_bias), -exp(A_log), b, c, D)
    output         = out_proj(norm(y silu(z)))  row-parallel, g inside

The heads come in groups, and each rank has whole groups. Convolution, scan and gated norm stay inside a group: the mean
of the norm runs over the W columns of one group. So a layer has one all-reduce forward and one backward, as attention
has.

Rows of `in_proj` are sorted by group, [z x b c dt] [z x b c dt] ..., so that a cut into t equal parts gives each rank
its groups. Megatron and Hugging Face store [z ... z x ... x b ... b c ... c dt ... dt]. Channels of the convolution are
sorted as [x b c] [x b c] ....

Shapes: S sequence, B batch, H hidden, G groups of this rank, N size of the state, K width of the convolution. A group
has R heads of width P, W = R P columns, and C = W + 2N channels of the convolution.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.models.build import Build
from labkit.models.mamba.selective_scan import selective_scan
from labkit.parallel.parameters.weights import make_parameter
from labkit.plan.mamba import mamba_sizes

RATES = (1.0, 16.0)
"""First values of -a, uniform between these: Megatron's `A_init_range`."""
STEPS = (1e-3, 1e-1)
"""First values of softplus(dt_bias), their logarithms uniform: Megatron's `dt_min` and `dt_max`."""


class MambaMixer(nn.Module):
    """The mixer on the normalised input, [S, B, H] -> [S, B, H], with whole groups of heads on each rank.

    `A_log`, `dt_bias` and `D` have an entry for each head of this rank.

    Raises:
        ValueError: heads that the groups do not divide, or groups that tp does not divide.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        config, tp = build.config, build.group.size
        heads, groups = config.mamba_heads, config.mamba_num_groups
        if not heads or heads % groups or groups % tp:
            raise ValueError(f"{name}: tp {tp} must divide groups {groups}, which must divide heads {heads}")
        self.name, self.sizes = name, mamba_sizes(config, tp)
        whole, inner = mamba_sizes(config), heads * config.mamba_head_dim
        self.norm, column = build.norm_before(f"{name}.norm")
        self.in_proj = column(f"{name}.in_proj", config.hidden, groups * whole.projected, **build.linear())
        self.conv = CausalConvolution(f"{name}.conv", groups * whole.convolved, build)
        cut: dict[str, Any] = {"group": build.group, "partition_dim": 0, **build.factory_kwargs}
        drawn = {"seed": build.weight_seed, "std": 1.0, **cut}
        self.A_log = make_parameter(f"{name}.A_log", (heads,), **drawn)
        self.dt_bias = make_parameter(f"{name}.dt_bias", (heads,), **drawn)
        self.D = make_parameter(f"{name}.D", (heads,), fill=1.0, **cut)
        self.gated_norm = GatedNorm(f"{name}.gated_norm", inner, self.sizes.inner, build)
        row = build.linear(std=build.residual_std)
        self.out_proj = build.spec.row_parallel(f"{name}.out_proj", inner, config.hidden, **row)
        self._spread()

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], to be added to x."""
        mixed, _ = self.in_proj(self.norm(x_SBH))
        output, _ = self.out_proj(self.mix(mixed))
        return output

    def mix(self, mixed: Tensor) -> Tensor:
        """Compute all between the projections, in float32 at least: [S, B, G (W + C + R)] -> [S, B, G W]."""
        sizes, dtype = self.sizes, mixed.dtype
        mixed = _wide(mixed).unflatten(-1, (sizes.groups, sizes.projected))
        z_SBGW, xbc_SBGC, dt_SBGR = mixed.split((sizes.inner, sizes.convolved, sizes.heads), dim=-1)
        xbc_SBGC = F.silu(self.conv(xbc_SBGC))
        x_SBGW, b_SBGN, c_SBGN = xbc_SBGC.split((sizes.inner, sizes.state, sizes.state), dim=-1)
        per_head = (sizes.groups, sizes.heads)
        y_BGRSP = selective_scan(
            x_SBGW.unflatten(-1, (sizes.heads, sizes.head_dim)).permute(1, 2, 3, 0, 4),
            F.softplus(dt_SBGR + _wide(self.dt_bias).view(per_head)).permute(1, 2, 3, 0),
            -_wide(self.A_log).exp().view(per_head),
            b_SBGN.permute(1, 2, 0, 3),
            c_SBGN.permute(1, 2, 0, 3),
            _wide(self.D).view(per_head),
        )
        y_SBGW = y_BGRSP.permute(3, 0, 1, 2, 4).flatten(3)
        return self.gated_norm(y_SBGW, z_SBGW).to(dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _spread(self) -> None:
        """Turn the normal numbers of `A_log` and `dt_bias` into first rates and steps, one by one.

        The distribution function of a normal number is uniform between 0 and 1. So the values of a head depend on
        (seed, name) alone and not on the layout.
        """
        low, high = RATES
        rates = low + (high - low) * torch.special.ndtr(_wide(self.A_log))
        self.A_log.copy_(rates.log())
        low, high = map(math.log, STEPS)
        steps = (low + (high - low) * torch.special.ndtr(_wide(self.dt_bias))).exp()
        self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus


class CausalConvolution(nn.Module):
    """Each channel's weighted sum over its last K positions: y_t = bias + sum_k w_k x_{t - K + 1 + k}.

    Holds `weight` [channels, K], which starts with the spread of torch's `Conv1d`, and `bias` [channels].
    """

    def __init__(self, name: str, channels: int, build: Build) -> None:
        super().__init__()
        self.width = build.config.mamba_conv_width
        cut: dict[str, Any] = {"group": build.group, "partition_dim": 0, **build.factory_kwargs}
        drawn = {"seed": build.weight_seed, "std": 1 / math.sqrt(3 * self.width), **cut}
        self.weight = make_parameter(f"{name}.weight", (channels, self.width), **drawn)
        self.bias = make_parameter(f"{name}.bias", (channels,), fill=0.0, **cut)

    def forward(self, x_SBGC: Tensor) -> Tensor:
        """[S, B, G, C] -> [S, B, G, C]; the positions before the first are zeros."""
        length, channels = x_SBGC.shape[0], x_SBGC.shape[2:]
        padded = F.pad(x_SBGC, (0, 0, 0, 0, 0, 0, self.width - 1, 0))
        y_SBGC = _wide(self.bias).view(channels)
        for k, weight in enumerate(_wide(self.weight).unbind(1)):
            y_SBGC = y_SBGC + weight.view(channels) * padded[k : k + length]
        return y_SBGC


class GatedNorm(nn.Module):
    """RMSNorm of y silu(z) over the columns of each group (arXiv 2405.21060, section 8.1), with a weight per column."""

    def __init__(self, name: str, inner: int, group_width: int, build: Build) -> None:
        super().__init__()
        cut: dict[str, Any] = {"group": build.group, "partition_dim": 0, **build.factory_kwargs}
        self.eps, self.group_width = build.config.norm_eps, group_width
        self.weight = make_parameter(f"{name}.weight", (inner,), fill=1.0, **cut)

    def forward(self, y_SBGW: Tensor, z_SBGW: Tensor) -> Tensor:
        """[S, B, G, W] twice -> [S, B, G W]."""
        gated = F.rms_norm(y_SBGW * F.silu(z_SBGW), (self.group_width,), eps=self.eps)
        return gated.flatten(2) * self.weight


def _wide(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if that is its type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
