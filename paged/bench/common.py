"""What the benchmarks share: the shapes they run, and what every record says about where it was
made."""

from __future__ import annotations

import platform
import subprocess
import time
from pathlib import Path

import torch

import paged
from paged.models.config import ModelConfig

QWEN3_0_6B = ModelConfig("qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
                         num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True,
                         rope_theta=1e6, tie_word_embeddings=True, max_position_embeddings=40_960)

VOCABULARY = 10_000
"""Token ids that prompts are drawn from."""


def check_output(path: str | Path | None) -> None:
    """Refuse (ValueError) a file that cannot be written, before anything is measured: a long run
    must not end in a typing error."""
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise ValueError(f"{path} cannot be written: name a file in a directory that exists")


def machine(command: str) -> dict:
    """Card, driver, versions, commit, date and command: the head of a record."""
    cuda = torch.cuda.is_available()
    return {
        "command": command, "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name()
        if cuda else platform.processor() or platform.machine(), "driver": _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "paged": paged.__version__, "commit": _output("git", "rev-parse", "--short", "HEAD")
    }


def _output(*command: str) -> str | None:
    """The first line a command prints, or None where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True,
                              cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()[0] if done.stdout else None
