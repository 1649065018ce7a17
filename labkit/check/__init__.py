"""Score a learner's function, layout or schedule, as in `check("02.groups", my_function)`, and check parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.check.hunts.hunting import hunt as hunt
    from labkit.check.parameters import check_parameters as check_parameters
    from labkit.check.scoring import Exercise as Exercise
    from labkit.check.scoring import Outcome as Outcome
    from labkit.check.scoring import Score as Score
    from labkit.check.scoring import check as check
    from labkit.check.scoring import compare as compare
    from labkit.check.scoring import exercise as exercise
    from labkit.check.scoring import exercises as exercises
    from labkit.check.scoring import holds as holds

__all__, __getattr__, __dir__ = public_names(__name__)
