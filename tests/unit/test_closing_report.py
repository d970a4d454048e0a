"""What a test leaves behind does not take pytest's report along."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOOKS = '''
import ast
import gc

import pytest
from tests.conftest import pytest_sessionfinish as ours

pytest_sessionfinish = ours


class Importer:
    """As plugins that import modules only now. The collector comes in the middle of the first."""

    def pytest_sessionfinish(self):
        gc.set_threshold(gc.get_count()[0] + 200)
        gc.enable()
        compile("a = [b, c]\\n" * 1000, "module", "exec", ast.PyCF_ONLY_AST)


def pytest_configure(config):
    config.pluginmanager.register(Importer())
'''
LEAKING = """
import asyncio
import gc


async def fail():
    raise ValueError("nobody asked")


def test_leaves_a_failed_task():
    gc.disable()
    loop = asyncio.new_event_loop()
    task = loop.create_task(fail())
    task.itself = task
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
"""


def test_a_failed_task_that_nobody_asked_leaves_the_report(tmp_path):
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_leaking.py").write_text(LEAKING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1 passed" in run.stdout, run.stderr
    assert run.returncode == 0
