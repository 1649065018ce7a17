"""Bytes of a parameter on a rank by stage of ZeRO, in closed form and without padding. No torch.

A rank keeps the weight and the gradient of every parameter. The optimizer adds Adam's two moments, and a float32 master
of a 16-bit weight. Each stage of ZeRO (arXiv 1910.02054, figure 1) shards more of these over the d data-parallel ranks:

    stage    weight   gradient   master, moments, fp32 gradient
      0        1         1            1                            plain data parallelism
      1        1         1            1/d                          the distributed optimizer
      2        1         1/d          1/d
      3        1/d       1/d          1/d                          fully sharded

labkit builds stages 0 and 1; stages 2 and 3 are here for comparison. Megatron's documentation gives the same bytes:

    weights, gradients      stage 0    stage 1
    bf16, fp32                 18      6 + 12/d      2 + 4, and 4 + 4 + 4 sharded
    fp32, fp32                 16      8 +  8/d      4 + 4, and 4 + 4: the weight is its own master
    bf16, bf16                 20      4 + 16/d      2 + 2, and 4 + 4 + 4 + the gradient in fp32: 4

Stage 3 of bf16 and fp32 is 18/d where a rank keeps a bf16 shard and its master. PyTorch's FSDP2 keeps 16/d, the row of
fp32 and fp32: with a `MixedPrecisionPolicy` its fp32 shard is the master, and bf16 exists only in gathered weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""`optim.precision` -> bytes of one element."""
STAGES = (0, 1, 2, 3)
"""ZeRO stages; 0 replicates everything."""


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes of one parameter on one rank, by purpose. They are fractions, because ranks may share a parameter."""

    weight: Fraction
    """The weight that the layers compute with."""
    gradient: Fraction
    """`main_grad`, the sum of the backwards."""
    master: Fraction
    """The wide copy that AdamW updates; 0 if AdamW updates the weight itself."""
    moments: Fraction
    """Adam's two running means."""
    update_gradient: Fraction
    """The gradient in the master's precision during the update; 0 if `main_grad` has that precision."""

    @property
    def total(self) -> Fraction:
        """Sum of the five."""
        return self.weight + self.gradient + self.master + self.moments + self.update_gradient

    @property
    def optimizer(self) -> Fraction:
        """Bytes that serve only the update: master, moments and the widened gradient."""
        return self.master + self.moments + self.update_gradient


@lru_cache(maxsize=1024)
def bytes_per_parameter(
    *, param_dtype: str = "bf16", grad_dtype: str = "fp32", dp: int = 1, stage: int = 1
) -> BytesPerParameter:
    """Return the closed form for AdamW over `dp` ranks under ZeRO stage `stage`.

    Raises ValueError for an unknown type or stage, or dp below 1.
    """
    for name, given in (("param_dtype", param_dtype), ("grad_dtype", grad_dtype)):
        if given not in ELEMENT_BYTES:
            raise ValueError(f"{name} is {given!r}; choose one of {', '.join(ELEMENT_BYTES)}")
    if stage not in STAGES:
        raise ValueError(f"stage is {stage!r}; ZeRO has stages {', '.join(map(str, STAGES))}")
    if dp < 1:
        raise ValueError(f"dp is {dp}; it must be at least 1")
    weight, gradient = ELEMENT_BYTES[param_dtype], ELEMENT_BYTES[grad_dtype]
    updated = max(weight, 4)  # AdamW runs in fp32 at least
    shared = Fraction(1, dp)
    return BytesPerParameter(
        weight=weight * (shared if stage >= 3 else Fraction(1)),
        gradient=gradient * (shared if stage >= 2 else Fraction(1)),
        master=(updated if weight < updated else 0) * (shared if stage >= 1 else Fraction(1)),
        moments=2 * updated * (shared if stage >= 1 else Fraction(1)),
        update_gradient=(updated if gradient < updated else 0) * (shared if stage >= 1 else Fraction(1)),
    )


def formula(*, param_dtype: str, grad_dtype: str, stage: int) -> str:
    """Return the closed form as text, such as `6 + 12/d`; without d if nothing is sharded."""
    alone, at_two = (
        bytes_per_parameter(param_dtype=param_dtype, grad_dtype=grad_dtype, dp=dp, stage=stage).total for dp in (1, 2)
    )
    sharded = 2 * (alone - at_two)  # fixed + sharded/d at d = 1 and 2
    fixed = alone - sharded
    parts = [str(fixed)] if fixed else []
    return " + ".join([*parts, f"{sharded}/d"] if sharded else parts)
