"""Was this rank's own gradient finite before a reduction mixed it with those of others?

A reduction makes one rank's NaN everybody's. Whoever looks afterwards cannot say where it came from, so the wrappers
look before, in the same pass over memory that scales a buffer for its mean, and leave the answer on the device: nobody
reads it in a good step (`labkit.train.not_finite`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale_and_look(x: Tensor, factor: float) -> Tensor:
    """Multiply x by `factor` in place; returns [1] on x's device, above 0 where some value of x was not finite.

    No synchronisation with the host. With a factor of 1, x is only read.
    """
    if factor == 1.0:
        return (~torch.linalg.vector_norm(x).isfinite()).float().view(1)
    found = torch.zeros(1, device=x.device)
    by = torch.full((1,), factor, device=x.device)
    if x.dtype == torch.float64:  # the fused operation takes its factor in fp32 only
        found += ~torch.linalg.vector_norm(x).isfinite()
        x.mul_(factor)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_([x], found, by)  # pyright: ignore[reportPrivateImportUsage]
    return found
