"""A plugin of pytest for the GPU suite: a test that needs a package which is not here is skipped, as `needs PACKAGE`.

The suite runs where labkit is not installed. `make test` loads no such plugin: a missing package is an error there.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

PACKAGES = {
    "hypothesis": "hypothesis", "papermill": "papermill", "nbformat": "nbformat", "nbval": "nbval",
    "IPython": "jupyterlab", "ipywidgets": "ipywidgets", "matplotlib": "matplotlib", "yaml": "PyYAML",
    "tokenizers": "tokenizers", "safetensors": "safetensors", "xxhash": "xxhash",
    "transformers": "transformers", "megatron": "megatron-core",
}  # fmt: skip
"""Module -> package, of all that labkit names and a bare machine may lack."""


def missing(told: str) -> str | None:
    """The package that a text with a ModuleNotFoundError asks for; None if there is none or it is unknown here."""
    if found := re.search(r"ModuleNotFoundError: No module named '(\w+)", told):
        return PACKAGES.get(found[1])
    named = re.search(r"ModuleNotFoundError: [^\n]*\(pip install ([\w-]+)\)", told)  # labkit's own words
    return named[1] if named and named[1] in PACKAGES.values() else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that imports the package at its top."""
    report = yield
    if report.failed and (package := missing(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {package}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that imports the package while it runs, in this process or in a rank."""
    report = yield
    if report.failed and call.excinfo is not None:
        error = call.excinfo.value
        package = PACKAGES.get(error.name or "") if isinstance(error, ModuleNotFoundError) else missing(str(error))
        if package:
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: needs {package}")
    return report
