"""What the judge says, as text: colour when standard output is a terminal, plain otherwise."""

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

COMMAND = "python practice/judge.py"
MARKS = {"solved": ("✓", "green"), "started": ("…", "yellow"), "open": ("·", "dim")}
CODES = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "bold": "1", "dim": "2"}


def paint(text, colour):
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m"


def shorten(path):
    """A path as seen from here, when that is shorter."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def visible(value):
    """The strings of a report, with control characters spelt out: an answer must not steer the
    terminal."""
    if isinstance(value, dict):
        return {key: visible(one) for key, one in value.items()}
    if isinstance(value, list):
        return [visible(one) for one in value]
    if isinstance(value, str):
        return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}",
                      value)
    return value


def _indent(text, by=4):
    return textwrap.indent(str(text), " " * by)


# ------------------------------------------------------------------------------ lists and progress


def progress(rows, following):
    solved = sum(row["state"] == "solved" for row in rows)
    width = 40
    filled = round(width * solved / len(rows))
    bar = paint("█" * filled, "green") + paint("░" * (width - filled), "dim")
    lines = [f"{bar}  {solved} of {len(rows)} solved", ""]
    if following is None:
        return "\n".join(lines + ["Everything is solved."])
    row = next(row for row in rows if row["name"] == following)
    begun = row["state"] == "started"
    lines += [
        f"{'Go on with' if begun else 'Next'}: {row['number']}. {paint(row['title'], 'bold')} "
        f"({row['difficulty']}, {row['minutes']} minutes)", "",
        f"    {COMMAND} {'run' if begun else 'start'} {following}"
    ]
    if begun:
        lines.append(f"    {COMMAND} hint {following}")
    lines += ["", f"All exercises: {COMMAND} list. Everything else: {COMMAND} --help"]
    return "\n".join(lines)


def table(rows):
    lines, chapter = [], None
    for row in rows:
        if row["chapter"] != chapter:
            chapter = row["chapter"]
            lines += [""] * bool(lines) + [paint(chapter, "bold")]
        mark, colour = MARKS[row["state"]]
        lines.append(
            f"  {paint(mark, colour)} {row['number']:2} {row['name']:<17} {row['title']:<47} "
            + paint(f"{row['kind']:<6} {row['difficulty']:<6} {row['minutes']:2} min", "dim"))
    return "\n".join(lines)


def everything(rows):
    lines = []
    for row in rows:
        colour = {"passes": "green", "fails": "red"}.get(row["state"], "dim")
        failure = f": {first_failure(row)}" if row["state"] == "fails" else ""
        lines.append(
            f"{row['number']:3} {row['exercise']:<17} {paint(row['state'], colour)}{failure}")
    passing = sum(row["state"] == "passes" for row in rows)
    return "\n".join([*lines, "", f"{passing} of {len(rows)} pass."])


# ------------------------------------------------------------------------------------ one exercise


def statement(exercise, path, new):
    text = flow(exercise.statement.strip())
    if sys.stdout.isatty():
        text = re.sub(r"^#+ (.*)$", lambda m: paint(m[1], "bold"), text, flags=re.M)
        text = re.sub(r"`([^`\n]+)`", lambda m: paint(m[1], "blue"), text)
    about = f"{exercise.number}. {exercise.title}"
    facts = f"{exercise.level}, {exercise.minutes} minutes, for the chapter “{exercise.chapter}”"
    where = f"Write your answer in {shorten(path)}" + ("." if new else
                                                       " (it is there already, and kept).")
    return "\n".join([
        paint(about, "bold"),
        paint(facts, "dim"), "", text, "", where, f"Then: {COMMAND} run {exercise.name}"
    ])


def flow(text):
    """Wrap the paragraphs of a text to the terminal; leave code, pictures and the marks of lists
    alone."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    blocks = []
    for part in re.split(r"(^```.*?^```$)", text, flags=re.M | re.S):
        if part.startswith("```"):
            blocks.append(textwrap.indent("\n".join(part.splitlines()[1:-1]), "    "))
            continue
        for block in part.strip().split("\n\n"):
            items = re.split(r"\n(?=- )", block)
            blocks.append("\n".join(
                textwrap.fill(" ".join(
                    item.split()), width, break_long_words=False, break_on_hyphens=False,
                              subsequent_indent="  " if item.startswith("- ") else "")
                for item in items))
    return "\n\n".join(block for block in blocks if block)


def rule(exercise):
    return paint(
        f"── {exercise.number}. {exercise.title} " + "─" * max(3, 60 - len(exercise.title)), "dim")


def result(exercise, path, outcome):
    """A line for each case, then the first failure in full."""
    outcome = visible(outcome)
    lines = [f"{paint(exercise.title, 'bold')}  {paint(shorten(path), 'dim')}"]
    if problem := outcome["problem"]:
        lines += [paint("  ✗ ", "red") + problem["sentence"]]
        lines += _frames(path, problem["trace"]) + _printed(problem)
        return "\n".join(lines)
    for case in outcome["cases"]:
        mark = paint("✓", "green") if case["passed"] else paint("✗", "red")
        lines.append(f"  {mark} {case['case']}")
    failed = [case for case in outcome["cases"] if not case["passed"]]
    if failed:
        lines += ["", *_failure(path, failed[0])]
        count = len(outcome["cases"])
        lines += [
            "", f"{count - len(failed)} of {count} cases pass. "
            f"One more hint: {COMMAND} hint {exercise.name}"
        ]
    return "\n".join(lines)


def _failure(path, case):
    """The call, what was expected, what came, what was printed, and the learner's frames."""
    lines = [paint(case["case"], "bold")]
    before = case["before"]
    if len(before) > 12:
        lines.append(_indent(paint(f"... {len(before) - 12} statements", "dim")))
    lines += [_indent(paint(source, "dim")) for source in before[-12:]]
    lines.append(_indent(case["call"] or "(before the first call)"))
    if case.get("expected") is not None:
        lines.append(f"  expected  {paint(case['expected'], 'green')}")
    if case.get("got") is not None:
        lines.append(f"  got       {paint(case['got'], 'red')}")
    if case.get("note") and not _says_the_same(case):
        lines.append(f"  that is   {case['note']}")
    if case.get("error"):
        lines.append(f"  error     {paint(case['error'], 'red')}")
    return lines + _frames(path, case.get("trace") or []) + _printed(case)


def _says_the_same(case):
    return case["note"] == f"expected {case['expected']}, got {case['got']}"


def _frames(path, frames):
    lines = []
    for frame in frames:
        lines.append(f"  at        {Path(path).name}, line {frame['line']}, in {frame['function']}")
        if frame["source"]:
            lines.append(f"                {frame['source']}")
    return lines


def _printed(case):
    return ["  printed", _indent(case["printed"].rstrip("\n"))] if case.get("printed") else []


def first_failure(outcome):
    """The first failure of a report, in one line."""
    outcome = visible(outcome)
    if outcome["problem"]:
        return outcome["problem"]["sentence"].splitlines()[0]
    for case in outcome["cases"]:
        if not case["passed"]:
            said = case.get("error") or case.get("note") or f"{case['expected']}: {case['got']}"
            return f"{case['case']}: {said.splitlines()[0]}"
    return ""


def success(exercise, following):
    lines = [paint("Solved.", "green"), "", flow(exercise.explanation)]
    if following:
        lines += ["", f"Next: {following.title}", f"    {COMMAND} start {following.name}"]
    else:
        lines += ["", "That was the last one: everything is solved."]
    return "\n".join(lines)


def hint(exercise, text, number, of):
    return f"{paint(f'{exercise.title}, hint {number} of {of}', 'bold')}\n\n{flow(text)}"


def solution(exercise):
    return "\n\n".join([
        paint(exercise.title, "bold"),
        _indent(exercise.solution.strip()),
        flow(exercise.explanation)
    ])


# ---------------------------------------------------------------------------- machine, maintenance


def doctor(found, kinds, folder):
    gpu = found["gpu"] or "no GPU: Triton kernels run in the interpreter"
    lines = [
        f"Python {found['python']} on {found['system']}",
        f"PyTorch {found['torch'] or 'not installed'}",
        f"Triton {found['triton'] or 'not installed'}", gpu, f"Answers in {shorten(folder)}", ""
    ]
    for kind, state in kinds.items():
        mark = paint("✓", "green") if state["runs"] else paint("✗", "red")
        lines.append(f"  {mark} {kind:<7} {state['exercises']:2} exercises"
                     + ("" if state["runs"] else f": {state['why_not']}"))
    return "\n".join(lines)


def check(faults, skipped, seconds):
    lines = []
    for name, sentences in faults.items():
        lines.append(f"  {paint('✗', 'red') if sentences else paint('✓', 'green')} {name}")
        lines += [f"      {sentence}" for sentence in sentences]
    bad = sum(bool(sentences) for sentences in faults.values())
    lines += [
        "",
        f"{len(faults)} exercises, {bad} with faults, {skipped} cannot run here ({seconds:.0f} s)"
    ]
    return "\n".join(lines)


def imported(done):
    lines = [f"{len(done['written'])} answers imported, {len(done['same'])} were the same already."]
    for name in done["different"]:
        lines.append(
            f"  {name}: yours is different and was kept (--replace takes the imported one)")
    for name in done["unknown"]:
        lines.append(f"  {name}: no exercise has this name, left out")
    return "\n".join(lines)


def grade(data):
    """The shares of the copy bandwidth, shape by shape, and the mark."""
    if data["refused"]:
        return paint("Not graded: ", "red") + data["refused"]
    lines = [f"{data['card']}, copy bandwidth {data['copy_gb_s']:,.0f} GB/s", ""]
    for row in data["shapes"]:
        lines.append(f"  {row['shape']:<34} {row['us']:9.1f} µs  {row['share']:6.2f} of copy   "
                     + paint(f"ours {row['our_share']:.2f}", "dim"))
    lines += [
        "", f"Score {data['score']:.2f} of copy bandwidth, ours {data['our_score']:.2f}: "
        + paint(data["mark"], "bold")
    ]
    return "\n".join(lines)
