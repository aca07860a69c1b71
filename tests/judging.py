"""The judge of the exercises as a reader starts it, for the tests of it."""

import json
import subprocess
import sys
from pathlib import Path

from practice.catalog import load_exercises

ROOT = Path(__file__).resolve().parents[1]
EXERCISES = load_exercises()
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


def run(folder, *arguments, **options):
    """The judge in a process of its own, as a reader starts it."""
    program = str(ROOT / "practice" / "judge.py")
    return subprocess.run([sys.executable, program, *arguments, "--answers",
                           str(folder)], capture_output=True, text=True, encoding="utf-8",
                          timeout=120, **options)


def ask(folder, *arguments):
    """(exit status, data) of a command with --json."""
    done = run(folder, *arguments, "--json")
    return done.returncode, json.loads(done.stdout)


def write(folder, name, text, encoding="utf-8"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_bytes(text.encode(encoding))
