"""Protects the form of the wrong answers: a difference that is not applied as it stands is an error
with a sentence, and an answer that fails for another reason is noticed.
"""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from practice.catalog import load_exercises
from practice.check import faults_of
from practice.wrong import apply, read_wrong_answers, wrong_answers

ROOT = Path(__file__).resolve().parents[1]
SOLUTION = """\
def area(a, b):
    if a < 0:
        raise ValueError

    return a * b


x = 1
x = 1
"""
BY_NAME = {exercise.name: exercise for exercise in load_exercises()}
SLOTS = BY_NAME["slots"]


def document(diff, name="adds", fails="one"):
    return f"## {name}\n\nAdds, where it\nmust multiply.\n\nFails: {fails}\n\n```diff\n{diff}```\n"


def test_an_answer_is_the_solution_with_its_mistake():
    one, two = read_wrong_answers(
        document("-    return a * b\n+    return a + b\n") + "\n"
        + document("-    if a < 0:\n-        raise ValueError\n\n     return a * b\n", "any_a"),
        SOLUTION)
    assert (one.name, one.mistake, one.fails) == ("adds", "Adds, where it must multiply.", "one")
    assert one.text == SOLUTION.replace("a * b", "a + b")
    assert two.text == SOLUTION.replace("    if a < 0:\n        raise ValueError\n", "")


def test_changes_may_come_in_any_order_and_as_diff_prints_them():
    got = apply(
        "@@ -5,3 +5,3 @@\n-    return a * b\n+    return b\n@@\n def area(a, b):\n+    a = 2\n",
        SOLUTION)
    assert got == SOLUTION.replace("a * b", "b").replace("b):\n", "b):\n    a = 2\n")


@pytest.mark.parametrize("diff, said", [
    ("-    return a / b\n+    return a + b\n", "change 1 stand in the solution 0 times"),
    ("-x = 1\n+x = 2\n", "change 1 stand in the solution 2 times"),
    ("+    return a + b\n", "change 1 stand in the solution 0 times"),
    ("-    return a * b\n+    return 1\n@@\n-y = 1\n", "change 2 stand in the solution 0 times"),
    ("     return a * b\n", "changes nothing in change 1"),
    ("-    return a * b\n+    return a * b\n", "changes nothing in change 1"),
    ("", "changes nothing: its difference is empty"),
    ("return a + b\n", "begins with neither space, + nor -: return a + b"),
    ("-    return a * b\n+    return 1\n@@\n-\n-    return a * b\n+    return 2\n",
     "two of its changes meet in line 5"),
])
def test_a_difference_that_cannot_be_applied(diff, said):
    with pytest.raises(ValueError, match="^adds in wrong.md ") as error:
        read_wrong_answers(document(diff), SOLUTION)
    assert said in str(error.value)


@pytest.mark.parametrize("change, said", [
    (("Fails: one\n\n", ""), "adds in wrong.md needs"),
    (("```diff", "```python"), "adds in wrong.md needs"),
    (("Adds, where it\nmust multiply.\n\n", ""), "adds in wrong.md needs"),
    (("```\n", "```\nmore\n"), "adds in wrong.md needs"),
    (("## adds", "adds"), "begins with 'adds'"),
])
def test_a_section_without_one_of_its_parts(change, said):
    text = document("-    return a * b\n+    return a + b\n")
    with pytest.raises(ValueError, match=said):
        read_wrong_answers(text.replace(*change), SOLUTION)


def test_two_answers_of_one_name():
    with pytest.raises(ValueError, match="two answers of the name adds"):
        read_wrong_answers(2 * document("-    return a * b\n+    return a + b\n"), SOLUTION)


def test_the_example_of_the_contributors_page_is_one():
    """CONTRIBUTING.md shows the form with a wrong answer that stands in an exercise."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^````markdown\n(.*?)^````$", page, re.M | re.S)
    (answer,) = read_wrong_answers(example, BY_NAME["copy_on_write"].solution)
    assert answer in wrong_answers(BY_NAME["copy_on_write"])


def test_check_says_what_is_wrong_with_the_wrong_answers(tmp_path):
    """One that passes, one that fails elsewhere, one that cannot be run; then one that does not
    apply."""
    folder = shutil.copytree(SLOTS.folder, tmp_path / SLOTS.folder.name)
    exercise = dataclasses.replace(SLOTS, folder=folder)
    first, *others = (folder / "wrong.md").read_text(encoding="utf-8").split("\n## ")
    line = SLOTS.solution.splitlines()[0]
    passes = document(f"+x = 1\n {line}\n", "passes")
    broken = document(f"-{line}\n+def (\n", "broken")
    elsewhere = first.replace("Fails: ", "Fails: not ")
    (folder / "wrong.md").write_text("\n".join([passes, broken, elsewhere]), encoding="utf-8")
    said = faults_of(exercise)
    assert len(said) == 3, said
    assert said[0].startswith("broken cannot be run: Python cannot read line 1")
    assert said[1] == "passes passes: Adds, where it must multiply."
    assert "fails for another reason than “not " in said[2]
    (folder / "wrong.md").write_text(document("-nowhere\n"), encoding="utf-8")
    assert faults_of(exercise) == [
        "adds in wrong.md does not apply: the old lines of change 1 stand in the solution 0 times, "
        "not once"
    ]
    (folder / "wrong.md").write_text("\n## ".join([first, *others[:1]]), encoding="utf-8")
    assert faults_of(exercise) == ["has 2 wrong answers, not 3 or more"]


def test_no_two_wrong_answers_are_the_same():
    for exercise in BY_NAME.values():
        texts = [answer.text for answer in wrong_answers(exercise)]
        assert len(set(texts)) == len(texts) and exercise.solution not in texts, exercise.name
