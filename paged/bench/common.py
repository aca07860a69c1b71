"""What every record of a measurement says about where and how it was made."""

from __future__ import annotations

import platform
import subprocess
import time
from pathlib import Path

import torch

import paged


def machine(command: str) -> dict:
    """Card, driver, versions, commit, date and command: the head of a record."""
    cuda = torch.cuda.is_available()
    return {"command": command, "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
            "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
            "paged": paged.__version__, "commit": _output("git", "rev-parse", "--short", "HEAD")}


def _output(*command: str) -> str | None:
    """The first line a command prints, or None where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()[0] if done.stdout else None
