"""Settings for all tests: few threads, a repeatable hypothesis, and the skip of what needs a
GPU."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

# Before torch is imported anywhere. Three workers on two cores must not start four threads each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# Before triton is imported anywhere: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings

settings.register_profile("paged", deadline=None, derandomize=True, print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paged")

ROOT = Path(__file__).resolve().parents[1]

# Where the tests run in the background, Ctrl-C is ignored, and those about it would test nothing.
if (signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Skip tests marked gpu where there is no CUDA device."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="module")
def browser():
    """Chromium, without a window; skips where there is none.

    A module at a time: two of these alive in one process do not get along.
    """
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed")
    sync_api = pytest.importorskip("playwright.sync_api",
                                   reason="the package playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program,
                                              args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A folder into which a wheel built from this tree was installed, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    for command in (["wheel",
                     str(ROOT), "--no-deps", "--no-build-isolation", "-w",
                     str(folder)], [
                         "install", "--no-deps", "--no-index", "--find-links",
                         str(folder), "--target",
                         str(folder / "site"), "paged"
                     ]):
        run = subprocess.run(pip + command, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
    return folder / "site"
