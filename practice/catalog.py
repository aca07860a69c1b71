"""Reads the exercises and keeps a reader's answers and progress.

An exercise is a folder `exercises/NN_name/`:

    meta.json        title, difficulty (1 to 3), minutes, chapter, kind (python, torch or triton)
    statement.md     what to write; its ```python blocks with expectations are the first cases
    starter.py       runs, and fails
    tests.py         cases(): yields (name, script) pairs; see runner.py
    hints.md         three hints of rising strength, separated by lines of ---
    solution.py      one good answer
    explanation.md   why it works; shown after success
    wrong.md         three or more plausible answers that the cases must reject; see wrong.py

Answers live in `answers/NAME.py`, without the number, so that an update that renumbers the
exercises finds them again. `answers/progress.json` says what is solved and how many hints were
seen.
"""

import datetime
import io
import json
import os
import re
import tokenize
from dataclasses import dataclass
from difflib import get_close_matches
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
    """The exercise that a word names: its name, number, folder or an answer file. Raises
    LookupError."""
    path = Path(word)
    words = [str(word), path.stem, path.stem.partition(".")[0], path.parent.name]
    for candidate in words:
        for exercise in exercises:
            if candidate in (exercise.name, exercise.folder.name) or (candidate.lstrip("0") == str(
                    exercise.number)):
                return exercise
    close = [
        e.name for e in exercises if str(word) and (str(word) in e.name or e.name in str(word))
    ]
    close = close or get_close_matches(str(word), [e.name for e in exercises], 1)
    hint = f"; did you mean {' or '.join(close)}?" if close else ": `list` shows all of them"
    raise LookupError(f"there is no exercise {str(word)!r}{hint}")


def read_source(path):
    """The text of a Python file. Raises SyntaxError with a sentence for a file that cannot be read
    as text."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        what = "it is a folder" if Path(path).is_dir() else error.strerror
        raise SyntaxError(f"{path} cannot be read: {what}") from None
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise SyntaxError("the file is saved as UTF-16: save it as UTF-8")
    if b"\0" in data:
        raise SyntaxError("the file is not text (it holds zero bytes): save it as UTF-8")
    encoding = "utf-8"
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        if "unknown encoding" in str(error):
            raise SyntaxError(f"Python cannot decode what the file says it is: {error}") from None
    try:
        return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = data[:error.start].count(b"\n") + 1
        raise SyntaxError(f"the file is not {error.encoding.upper()}: line {line} has the byte "
                          f"0x{data[error.start]:02x}. Save it as UTF-8") from None


def progress_in(data):
    """What is progress in the content of a JSON file: {"solved": {name: date}, "hints": {name:
    number seen}}."""
    parts = {
        key: data[key] if isinstance(data.get(key), dict) else {}
        for key in ("solved", "hints")
    }
    return {
        "solved": {name: date
                   for name, date in parts["solved"].items() if isinstance(date, str)}, "hints": {
                       name: seen
                       for name, seen in parts["hints"].items() if type(seen) is int and seen > 0
                   }
    }


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
        """Rename an answer to NAME.old-1.py (or -2, ...), so that nothing a reader wrote is
        lost."""
        number = 1
        while (kept := self.folder / f"{exercise.name}.old-{number}.py").exists():
            number += 1
        os.replace(self.path(exercise), kept)
        return kept

    def progress(self):
        """What `progress_in` finds in progress.json; a file that is no JSON object is set aside."""
        try:
            progress = json.loads(self._file.read_bytes())
            if not isinstance(progress, dict):
                raise ValueError("progress.json must hold an object")
        except FileNotFoundError:
            progress = {}
        except (ValueError, RecursionError):
            os.replace(self._file, self._file.with_name("progress.unreadable.json"))
            progress = {}
        return progress_in(progress)

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
