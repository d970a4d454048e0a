"""For pytest on a GPU host: settings of plugins that are missing there, an option, and the names of
tests that fail as they do: a run that its machine cuts off has no summary.

Named in PYTEST_PLUGINS, so that pytest-xdist's processes load it before they read pyproject.toml.
"""

import pytest

SETTINGS_OF_PLUGINS = {"asyncio": "asyncio_mode", "timeout": "timeout"}
"""By plugin, what pyproject.toml sets for it: unknown settings are errors."""


def pytest_addoption(parser, pluginmanager):
    parser.addoption(
        "--gpu-memory-share",
        dest="gpu_memory_share",
        type=float,
        help="the share of a GPU's memory that a process of tests may use",
    )
    for plugin, setting in SETTINGS_OF_PLUGINS.items():
        if not pluginmanager.hasplugin(plugin):
            parser.addini(setting, f"of pytest-{plugin}, which is not installed")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        config.pluginmanager.register(FailureNames(reporter))


class FailureNames:
    """Of the process that reports."""

    def __init__(self, reporter):
        self._reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._reporter.write_line(f"FAILED in {report.when}: {report.nodeid}")
