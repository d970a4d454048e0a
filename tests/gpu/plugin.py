"""For pytest on a GPU host: settings of plugins that are missing there, and an option.

Named in PYTEST_PLUGINS, so that pytest-xdist's processes load it before they read pyproject.toml.
"""

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
