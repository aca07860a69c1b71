"""A rank that rank 0 starts on its own machine: `python -m paged.parallel.worker`.

What it is to do comes pickled through standard input; from there on it is a rank like those of
torchrun.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import torch


def start(rank: int, size: int, port: int, job: Callable, arguments: dict[str, Any]) -> Popen:
    """A process that runs the job as this rank. It lives in a session of its own: Ctrl-C is rank
    0's affair."""
    threads = str(max(1, torch.get_num_threads()))
    environment = {
        name: value
        for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    } | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2]), *filter(None, sys.path)])
    }
    process = Popen([sys.executable, "-m", "paged.parallel.worker"], stdin=PIPE, env=environment,
                    start_new_session=True)
    assert process.stdin is not None
    with process.stdin as pipe:
        pickle.dump((job, arguments), pipe)
    return process


if __name__ == "__main__":
    job, arguments = pickle.load(sys.stdin.buffer)
    try:
        job(**arguments)
    except (ValueError, OSError, MemoryError):  # rank 0 has the sentence
        sys.exit(1)
