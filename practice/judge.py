"""The judge of the exercises.

    python practice/judge.py                  what you have solved, and what to do next
    python practice/judge.py list             all exercises
    python practice/judge.py start slots      read an exercise, and get a file to write in
    python practice/judge.py run slots        judge your answer (a name, a number or a file)
    python practice/judge.py slots            the same
    python practice/judge.py all              judge everything you have started
    python practice/judge.py watch            judge again on every save
    python practice/judge.py hint slots       one more hint
    python practice/judge.py solution slots   the solution, and why it works
    python practice/judge.py reset slots      begin again; your old answer is kept beside it
    python practice/judge.py doctor           which exercises can run here, and why others cannot
    python practice/judge.py grade triton_store    how fast a kernel is, on a GPU
    python practice/judge.py export FILE, import FILE    answers to and from the pages of the book
    python practice/judge.py check            solutions pass, starters and wrong answers fail

Exit status: 0 when all went well, 1 when an answer fails, 2 when the command cannot be carried out.
"""

import builtins
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from practice import portable, report, sandbox  # noqa: E402
from practice.catalog import KINDS, Answers, find, load_exercises  # noqa: E402
from practice.check import faults_of  # noqa: E402
from practice.options import Refused, parse  # noqa: E402


class Judge:
    """The commands, over one folder of answers. Each returns (exit status, data for --json)."""

    def __init__(self, answers, say, seconds=None):
        self.exercises = load_exercises()
        self.answers = Answers(answers)
        if self.answers.folder.exists() and not self.answers.folder.is_dir():
            raise Refused(f"{answers} is a file: --answers names a folder")
        self.say = say
        self.seconds = seconds

    def _find(self, word):
        try:
            return find(self.exercises, word)
        except LookupError as error:
            raise Refused(str(error)) from None

    def _answer(self, word):
        """(exercise, file): for a path that file, for a name or a number the one in the folder of
        answers."""
        exercise = self._find(word) if word else self._latest()
        path = Path(word or "")
        if path.suffix == ".py" or (path.suffix or path.name != (word or "")) and not path.is_dir():
            if not path.is_file():
                raise Refused(f"there is no file {word}")
            return exercise, path
        return exercise, self.answers.path(exercise)

    def _latest(self):
        """The exercise whose answer was saved last, else the next one."""
        started = [e for e in self.exercises if self.answers.exists(e)]
        if started:
            return max(started, key=lambda e: self.answers.path(e).stat().st_mtime)
        return self._next() or self.exercises[0]

    def _next(self, after=None):
        """The first exercise that is not solved; after one of them, the nearest of its chapter."""
        solved = self.answers.progress()["solved"]
        unsolved = [e for e in self.exercises if e.name not in solved]
        if after:
            unsolved.sort(key=lambda e: (e is after, e.chapter != after.chapter, e.number < after.
                                         number, e.number))
        return unsolved[0] if unsolved else None

    def _state(self, exercise, progress):
        if exercise.name in progress["solved"]:
            return "solved"
        return "started" if self.answers.exists(exercise) else "open"

    def _rows(self):
        progress = self.answers.progress()
        return [{
            "number": e.number, "name": e.name, "title": e.title, "kind": e.kind,
            "difficulty": e.level, "minutes": e.minutes, "chapter": e.chapter, "state": self._state(
                e, progress)
        } for e in self.exercises]

    def progress(self):
        rows, following = self._rows(), self._next()
        self.say(report.progress(rows, following and following.name))
        return 0, {
            "solved": sum(row["state"] == "solved" for row in rows), "of": len(rows),
            "next": following and following.name, "exercises": rows
        }

    def list(self):
        rows = self._rows()
        self.say(report.table(rows))
        return 0, {"exercises": rows}

    def start(self, word):
        exercise = self._find(word) if word else self._next() or self.exercises[0]
        new = self.answers.start(exercise)
        path = self.answers.path(exercise)
        self.say(report.statement(exercise, path, new))
        return 0, {"exercise": exercise.name, "file": str(path), "new": new}

    def run(self, word):
        """Judge one answer; an exercise that has none gets its starter."""
        exercise, path = self._answer(word)
        if not path.exists() and self.answers.start(exercise):
            self.say(f"You had no answer yet: the starter is now in {report.shorten(path)}.\n")
        return self._judge(exercise, path)

    def _judge(self, exercise, path):
        if why_not := sandbox.why_not(exercise.kind):
            raise Refused(f"{exercise.name} cannot run here: {why_not}")
        result = sandbox.run_answers(exercise, [path.resolve()], self.seconds)[0]
        self.say(report.result(exercise, path, result))
        if result["passed"] and path.resolve().parent == self.answers.folder.resolve():
            self.answers.record(exercise, solved=True)
        if result["passed"]:
            self.say(report.success(exercise, self._next(after=exercise)))
        return int(not result["passed"]), {"exercise": exercise.name, "file": str(path), **result}

    def all(self):
        """Judge every answer that was started; 0 only when every exercise that can run here is
        solved."""
        kinds = {kind: sandbox.why_not(kind) for kind in KINDS}
        started = [e for e in self.exercises if self.answers.exists(e) and not kinds[e.kind]]

        def run(exercise):
            return sandbox.run_answers(exercise, [self.answers.path(exercise).resolve()],
                                       self.seconds)[0]

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            results = dict(zip((e.name for e in started), threads.map(run, started)))
        rows = []
        for exercise in self.exercises:
            result = results.get(exercise.name)
            if result and result["passed"]:
                self.answers.record(exercise, solved=True)
            state = "not started"
            if kinds[exercise.kind]:
                state = "cannot run here"
            elif result:
                state = "passes" if result["passed"] else "fails"
            rows.append({
                "exercise": exercise.name, "number": exercise.number, "state": state,
                **(result or {})
            })
        self.say(report.everything(rows))
        done = all(row["state"] in ("passes", "cannot run here") for row in rows)
        return (0 if done else 1), {"passed": done, "results": rows}

    def watch(self, word):
        """Judge again whenever an answer is saved, until Ctrl-C."""
        latest, path = self._answer(word)
        if not path.exists():
            self.answers.start(latest)
        watched = [(latest, path)] if word else [(e, self.answers.path(e)) for e in self.exercises]
        times = {}

        def saved():
            found = []
            for exercise, file in watched:
                try:
                    changed = file.stat().st_mtime_ns
                except FileNotFoundError:  # not started, or an editor is about to rename a new file
                    continue
                if changed != times.get(exercise.name):
                    found.append((exercise, file))
                times[exercise.name] = changed
            return found

        saved()
        current = [(latest, path)]
        self.say(f"Watching {report.shorten(path if word else path.parent)}. Ctrl-C ends.\n")
        try:
            while True:
                for exercise, file in current:
                    self.say(report.rule(exercise))
                    try:
                        self._judge(exercise, file)
                    except Refused as error:
                        self.say(str(error))
                time.sleep(0.3)
                current = saved()
        except KeyboardInterrupt:
            self.say("")
        return 0, {}

    def hint(self, word, number):
        exercise = self._find(word) if word else self._latest()
        hints = exercise.hints
        seen = self.answers.progress()["hints"].get(exercise.name, 0)
        number = min(seen + 1, len(hints)) if number is None else number
        if not 1 <= number <= len(hints):
            raise Refused(
                f"{exercise.name} has {len(hints)} hints, number {number} is not among them")
        self.answers.record(exercise, hints=number)
        self.say(report.hint(exercise, hints[number - 1], number, len(hints)))
        data = {
            "exercise": exercise.name, "number": number, "of": len(hints), "hint": hints[number - 1]
        }
        return 0, data

    def solution(self, word):
        exercise = self._find(word) if word else self._latest()
        self.say(report.solution(exercise))
        return 0, {
            "exercise": exercise.name, "solution": exercise.solution,
            "explanation": exercise.explanation
        }

    def reset(self, word):
        exercise = self._find(word)
        kept = self.answers.set_aside(exercise) if self.answers.exists(exercise) else None
        self.answers.start(exercise)
        path = self.answers.path(exercise)
        self.say(f"{report.shorten(path)} is the starter again."
                 + (f" Your answer is kept in {report.shorten(kept)}." if kept else ""))
        return 0, {"exercise": exercise.name, "file": str(path), "kept": kept and str(kept)}

    def doctor(self):
        found = sandbox.machine()
        counts = {kind: sum(e.kind == kind for e in self.exercises) for kind in KINDS}
        kinds = {
            kind: {
                "exercises": counts[kind], "runs": sandbox.why_not(kind) is None,
                "why_not": sandbox.why_not(kind)
            }
            for kind in KINDS
        }
        self.say(report.doctor(found, kinds, self.answers.folder))
        return 0, {"machine": found, "kinds": kinds}

    def check(self, words):
        """Hold the exercises to their rules. With names, those only."""
        chosen = [self._find(word) for word in words] or self.exercises
        chosen = [e for e in chosen if not sandbox.why_not(e.kind)]
        began = time.monotonic()
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            faults = dict(zip((e.name for e in chosen), threads.map(faults_of, chosen)))
        skipped = len(words or self.exercises) - len(chosen)
        self.say(report.check(faults, skipped, time.monotonic() - began))
        bad = any(faults.values())
        return (1 if bad else 0), {"passed": not bad, "skipped": skipped, "faults": faults}

    def export(self, path):
        if Path(path).suffix != ".json":  # an answer of that name would be overwritten
            raise Refused(
                f"an export is a JSON file: {Path(path).with_suffix('.json')}, for example")
        try:
            count = portable.export_answers(self.answers, self.exercises, Path(path))
        except SyntaxError as error:
            raise Refused(str(error)) from None
        self.say(f"{path} holds {count} answers: import it on the progress page of the book.")
        return 0, {"file": path, "answers": count}

    def bring(self, path, replace):
        try:
            done = portable.import_answers(self.answers, self.exercises, Path(path), replace)
        except OSError as error:
            raise Refused(f"{path} cannot be imported: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise Refused(f"{path} cannot be imported: {error}") from None
        self.say(report.imported(done))
        return 0, done

    def grade(self, word, path):
        from practice import perf

        exercise, file = self._answer(word)
        if why_not := perf.why_not(exercise):
            raise Refused(why_not)
        path = Path(path) if path else file
        if path.suffix != ".py" or not path.is_file():
            raise Refused(f"there is no Python file {path}: `start {exercise.name}` makes one")
        passed, _ = self._judge(exercise, path)
        if passed != 0:
            raise Refused("a kernel must be right before it is timed")
        try:
            grade = subprocess.run(
                [sys.executable,
                 str(HERE / "perf.py"), exercise.name,
                 str(path.resolve())], capture_output=True, encoding="utf-8", errors="replace",
                timeout=900)
        except subprocess.TimeoutExpired:
            raise Refused(
                "no end after 15 minutes of measuring: the kernel is far too slow") from None
        if grade.returncode != 0:
            raise Refused((grade.stderr.strip().splitlines() or ["the measurement failed"])[-1])
        data = json.loads(grade.stdout.splitlines()[-1])
        self.say(report.grade(data))
        return (1 if data["refused"] else 0), data


def main(arguments=None):
    if hasattr(sys.stdout,
               "reconfigure"):  # a redirected stream on Windows cannot print ✓ otherwise
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    if os.name == "nt":
        os.system("")  # switches the colours of a Windows console on
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in arguments
    try:
        options = parse(arguments, __doc__)
        judge = Judge(options.answers, (lambda text: None) if as_json else print, options.seconds)
        word = getattr(options, "exercise", None)
        if options.command == "watch" and as_json:
            raise Refused("watch prints until Ctrl-C, and has no JSON to give: `run` has")
        if options.command in ("progress", "list", "all", "doctor"):
            status, data = getattr(judge, options.command)()
        elif options.command == "hint":
            status, data = judge.hint(word, options.number)
        elif options.command == "import":
            status, data = judge.bring(options.file, options.replace)
        elif options.command == "export":
            status, data = judge.export(options.file)
        elif options.command == "grade":
            status, data = judge.grade(word, options.file)
        else:
            status, data = getattr(judge, options.command)(word)
    except BrokenPipeError:
        raise  # whoever read what is printed has gone
    except (Refused, OSError, KeyboardInterrupt) as error:
        text = str(error) or "interrupted"
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename} cannot be used: {error.strerror}"
        status, data = 2, {"error": text}
        if not as_json:
            print(f"judge: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps(data, indent=1, ensure_ascii=False))
    return status


if __name__ == "__main__":
    try:
        outcome = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        outcome = 1
    if not hasattr(builtins,
                   "get_ipython"):  # under %run, SystemExit would print a warning each time
        sys.exit(outcome)
