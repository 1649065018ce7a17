"""The parity microscope: compare any layout with one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.train.parity.comparison import ParityReport as ParityReport
    from labkit.train.parity.comparison import ParityRow as ParityRow
    from labkit.train.parity.comparison import compare as compare
    from labkit.train.parity.comparison import differences as differences
    from labkit.train.parity.comparison import tensor_difference as tensor_difference

__all__, __getattr__, __dir__ = public_names(__name__)
