"""`labkit calibrate`: rates and times of the machine that it runs on, as a machine for `labkit.plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.train.calibration.calibrating import Calibration as Calibration
    from labkit.train.calibration.calibrating import calibrate as calibrate
    from labkit.train.calibration.calibrating import quick_machine as quick_machine

__all__, __getattr__, __dir__ = public_names(__name__)
