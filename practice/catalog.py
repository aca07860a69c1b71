"""Reads the exercises and keeps a reader's answers and progress.

An exercise is a folder `exercises/NN_name/`:

    meta.json        title, difficulty (1 to 3), minutes, chapter, kind (python, torch or triton)
    statement.md     what to write; its ```python blocks with expectations are the first cases
    starter.py       runs, and fails
    tests.py         cases(): yields (name, script) pairs; see runner.py
    hints.md         three hints of rising strength, separated by lines of ---
    solution.py      one good answer
    explanation.md   why it works; shown after success
    wrong/*.py       three or more plausible answers that the cases must reject; their docstrings say why

Answers live in `answers/NAME.py`, without the number, so that an update that renumbers the exercises finds
them again. `answers/progress.json` says what is solved and how many hints were seen.
"""

import datetime
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

EXERCISES = Path(__file__).resolve().parent / "exercises"
DIFFICULTIES = {1: "easy", 2: "medium", 3: "hard"}
KINDS = ("python", "torch", "triton")


@dataclass(frozen=True)
class Exercise:
    """One exercise as it stands on disk."""

    folder: Path
    number: int
    name: str
    title: str
    difficulty: int
    minutes: int
    chapter: str
    kind: str

    def _text(self, name):
        return (self.folder / name).read_text(encoding="utf-8")

    @property
    def statement(self):
        return self._text("statement.md")

    @property
    def starter(self):
        return self._text("starter.py")

    @property
    def tests(self):
        return self._text("tests.py")

    @property
    def hints(self):
        return [hint.strip() for hint in re.split(r"^---$", self._text("hints.md"), flags=re.M)]

    @property
    def solution(self):
        return self._text("solution.py")

    @property
    def explanation(self):
        return self._text("explanation.md").strip()

    @property
    def wrong(self):
        return sorted((self.folder / "wrong").glob("*.py"))

    @property
    def level(self):
        return DIFFICULTIES[self.difficulty]


def load_exercises(folder=EXERCISES):
    """All exercises, in order."""
    found = []
    for path in sorted(Path(folder).iterdir()):
        if match := re.fullmatch(r"(\d\d)_(\w+)", path.name):
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            found.append(Exercise(path, int(match[1]), match[2], **meta))
    return found


def find(exercises, word):
    """The exercise that a word names: its name, number, folder or an answer file. Raises LookupError."""
    path = Path(word)
    words = [str(word), path.stem, path.stem.partition(".")[0], path.parent.name]
    if path.parent.name == "wrong":
        words.append(path.parent.parent.name)
    for candidate in words:
        for exercise in exercises:
            if candidate in (exercise.name, exercise.folder.name) or candidate.isdecimal() and (
                    int(candidate) == exercise.number):
                return exercise
    close = [e.name for e in exercises if str(word) and (str(word) in e.name or e.name in str(word))]
    hint = f"; did you mean {' or '.join(close)}?" if close else ": `list` shows all of them"
    raise LookupError(f"there is no exercise {str(word)!r}{hint}")


class Answers:
    """A reader's folder of answers: the files themselves and progress.json beside them."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self._file = self.folder / "progress.json"

    def path(self, exercise):
        return self.folder / f"{exercise.name}.py"

    def exists(self, exercise):
        return self.path(exercise).exists()

    def start(self, exercise):
        """Write the starter, unless there is an answer already; True when it was written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(self.path(exercise), "x", encoding="utf-8", newline="\n") as file:
                file.write(exercise.starter)
        except FileExistsError:
            return False
        return True

    def set_aside(self, exercise):
        """Rename an answer to NAME.old-1.py (or -2, ...), so that nothing a reader wrote is lost."""
        number = 1
        while (kept := self.folder / f"{exercise.name}.old-{number}.py").exists():
            number += 1
        os.replace(self.path(exercise), kept)
        return kept

    def progress(self):
        """{"solved": {name: date}, "hints": {name: number seen}}; an unreadable file is set aside."""
        try:
            progress = json.loads(self._file.read_text(encoding="utf-8"))
            if not isinstance(progress, dict):
                raise ValueError("progress.json must hold an object")
        except FileNotFoundError:
            progress = {}
        except ValueError:
            os.replace(self._file, self._file.with_name("progress.unreadable.json"))
            progress = {}
        return {key: progress[key] if isinstance(progress.get(key), dict) else {}
                for key in ("solved", "hints")}

    def record(self, exercise, solved=None, hints=None):
        """Note that an exercise is solved, or how many of its hints have been seen."""
        progress = self.progress()
        if solved:
            progress["solved"].setdefault(exercise.name, datetime.date.today().isoformat())
        if hints:
            progress["hints"][exercise.name] = max(hints, progress["hints"].get(exercise.name, 0))
        self.save_progress(progress)

    def save_progress(self, progress):
        """Replace progress.json in one move, so that an interruption leaves the old one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(progress, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(partial, self._file)
