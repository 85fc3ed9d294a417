"""What all tests share is in `shared`; a process that only hands tests to others has no use for it."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Importing torch takes seconds, and no worker starts before this one is ready."""
    if hasattr(config, "workerinput") or config.option.collectonly or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("shared")
