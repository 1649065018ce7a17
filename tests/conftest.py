"""What holds for every test: skips with their reason, no windows, the same random examples in CI every time."""

import os

import pytest
from hypothesis import settings

os.environ["MPLBACKEND"] = "Agg"
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def why_no_cuda() -> str | None:
    """Why tests marked `gpu` cannot run here; None where they can."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_cuda() if marked else None
    for item in marked:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
