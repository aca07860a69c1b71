"""Protects the exercises: solutions pass, starters and wrong answers fail, and the judge says why in words.

Every exercise is held to its own rules (`check`), and its solution to the package where both do the same.
The judge is used as a reader uses it, in processes of its own, and fed all that an answer can do wrong.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from practice import judge, portable, runner, sandbox
from practice.catalog import Answers, find, load_exercises

ROOT = Path(__file__).resolve().parents[1]
EXERCISES = load_exercises()
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


# ------------------------------------------------------------------------------------------ the exercises


@pytest.mark.parametrize("name", BY_NAME)
def test_check(name):
    """The solution passes; starter and wrong answers run and fail; three hints; examples that run."""
    if why_not := sandbox.why_not(BY_NAME[name].kind):
        pytest.skip(why_not)
    assert judge.faults_of(BY_NAME[name]) == []


def test_there_are_enough_in_order():
    assert len(EXERCISES) >= 24
    assert [exercise.number for exercise in EXERCISES] == list(range(1, len(EXERCISES) + 1))
    assert len(BY_NAME) == len(EXERCISES)
    assert [exercise.kind for exercise in EXERCISES].count("python") >= 19


@pytest.mark.parametrize("name", BY_NAME)
def test_says_what_it_is(name):
    """Wrong answers say what is wrong with them, and nothing gives an answer away through the package."""
    exercise = BY_NAME[name]
    for path in exercise.wrong:
        assert re.match(r'"""\w[^"]{15,}"""', path.read_text(encoding="utf-8")), path
    assert "paged." not in exercise.tests and "import paged" not in exercise.tests
    assert all(len(hint) > 40 for hint in exercise.hints) and len(exercise.explanation) > 200


def solution(name):
    """The solution of an exercise, as a module."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exec(compile(BY_NAME[name].solution, f"{name}.py", "exec"), module.__dict__)
    return module


def test_solutions_agree_with_the_package_on_numbers():
    from paged import memory

    answer = solution("projections")
    for context, steps in ((100, 50), (1, 1), (7, 0), (0, 9)):
        for name in ("projections_without_cache", "projections_with_cache"):
            assert getattr(answer, name)(context, steps) == getattr(memory, name)(context, steps)
    answer = solution("kv_bytes")
    assert answer.kv_bytes_per_token(28, 8, 128, 2) == memory.kv_bytes_per_token(28, 8, 128, "bfloat16")
    for context, block_size in ((3000, 16), (1, 16), (4096, 256)):
        assert answer.concurrent_requests(55 * memory.GiB, 57344, context, block_size) == (
            memory.concurrent_requests(55 * memory.GiB, 57344, context, block_size=block_size))
    answer, requests = solution("utilization"), memory.sample_requests()
    assert answer.utilization_reserved(requests, 4096) == memory.utilization_reserved(requests, 4096)
    for block_size in (1, 16, 64, 256):
        expected = memory.utilization_paged(requests, block_size)
        assert answer.utilization_paged(requests, block_size) == expected
    answer = solution("memory_budget")
    numbers = [95.085 * memory.GiB, 0.9, 1.66 * memory.GiB, 1.599 * memory.GiB, 1.16 * memory.GiB, 29360128]
    assert answer.num_blocks(*numbers) == memory.num_blocks_in_budget(*numbers)


@pytest.mark.parametrize("name", ["block_pool", "copy_on_write"])
def test_block_pool_agrees_with_the_package(name):
    """The exercise's pool and the package's give the same answers, errors included, in random walks."""
    from paged import BlockPool

    def outcome(call, *arguments):
        try:
            return call(*arguments)
        except (ValueError, MemoryError) as error:
            return type(error)

    rng = random.Random(0)
    for _ in range(30):
        size = rng.randint(1, 6)
        pools, tables = (solution(name).BlockPool(size), BlockPool(size)), ([], [])
        for _ in range(60):
            methods = ["allocate", "free", "fork", "copy_on_write"]
            method = rng.choice(methods[:2] if name == "block_pool" else methods)
            if method == "allocate":
                count = rng.randint(0, 3)
                got = [pool.allocate(count) for pool in pools]
                for table, blocks in zip(tables, got):
                    if blocks:
                        table.append(blocks)
            elif method == "free" and tables[0] and rng.random() < 0.7:
                index = rng.randrange(len(tables[0]))
                got = [pool.free(table.pop(index)[::-1]) for pool, table in zip(pools, tables)]
            elif method == "free":
                blocks = [rng.randint(-1, size) for _ in range(2)]
                held = [block for table in tables[0] for block in table]
                if all(held.count(block) >= blocks.count(block) for block in blocks):
                    continue                             # it would free what a table still names
                got = [outcome(pool.free, list(blocks)) for pool in pools]
            elif tables[0]:
                index = rng.randrange(len(tables[0]))
                if method == "fork":
                    got = [pool.fork(table[index]) for pool, table in zip(pools, tables)]
                    for table, blocks in zip(tables, got):
                        table.append(blocks)
                else:
                    at = rng.randrange(len(tables[0][index]))
                    got = [outcome(pool.copy_on_write, table[index], at)
                           for pool, table in zip(pools, tables)]
            else:
                continue
            assert got[0] == got[1] and tables[0] == tables[1], method
            assert pools[0].ref_cnt == pools[1].ref_cnt and pools[0].num_free() == pools[1].num_free()


def test_other_solutions_agree_with_the_package():
    import torch

    from paged import PagedKVCache, paged_attention, prefix_cache, slot_mapping_for
    from practice import perf

    answer = solution("slots")
    for block_size in (1, 3, 16):
        assert answer.slot_mapping_for([5, 0, 7], range(block_size * 3), block_size) == (
            slot_mapping_for([5, 0, 7], range(block_size * 3), block_size))
    answer = solution("chained_hash")
    for parent in (None, 0, 2**64 - 1):
        assert answer.chained_hash(parent, [1, 151935]) == prefix_cache.sha256_chain(parent, [1, 151935])

    kv = PagedKVCache(1, 8, 4, 2, 16)
    k, v = torch.randn(2, 20, 2, 16)
    slots, tables = [*range(12, 24), *range(0, 7), -1], [[3, 4, 5], [0, 1]]
    kv.write(0, slots, k, v)
    answer = solution("write_gather")
    caches = torch.zeros_like(kv.k[0]), torch.zeros_like(kv.v[0])
    answer.write(*caches, slots, k, v)
    for got, expected in zip(answer.gather(*caches, tables[1], 7), kv.gather(0, tables[1], 7)):
        assert torch.equal(got, expected)
    q = torch.randn(4, 4, 16)
    arguments = (tables, [12, 7], [0, 3, 4], 0.25)
    got = solution("paged_attention").paged_attention(q, kv.k[0], kv.v[0], *arguments)
    assert torch.allclose(got, paged_attention(q, kv, 0, *arguments), atol=1e-5)
    assert perf.SHAPES.keys() <= BY_NAME.keys()


# --------------------------------------------------------------------------------------------- the runner


@pytest.mark.parametrize("got, expected, said", [
    (True, 1, "expected an int 1, got a bool True"),
    ((1, 2), [1, 2], "expected a list [1, 2], got a tuple (1, 2)"),
    (3.0, 3, "expected an int 3, got a float 3.0"),
    (None, [1], "expected a list [1], got None"),
    ([1, 2, 4], [1, 2, 3], "at [2]: expected 3, got 4"),
    ([1, 2], [1, 2, 3], "expected 3 items, got 2"),
    ([(1, "a")], [(1, "b")], "at [0][1]: expected 'b', got 'a'"),
    ({"a": 1}, {"a": 1, "b": 2}, "the key 'b' is missing"),
    ({"a": [1], "b": 2}, {"a": [1]}, "the key 'b' is not expected"),
    (float("nan"), 1.0, "expected 1.0, got nan"),
])
def test_difference_names_the_first_place(got, expected, said):
    assert runner.difference(got, expected) == said


@pytest.mark.parametrize("got, expected, digits", [
    (1, 1.0, None), (0.1 + 0.2, 0.3, None), (46.19, 46.2, 1), (0.4285714, 0.4286, 4),
    ([1, (2, {})], [1, (2, {})], None), (float("nan"), float("nan"), None)])
def test_no_difference(got, expected, digits):
    assert runner.difference(got, expected, digits) is None


def test_tensors_are_compared_by_shape_dtype_and_value():
    import torch

    ones = torch.ones(2, 3)
    assert runner.difference(ones + 1e-7, ones) is None
    assert "expected the shape [2, 3], got [3, 2]" in runner.difference(ones.T, ones)
    assert "expected the dtype torch.float32" in runner.difference(ones.double(), ones)
    assert "got a list" in runner.difference([1.0], ones)
    changed = ones.clone()
    changed[1, 2] = torch.nan
    assert runner.difference(changed, ones) == "1 of 6 values differ, first at [1, 2]: expected 1, got nan"


def test_a_script_is_read_into_steps():
    steps = runner.read_script("""
        table = [1]
        f(table)        # → [
                        #    1, 2]
        for x in table:
            g(x)
        g(3)            # raises KeyError
        h()             # ≈ 1.25
    """)
    assert [(step.mark, step.expected) for step in steps] == [
        ("", ""), ("→", "[\n1, 2]"), ("", ""), ("raises", "KeyError"), ("≈", "1.25")]
    assert steps[1].source == "f(table)" and steps[2].source.startswith("for x in table:")
    with pytest.raises(SyntaxError):
        runner.read_script("x = 1   # → 1")


# ---------------------------------------------------------------------------------------------- the judge


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "answers"


def run(folder, *arguments, **options):
    """The judge in a process of its own, as a reader starts it."""
    program = str(ROOT / "practice" / "judge.py")
    return subprocess.run([sys.executable, program, *arguments, "--answers", str(folder)],
                          capture_output=True, text=True, encoding="utf-8", timeout=120, **options)


def ask(folder, *arguments):
    """(exit status, data) of a command with --json."""
    done = run(folder, *arguments, "--json")
    return done.returncode, json.loads(done.stdout)


def write(folder, name, text, encoding="utf-8"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_bytes(text.encode(encoding))


def test_from_the_first_look_to_the_last(folder):
    first = run(folder)
    assert first.returncode == 0 and f"0 of {len(EXERCISES)} solved" in first.stdout
    assert f"judge.py start {EXERCISES[0].name}" in first.stdout

    started = run(folder, "start", "slots")
    assert "From a block table to slots" in started.stdout and "slot_mapping_for([7, 1, 3]" in started.stdout
    assert (folder / "slots.py").read_text(encoding="utf-8") == BY_NAME["slots"].starter

    failed = run(folder, "slots")
    assert failed.returncode == 1
    for line in ("✗ example 1 of the statement", "expected  [28, 31, 4, 12]", "not written yet",
                 "slots.py, line 6, in slot_mapping_for"):
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


def test_a_file_anywhere_can_be_judged(folder, tmp_path):
    elsewhere = tmp_path / "other folder" / "slots.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text(BY_NAME["slots"].solution, encoding="utf-8")
    assert run(folder, "run", str(elsewhere)).returncode == 0
    assert ask(folder)[1]["solved"] == 0                 # somebody's file is not this reader's answer
    wrong = BY_NAME["slots"].wrong[0]
    assert run(folder, "run", os.path.relpath(wrong, tmp_path), cwd=tmp_path).returncode == 1


@pytest.mark.parametrize("arguments, said", [
    (["run", "nonsense"], "there is no exercise 'nonsense'"),
    (["run", "99"], "there is no exercise '99'"),
    (["slot"], "did you mean slots or triton_slots?"),
    (["run", "missing/slots.py"], "there is no file missing/slots.py"),
    (["hint", "slots", "4"], "slots has 3 hints"),
    (["import", "missing.json"], "cannot be imported"),
    (["grade", "slots"], "is not graded by speed"),
])
def test_what_cannot_be_done_is_said(folder, arguments, said):
    done = run(folder, *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    status, data = ask(folder, *arguments)
    assert status == 2 and said in data["error"]


def test_hints_come_one_by_one(folder):
    assert [ask(folder, "hint", "slots")[1]["number"] for _ in range(4)] == [1, 2, 3, 3]
    assert ask(folder, "hint", "slots", "1")[1]["hint"] == BY_NAME["slots"].hints[0]
    assert json.loads((folder / "progress.json").read_text(encoding="utf-8"))["hints"] == {"slots": 3}


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
    (DEF + "    import ctypes\n    ctypes.string_at(0)\n", "the answer crashed the Python process", 3),
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
], ids=lambda value: None)
def test_what_an_answer_can_do_wrong(folder, text, said, line):
    write(folder, "slots", text)
    done = run(folder, "slots", "--seconds", "1")
    assert done.returncode == 1 and said in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr and "runner.py" not in done.stdout
    if line:
        assert f"slots.py, line {line}, in" in done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits a process's memory")
@pytest.mark.parametrize("expression", ["[0] * (1 << 40)", "[bytearray(1 << 24) for _ in range(1 << 20)]"])
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
    assert done.returncode == 1 and said in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_bom_crlf_and_declared_encodings_are_read(folder):
    text = BY_NAME["slots"].solution
    for data in (b"\xef\xbb\xbf" + text.encode(), text.replace("\n", "\r\n").encode(),
                 b"# coding: latin-1\n# caf\xe9\n" + text.encode()):
        folder.mkdir(exist_ok=True)
        (folder / "slots.py").write_bytes(data)
        assert run(folder, "slots").returncode == 0


def test_a_failure_shows_the_call_what_was_printed_and_the_learners_frames_only(folder):
    write(folder, "slots", DEF + "    print('block table', block_table)\n    return helper(positions)\n\n\n"
          "def helper(positions):\n    return [p + 1 for p in positions]\n")
    case = next(case for case in ask(folder, "slots")[1]["cases"] if not case["passed"])
    assert case["call"] == "slot_mapping_for([7, 1, 3], [0, 3, 4, 8], 4)"
    assert (case["expected"], case["got"]) == ("[28, 31, 4, 12]", "[1, 4, 5, 9]")
    assert case["note"] == "at [0]: expected 28, got 1" and "block table [7, 1, 3]" in case["printed"]
    text = run(folder, "slots").stdout
    assert "block table [7, 1, 3]" in text and "that is   at [0]: expected 28, got 1" in text


def test_one_answer_that_dies_does_not_take_the_others_along(folder, tmp_path):
    good, bad = BY_NAME["slots"].folder / "solution.py", tmp_path / "bad.py"
    bad.write_text(DEF + "    import os\n    os.abort()\n", encoding="utf-8")
    passed = [report["passed"] for report in sandbox.run_answers(BY_NAME["slots"], [good, bad, good])]
    assert passed == [True, False, True]


def test_nothing_is_left_running_or_printed_into_the_judge(folder, tmp_path):
    """A child of an answer ends with it, and what it writes to descriptor 1 is not taken for an event."""
    mark = tmp_path / "alive"
    program = f"import time\ntime.sleep(1.5)\nopen({str(mark)!r}, 'w')"
    event = b'{"event": "end"}\n'
    write(folder, "slots", "import os, subprocess, sys\n"
          f"subprocess.Popen([sys.executable, '-c', {program!r}])\n"
          f"os.write(1, {event!r})\n" + BY_NAME["slots"].solution)
    assert run(folder, "slots").returncode == 0
    if os.name == "posix":
        time.sleep(2)
        assert not mark.exists()


def test_watch_judges_on_save(folder):
    write(folder, "slots", BY_NAME["slots"].starter)
    command = [sys.executable, "-u", str(ROOT / "practice/judge.py"), "watch", "slots"]
    process = subprocess.Popen([*command, "--answers", str(folder)], stdout=subprocess.PIPE, text=True,
                               encoding="utf-8")
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


def test_in_a_notebook(folder):
    """%run prints the judgement and raises nothing, whatever the outcome."""
    pytest.importorskip("IPython")
    program = ROOT / "practice" / "judge.py"
    done = subprocess.run([sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c",
                           f"%run {program.as_posix()} run slots --answers {folder.as_posix()}"],
                          capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert "not written yet" in done.stdout and "SystemExit" not in done.stdout + done.stderr


def test_colour_in_a_terminal_only(monkeypatch):
    from practice import report

    assert report.paint("x", "red") == "x"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert report.paint("x", "red") == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert report.paint("x", "red") == "x"


def test_git_ignores_answers():
    done = subprocess.run(["git", "check-ignore", "-q", "practice/answers/slots.py"], cwd=ROOT)
    if done.returncode == 128:
        pytest.skip("not a clone")
    assert done.returncode == 0


def test_an_exercise_is_found_by_any_name():
    slots = BY_NAME["slots"]
    for word in ("slots", str(slots.number), slots.folder.name, "practice/answers/slots.py", "slots.old-1.py",
                 str(slots.folder / "solution.py"), str(slots.wrong[0])):
        assert find(EXERCISES, word) is slots, word


def test_a_broken_progress_file_is_set_aside(tmp_path):
    answers = Answers(tmp_path)
    (tmp_path / "progress.json").write_text("{broken", encoding="utf-8")
    assert answers.progress() == {"solved": {}, "hints": {}}
    assert (tmp_path / "progress.unreadable.json").read_text(encoding="utf-8") == "{broken"


def test_export_and_import_carry_answers_over(tmp_path):
    one, other = Answers(tmp_path / "one"), Answers(tmp_path / "other")
    for name, text in (("slots", "a = 1\n"), ("radix", "b = 2\n")):
        write(one.folder, name, text)
    one.record(BY_NAME["slots"], solved=True)
    file = tmp_path / "paged-practice.json"
    assert portable.export_answers(one, EXERCISES, file) == 2

    write(other.folder, "radix", "mine = 3\n")
    done = portable.import_answers(other, EXERCISES, file, replace=False)
    assert done == {"written": ["slots"], "same": [], "different": ["radix"], "unknown": []}
    assert other.path(BY_NAME["radix"]).read_text(encoding="utf-8") == "mine = 3\n"
    assert list(other.progress()["solved"]) == ["slots"]
    done = portable.import_answers(other, EXERCISES, file, replace=True)
    assert done["written"] == ["radix"] and done["same"] == ["slots"]
    assert (other.folder / "radix.old-1.py").read_text(encoding="utf-8") == "mine = 3\n"
    for text in ("[]", "{}", '{"format": "paged-practice", "answers": {"slots": 1}}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError):
            portable.import_answers(other, EXERCISES, file, replace=True)


# ---------------------------------------------------------------------------------------- grading by speed


@pytest.fixture
def kernel():
    """kernel(name): the solution's function and a small task for it, on the CPU."""
    pytest.importorskip("triton")
    from practice import perf

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in Triton's interpreter")

    def make(name, function=None):
        module = perf.load(BY_NAME[name].folder / "solution.py")
        function = function or getattr(module, perf.TASKS[name][0])
        small = (2, 32) if name == "triton_decode" else (32,)
        return perf.TASKS[name][1](function, *small, device="cpu", heads=(4, 2), head_dim=16)
    return make


@pytest.mark.parametrize("name", ["triton_decode", "triton_store"])
def test_a_good_kernel_is_graded(kernel, name):
    from practice import perf

    task = kernel(name)
    assert task.right(task.run())
    assert perf.foreign_operations(task.run) is None and perf.remembers(task) is None
    assert perf.foreign_imports(BY_NAME[name].solution) is None
    task.function = perf.our_function(name)
    assert task.right(task.run())


def test_a_library_kernel_is_not_graded(kernel):
    import torch

    from practice import perf

    def library(q, k_cache, v_cache, tables, seq_lens, scale):
        k, v = (cache[tables.long()].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        return torch.nn.functional.scaled_dot_product_attention(
            q[:, :, None], k, v, scale=scale, enable_gqa=True)[:, :, 0]

    task = kernel("triton_decode", library)
    assert task.right(task.run())
    assert "the kernel must do it" in perf.foreign_operations(task.run)
    assert "line 1 imports flash_attn" in perf.foreign_imports("from flash_attn import flash_attn_func\n")
    assert "line 2 imports paged.attention" in perf.foreign_imports("import torch\nimport paged.attention\n")


def test_a_remembered_result_is_not_graded(kernel):
    from practice import perf

    good, kept = kernel("triton_decode").function, {}

    def remembering(q, *rest):
        return kept.setdefault(q.data_ptr(), good(q, *rest))

    assert "nothing may be kept" in perf.remembers(kernel("triton_decode", remembering))


def test_a_wrong_kernel_is_noticed(kernel):
    task = kernel("triton_decode")
    assert not task.right(task.run() * 1.1)
    assert not task.right(task.run() * float("nan"))


def test_kernels_that_may_run():
    from practice import perf

    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
    assert perf.foreign_kernels(["decode_kernel", fill, "Memset (Device)"], {"decode_kernel"}) is None
    assert "flash_fwd" in perf.foreign_kernels(["decode_kernel", "flash_fwd_splitkv"], {"decode_kernel"})
    assert "no kernel" in perf.foreign_kernels([fill], {"decode_kernel"})


def test_the_ladder():
    from practice import perf

    assert [perf.mark(score, 0.95) for score in (0.1, 0.25, 0.6, 0.84, 0.9, 0.94)] == [
        "no star yet", "★", "★★", "★★★", "★★★★", "★★★★★"]
