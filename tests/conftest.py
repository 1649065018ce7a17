"""What holds for every test: skips with their reason, no windows, the same random examples in CI every time."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

gc.disable()  # until all tests are collected: a third of the time that the imports of hundreds of files take
os.environ["MPLBACKEND"] = "Agg"
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # started behind `&` in a script: so would be all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
if importlib.util.find_spec("hypothesis") is not None:  # the GPU suite runs where it is not installed
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
    settings.register_profile("local", deadline=None)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def module_at(path: Path) -> ModuleType:
    """Import a file that lies in no package, by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins that lie beside this file."""
    for name in ("own_process", "without_gpus"):
        config.pluginmanager.register(module_at(Path(__file__).parent / f"{name}.py"), name)


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


def pytest_collection_finish() -> None:
    """Leave what every test has imported out of garbage collections: a test that asks for one would wait a second."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are then formed in one order, and no test waits for a core that another needs."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a file of scripts/ by its name; it is no package."""

    def load(name: str) -> ModuleType:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # whatever comes in its place is forgotten again
        return module_at(Path(__file__).parents[1] / "scripts" / f"{name}.py")

    return load
