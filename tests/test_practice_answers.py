"""Protects what a reader wrote: answers and progress are found, kept, and carried to the pages and
back.
"""

import subprocess

import pytest

from practice import portable
from practice.catalog import Answers, find
from tests.judging import BY_NAME, EXERCISES, ROOT, ask, run, write


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "answers"


def test_git_ignores_answers():
    done = subprocess.run(["git", "check-ignore", "-q", "practice/answers/slots.py"], cwd=ROOT)
    if done.returncode == 128:
        pytest.skip("not a clone")
    assert done.returncode == 0


def test_an_exercise_is_found_by_any_name():
    slots = BY_NAME["slots"]
    for word in ("slots", str(slots.number), slots.folder.name, "practice/answers/slots.py",
                 "slots.old-1.py", str(slots.folder / "solution.py")):
        assert find(EXERCISES, word) is slots, word


def test_a_broken_progress_file_is_set_aside(tmp_path):
    answers = Answers(tmp_path)
    (tmp_path / "progress.json").write_text("{broken", encoding="utf-8")
    assert answers.progress() == {"solved": {}, "hints": {}}
    assert (tmp_path / "progress.unreadable.json").read_text(encoding="utf-8") == "{broken"


@pytest.mark.parametrize("text", [
    '{"hints": {"slots": "x"}, "solved": {"slots": 7}}', '{"hints": {"slots": -5}}',
    '{"solved": [1]}', "[]", "[" * 100_000, "\0"
])
def test_odd_progress_stops_nothing(folder, text):
    folder.mkdir()
    (folder / "progress.json").write_text(text, encoding="utf-8")
    assert ask(folder)[1]["solved"] == 0
    assert ask(folder, "hint", "slots")[1]["number"] == 1


def test_an_unreadable_answer_is_not_exported_and_not_overwritten(folder, tmp_path):
    write(folder, "slots", "a = 1\n", encoding="utf-16")
    file = tmp_path / "out.json"
    done = run(folder, "export", str(file))
    assert done.returncode == 2 and not file.exists()
    said = "slots.py cannot be exported: the file is saved as UTF-16: save it as UTF-8"
    assert said in done.stderr
    file.write_text('{"format": "paged-practice", "answers": {"slots": "b = 2"}}',
                    encoding="utf-16")
    assert ask(folder, "import", str(file))[1]["different"] == ["slots"]
    assert (folder / "slots.py").read_bytes() == "a = 1\n".encode("utf-16")


@pytest.mark.parametrize("rest", [
    '"answers": [1]', '"answers": {"slots": 1}', '"answers": {"slots": "x"}, "solved": []',
    '"answers": {"slots": "x"}, "hints": {"slots": "x"}',
    '"answers": {"slots": "x", "radix": "\\ud800"}'
])
def test_what_is_no_export_is_refused_before_anything_is_written(folder, tmp_path, rest):
    file = tmp_path / "odd.json"
    file.write_text('{"format": "paged-practice", ' + rest + "}", encoding="utf-8")
    done = run(folder, "import", str(file))
    assert done.returncode == 2
    assert "cannot be imported: " in done.stderr and "Traceback" not in done.stderr
    assert not folder.exists()


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
    windows = '{"format": "paged-practice", "answers": {"slots": "a = 1\\r\\n"}}'
    file.write_text(windows, encoding="utf-8")
    assert portable.import_answers(other, EXERCISES, file, replace=False)["same"] == ["slots"]
    for text in ("[]", "{}", '{"format": "paged-practice", "answers": {"slots": 1}}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError):
            portable.import_answers(other, EXERCISES, file, replace=True)
