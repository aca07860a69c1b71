"""A rank that rank 0 starts on its own machine: `python -m paged.parallel.worker`.

What it is to do comes pickled through standard input; from there on it is a rank like those of
torchrun.
"""

from __future__ import annotations

import pickle
import sys

if __name__ == "__main__":
    job, arguments = pickle.load(sys.stdin.buffer)
    try:
        job(**arguments)
    except (ValueError, OSError, MemoryError):  # rank 0 has the sentence
        sys.exit(1)
