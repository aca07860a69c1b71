"""Protects what a reader of the code relies on: one layout, no lint, types that hold; and that what
runs on GitHub is what the README says.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["paged", "practice", "tests", "book"]


def findings(*command: str, **environment: str) -> str:
    """What a tool prints about this repository, run as a module of this Python; nothing when it is
    content."""
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True,
                         timeout=600, env={**os.environ, **environment})
    return "" if run.returncode == 0 else run.stdout + run.stderr


def test_no_lint():
    found = findings("ruff", "check", "--output-format", "concise", *SOURCES)
    assert not found, f"python -m ruff check:\n{found}"


def test_layout():
    found = findings("yapf", "--diff", "--recursive", "--parallel", *SOURCES)
    command = f"python -m yapf --in-place --recursive {' '.join(SOURCES)}"
    assert not found, f"{command} would do this:\n{found}"


def test_types():
    """Of everything that pyproject.toml names, and of the exercises.

    Their files have the same names in folders that are no package names, so mypy gets copies under
    names that are. The copies lie beside mypy's cache, which knows them by their paths.
    """
    base = ROOT / ".mypy_cache" / "bases"
    copies = base / "exercise_files"
    shutil.rmtree(copies, ignore_errors=True)
    for folder in (ROOT / "practice" / "exercises").iterdir():
        target = copies / f"exercise_{folder.name}"
        target.mkdir(parents=True)
        for file in folder.glob("*.py"):
            shutil.copy(file, target)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (files,) = re.findall(r'^\[tool.mypy\]\nfiles = \[(.*)\]', settings, re.M)
    paths = [path for pattern in re.findall(r'"(.*?)"', files) for path in ROOT.glob(pattern)]
    assert len(paths) > 5
    found = findings("mypy", *map(str, paths), str(copies), MYPYPATH=str(base))
    assert not found, f"python -m mypy:\n{found}"
