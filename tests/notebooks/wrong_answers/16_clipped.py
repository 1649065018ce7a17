"""Chapter 16, exercise `16.clipped`: clip by norm inside of a CUDA graph."""

import torch


def wrong_1(x, limit, count):
    """Believes that only `.item()` asks the host: an `if` on a tensor asks it, too."""
    finite = x.isfinite().all()
    kept = torch.where(finite, x, 0.0)
    norm = kept.norm()
    if norm > limit or not finite:
        count.add_(1)
        return kept * (limit / norm).clamp(max=1.0)
    return kept


def wrong_2(x, limit, count):
    """Believes that `count = count + 1` changes the caller's tensor: it makes another one, at another address."""
    finite = x.isfinite().all()
    kept = torch.where(finite, x, 0.0)
    norm = kept.norm()
    too_large = norm > limit
    count = count + (~finite | too_large)
    return torch.where(too_large, kept * (limit / norm), kept)


def wrong_3(x, limit, count):
    """Believes that zero times anything is zero: a mask that multiplies leaves inf and NaN as NaN."""
    finite = x.isfinite().all()
    kept = x * finite
    norm = kept.norm()
    too_large = norm > limit
    count.add_((~finite | too_large).to(count.dtype))
    return torch.where(too_large, kept * (limit / norm), kept)
