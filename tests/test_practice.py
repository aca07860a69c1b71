"""Protects the judge: it says in words what is wrong with an answer, a file or a command.

It is used as a reader uses it, in processes of its own, and fed all that an answer can do wrong.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from practice import sandbox
from practice.catalog import Answers
from tests.judging import BY_NAME, EXERCISES, ROOT, ask, run, write


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "answers"


def test_from_the_first_look_to_the_last(folder):
    first = run(folder)
    assert first.returncode == 0 and f"0 of {len(EXERCISES)} solved" in first.stdout
    assert f"judge.py start {EXERCISES[0].name}" in first.stdout

    started = run(folder, "start", "slots")
    assert "From a block table to slots" in started.stdout
    assert "slot_mapping_for([7, 1, 3]" in started.stdout
    assert (folder / "slots.py").read_text(encoding="utf-8") == BY_NAME["slots"].starter

    failed = run(folder, "slots")
    assert failed.returncode == 1
    for line in ("✗ example 1 of the statement", "expected  [28, 31, 4, 12]", "not written yet",
                 "slots.py, line 7, in slot_mapping_for"):
        assert line in failed.stdout
    assert "runner.py" not in failed.stdout and "\x1b" not in failed.stdout

    write(folder, "slots", BY_NAME["slots"].solution)
    passed = run(folder, "run", str(BY_NAME["slots"].number))
    assert passed.returncode == 0 and "Solved." in passed.stdout
    assert BY_NAME["slots"].explanation[:40] in " ".join(passed.stdout.split())
    status, data = ask(folder)
    assert data["solved"] == 1 and data["next"] == EXERCISES[0].name

    status, data = ask(folder, "all")
    states = {row["exercise"]: row["state"] for row in data["results"]}
    assert status == 1 and states["slots"] == "passes" and states["radix"] == "not started"


def test_an_answer_is_never_overwritten_unasked(folder):
    write(folder, "slots", "mine = 1\n")
    assert "kept" in run(folder, "start", "slots").stdout
    run(folder, "slots"), run(folder, "watch", "nonsense")
    assert (folder / "slots.py").read_text(encoding="utf-8") == "mine = 1\n"
    status, data = ask(folder, "reset", "slots")
    assert (folder / "slots.py").read_text(encoding="utf-8") == BY_NAME["slots"].starter
    assert Path(data["kept"]).read_text(encoding="utf-8") == "mine = 1\n"
    assert Path(ask(folder, "reset", "slots")[1]["kept"]).name == "slots.old-2.py"


def test_after_a_success_comes_the_next_of_the_same_chapter(folder):
    """Then an earlier one of it, then the chapters behind it, then those before it."""
    cache = [e for e in EXERCISES if e.chapter == BY_NAME["match"].chapter]
    later = [e for e in EXERCISES if e.number > cache[-1].number]
    order = [*cache[3:], *cache[:2], *later, *EXERCISES[:cache[0].number - 1]]
    answers = Answers(folder)
    write(folder, cache[2].name, cache[2].solution)
    for expected in order[:6] + order[-2:]:
        done = run(folder, "run", cache[2].name)
        assert f"Next: {expected.title}\n" in done.stdout, expected.name
        for exercise in order[:order.index(expected) + 1]:
            answers.record(exercise, solved=True)
        if expected is order[5]:
            for exercise in order[:-2]:
                answers.record(exercise, solved=True)
    assert "everything is solved" in run(folder, "run", cache[2].name).stdout


def test_a_file_anywhere_can_be_judged(folder, tmp_path):
    elsewhere = tmp_path / "other folder" / "slots.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text(BY_NAME["slots"].solution, encoding="utf-8")
    assert run(folder, "run", str(elsewhere)).returncode == 0
    assert ask(folder)[1]["solved"] == 0  # somebody's file is not this reader's answer
    text = elsewhere.rename(elsewhere.with_suffix(".txt"))
    assert ask(folder, "run", str(text))[1]["file"] == str(text)
    assert "there is no file" in run(folder, "watch", str(elsewhere)).stderr
    relative = os.path.relpath(BY_NAME["slots"].folder / "starter.py", tmp_path)
    assert run(folder, "run", relative, cwd=tmp_path).returncode == 1


@pytest.mark.parametrize("arguments, said", [
    (["run", "nonsense"], "there is no exercise 'nonsense'"),
    (["run", "99"], "there is no exercise '99'"),
    (["slot"], "did you mean slots or triton_slots?"),
    (["run", "missing/slots.py"], "there is no file missing/slots.py"),
    (["hint", "slots", "4"], "slots has 3 hints"),
    (["import", "missing.json"], "cannot be imported"),
    (["grade", "slots"], "is not graded by speed"),
    (["hnit", "slots"], "there is no command 'hnit'; did you mean hint?"),
    (["frob", "x", "y"], "there is no exercise 'frob'"),
    (["run", "slosts"], "did you mean slots?"),
    (["run", "9" * 5000], "there is no exercise"),
    (["run", "missing/slots.txt"], "there is no file missing/slots.txt"),
    (["slots", "radix"], "unrecognized arguments: radix"),
    (["hint", "slots", "0"], "slots has 3 hints"),
    (["hint", "slots", "one"], "invalid int value"),
    (["slots", "--seconds", "-3"], "'-3' is not a number of seconds"),
    (["slots", "--seconds", "nan"], "'nan' is not a number of seconds"),
    (["slots", "--seconds", "inf"], "'inf' is not a number of seconds"),
    (["slots", "--seconds", "soon"], "'soon' is not a number of seconds"),
    (["export", "slots.py"], "slots.json, for example"),
    (["export", "no/such/folder.json"], "cannot be used: No such file"),
])
def test_what_cannot_be_done_is_said(folder, arguments, said):
    done = run(folder, *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    status, data = ask(folder, *arguments)
    assert status == 2 and said in data["error"]


def test_hints_come_one_by_one(folder):
    assert [ask(folder, "hint", "slots")[1]["number"] for _ in range(4)] == [1, 2, 3, 3]
    assert ask(folder, "hint", "slots", "1")[1]["hint"] == BY_NAME["slots"].hints[0]
    assert json.loads(
        (folder / "progress.json").read_text(encoding="utf-8"))["hints"] == {"slots": 3}


def test_doctor_list_solution_and_check(folder):
    status, data = ask(folder, "doctor")
    assert status == 0 and data["kinds"]["python"]["runs"] and data["machine"]["python"]
    status, data = ask(folder, "list")
    assert [row["name"] for row in data["exercises"]] == list(BY_NAME)
    assert BY_NAME["top_p"].solution.splitlines()[0] in run(folder, "solution", "top_p").stdout
    status, data = ask(folder, "check", "slots", "3")
    assert status == 0 and data["faults"] == {"slots": [], "utilization": []}


DEF = "def slot_mapping_for(block_table, positions, block_size):\n"


@pytest.mark.parametrize("text, said, line", [
    (DEF + "    while True:\n        pass\n", "no end after 1 seconds: an endless loop", None),
    ("while True:\n    pass\n", "no end after 1 seconds", None),
    (DEF + "    while True:\n        print('x' * 1000)\n", "no end after 1 seconds", None),
    (DEF + "    import os\n    os.abort()\n", "the answer crashed the Python process", 3),
    (DEF + "    import ctypes\n    ctypes.string_at(0)\n", "the answer crashed the Python process",
     3),
    (DEF + "    import os\n    os._exit(0)\n", "the answer ended the whole process", None),
    (DEF + "    import sys\n    sys.exit(3)\n", "ended the program (sys.exit(3))", 3),
    (DEF + "    return slot_mapping_for(1, 2, 3)\n", "calls itself without an end", 2),
    (DEF + "    return input()\n", "there is nobody to type it", 2),
    (DEF + "    return 1 / 0\n", "ZeroDivisionError: division by zero", 2),
    (DEF + "    return positions.nonsense\n", "AttributeError", 2),
    (DEF + "return 3\n", "Python cannot read line 2", None),
    ("def slot_mapping_for(\n", "Python cannot read line 1", None),
    ("def slots():\n    pass\n", "does not define slot_mapping_for", None),
    ("", "does not define slot_mapping_for", None),
    ("1 / 0\n", "ZeroDivisionError", 1),
    ("import no_such_module\n", "No module named 'no_such_module'", 1),
    ("x = " + "(" * 5000 + "\n", "Python cannot read line 1: too many nested parentheses\n", None),
    ("import os\nfor fd in range(3, 30):\n    try:\n        os.write(fd, b'[1]\\n{}\\nx\\n')\n"
     "    except OSError:\n        pass\n1 / 0\n", "ZeroDivisionError", 7),
    ("import runner\n", "No module named 'runner'", 1),
    (DEF + "    raise ValueError('x' * 10**7)\n", "x ... (10,000,000 characters)", 2),
    ("class Odd(Exception):\n    def __str__(self):\n        1 / 0\nraise Odd\n",
     "its __str__ raises", 4),
    (DEF + "    import os\n    while True:\n        os.write(2, b'x' * 9999)\n",
     "no end after 1 seconds", None),
    (DEF + "    print('\\x1b[2J')\n    raise ValueError('\\a')\n", "ValueError: \\x07", 3),
], ids=lambda value: None)
def test_what_an_answer_can_do_wrong(folder, text, said, line):
    write(folder, "slots", text)
    done = run(folder, "slots", "--seconds", "1")
    assert done.returncode == 1 and said in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr and "runner.py" not in done.stdout
    assert "\x1b" not in done.stdout and len(done.stdout) < 50_000
    if line:
        assert f"slots.py, line {line}, in" in done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"),
                    reason="only Linux limits a process's memory")
@pytest.mark.parametrize("expression",
                         ["[0] * (1 << 40)", "[bytearray(1 << 24) for _ in range(1 << 20)]"])
def test_a_huge_allocation_is_said(folder, expression):
    write(folder, "slots", DEF + f"    return {expression}\n")
    assert "more memory than an exercise may use" in run(folder, "slots").stdout


def test_an_endless_loop_is_said_with_its_line(folder):
    write(folder, "slots", DEF + "    n = 0\n    while True:\n        n += 1\n")
    case = ask(folder, "slots", "--seconds", "2")[1]["cases"][0]
    assert case["call"].startswith("slot_mapping_for(") and case["trace"][-1]["line"] in (3, 4)


@pytest.mark.parametrize("data, said", [
    ("# café\n".encode("latin-1"), "the file is not UTF-8: line 1 has the byte 0xe9"),
    (("\n" * 5 + "x = 'é'\n").encode("latin-1"), "the file is not UTF-8: line 6"),
    ("x = 1\n".encode("utf-16"), "the file is saved as UTF-16"),
    (b"# -*- coding: nonsense -*-\n", "unknown encoding: nonsense"),
    (b"x = 1\0\n", "zero bytes"),
])
def test_another_encoding_is_said(folder, data, said):
    folder.mkdir()
    (folder / "slots.py").write_bytes(data)
    done = run(folder, "slots")
    assert done.returncode == 1 and said in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_bom_crlf_and_declared_encodings_are_read(folder):
    text = BY_NAME["slots"].solution
    for data in (b"\xef\xbb\xbf" + text.encode(), text.replace(
            "\n", "\r\n").encode(), b"# coding: latin-1\n# caf\xe9\n" + text.encode()):
        folder.mkdir(exist_ok=True)
        (folder / "slots.py").write_bytes(data)
        assert run(folder, "slots").returncode == 0


def test_a_failure_shows_the_call_what_was_printed_and_the_learners_frames_only(folder):
    write(
        folder, "slots",
        DEF + "    print('block table', block_table)\n    return helper(positions)\n\n\n"
        "def helper(positions):\n    return [p + 1 for p in positions]\n")
    case = next(case for case in ask(folder, "slots")[1]["cases"] if not case["passed"])
    assert case["call"] == "slot_mapping_for([7, 1, 3], [0, 3, 4, 8], 4)"
    assert (case["expected"], case["got"]) == ("[28, 31, 4, 12]", "[1, 4, 5, 9]")
    assert case["note"] == "at [0]: expected 28, got 1" and "block table [7, 1, 3]" in case[
        "printed"]
    text = run(folder, "slots").stdout
    assert "block table [7, 1, 3]" in text and "that is   at [0]: expected 28, got 1" in text


def test_one_answer_that_dies_does_not_take_the_others_along(folder, tmp_path):
    good, bad = BY_NAME["slots"].folder / "solution.py", tmp_path / "bad.py"
    bad.write_text(DEF + "    import os\n    os.abort()\n", encoding="utf-8")
    passed = [
        report["passed"] for report in sandbox.run_answers(BY_NAME["slots"], [good, bad, good])
    ]
    assert passed == [True, False, True]


def test_nothing_is_left_running_or_printed_into_the_judge(folder, tmp_path):
    """A child of an answer ends with it, and what it writes to descriptor 1 is not taken for an
    event."""
    mark = tmp_path / "alive"
    program = f"import time\ntime.sleep(1.5)\nopen({str(mark)!r}, 'w')"
    event = b'{"event": "end"}\n'
    write(
        folder, "slots", "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {program!r}])\n"
        f"os.write(1, {event!r})\n" + BY_NAME["slots"].solution)
    assert run(folder, "slots").returncode == 0
    if os.name == "posix":
        time.sleep(2)
        assert not mark.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX forks")
def test_an_answer_that_forks_is_judged_once(folder):
    write(
        folder, "slots", "import os, threading\nos.fork()\n"
        "threading.Thread(target=threading.Event().wait).start()\n" + BY_NAME["slots"].solution)
    cases = [case["case"] for case in ask(folder, "slots")[1]["cases"]]
    assert cases and len(cases) == len(set(cases))


def test_a_folder_in_the_place_of_an_answer_is_said(folder):
    (folder / "slots.py").mkdir(parents=True)
    done = run(folder, "slots")
    assert done.returncode == 1 and "slots.py cannot be read: it is a folder" in done.stdout
    assert "--answers names a folder" in run(Path(__file__), "list").stderr


def test_a_reader_that_goes_away_is_no_error(folder):
    program = [
        sys.executable,
        str(ROOT / "practice/judge.py"), "slots", "--json", "--answers",
        str(folder)
    ]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # as `| head` does
    assert process.stderr.read() == b"" and process.wait() == 1


def test_watch_judges_on_save(folder):
    write(folder, "slots", BY_NAME["slots"].starter)
    command = [sys.executable, "-u", str(ROOT / "practice/judge.py"), "watch", "slots"]
    process = subprocess.Popen([*command, "--answers", str(folder)], stdout=subprocess.PIPE,
                               text=True, encoding="utf-8")
    try:
        for line in process.stdout:
            if "0 of" in line:
                write(folder, "slots", BY_NAME["slots"].solution)
            if line.startswith("Solved."):
                break
        else:
            pytest.fail("watch ended")
    finally:
        process.kill()
        process.wait()
    assert ask(folder)[1]["solved"] == 1


@pytest.mark.parametrize("command, said", [("run slots", "not written yet"),
                                           ("frob x y", "no exercise")])
def test_in_a_notebook(folder, command, said):
    """%run prints the judgement and raises nothing, whatever the outcome."""
    pytest.importorskip("IPython")
    program = ROOT / "practice" / "judge.py"
    done = subprocess.run([
        sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c",
        f"%run {program.as_posix()} {command} --answers {folder.as_posix()}"
    ], capture_output=True, text=True, encoding="utf-8", timeout=120)
    text = done.stdout + done.stderr
    assert said in text and "SystemExit" not in text and "Traceback" not in text


def test_colour_in_a_terminal_only(monkeypatch):
    from practice import report

    assert report.paint("x", "red") == "x"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert report.paint("x", "red") == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert report.paint("x", "red") == "x"
