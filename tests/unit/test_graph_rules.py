"""The rules of graphs, on the host."""

from __future__ import annotations

import pytest
from graph_rules import *  # noqa: F403
from graph_rules import Machine
from graph_rules_changes import *  # noqa: F403
from graph_rules_numbers import *  # noqa: F403


@pytest.fixture
def machine() -> Machine:
    return Machine("emulated", "cpu")
