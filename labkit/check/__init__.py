"""Exercises and predictions of the chapters: `check` scores the reader's function and returns what later cells use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.check.bets import predict as predict
    from labkit.check.bets import predictions as predictions
    from labkit.check.checking import check as check
    from labkit.check.hunts.hunting import hunt as hunt
    from labkit.check.parameters import check_parameters as check_parameters
    from labkit.check.scoring import Exercise as Exercise
    from labkit.check.scoring import Outcome as Outcome
    from labkit.check.scoring import Score as Score
    from labkit.check.scoring import compare as compare
    from labkit.check.scoring import exercise as exercise
    from labkit.check.scoring import exercises as exercises
    from labkit.check.scoring import holds as holds
    from labkit.check.scoring import score as score
    from labkit.check.solution_source import solution as solution

__all__, __getattr__, __dir__ = public_names(__name__)
