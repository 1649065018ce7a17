"""Whether all gradients of a buffer are finite, found in the pass that scales them for the mean."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_and_check_finite(x: Tensor, factor: float) -> Tensor:
    """Multiply x by `factor` in place. Returns [1] on x's device, above 0 if some value of x was not finite.

    A reduction spreads one rank's NaN to all ranks, and hides the rank that it came from. So the wrappers check before
    the reduction, in the pass that scales a buffer for its mean. The answer stays on the device, and nobody reads it in
    a good step (`labkit.train.not_finite`). With a factor of 1 the function only reads x.
    """
    if factor == 1.0 or x.dtype != torch.float32:  # the fused operation has no bf16 on GPUs, and its factor is fp32
        wide = torch.promote_types(x.dtype, torch.float32)
        bad = ~torch.linalg.vector_norm(x, dtype=wide).isfinite()
        if factor != 1.0:
            x.mul_(factor)
        return bad.float().view(1)
    found = torch.zeros(1, device=x.device)
    by = torch.full((1,), factor, device=x.device)
    torch._amp_foreach_non_finite_check_and_unscale_([x], found, by)  # pyright: ignore[reportPrivateImportUsage]
    return found
