"""Holds an exercise to its rules: its parts are there, its solution passes, and every wrong answer
fails for the reason it is there.
"""

import tempfile
from pathlib import Path

from practice import report, runner, sandbox
from practice.catalog import DIFFICULTIES, KINDS
from practice.wrong import wrong_answers


def write_answers(exercise, folder):
    """Write the solution, the starter and the wrong answers as files; their paths, in this
    order."""
    texts = {"solution": exercise.solution, "starter": exercise.starter}
    texts.update((wrong.name, wrong.text) for wrong in wrong_answers(exercise))
    paths = []
    for name, text in texts.items():
        paths.append(Path(folder, f"{name}.py"))
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def faults_of(exercise):
    """What is wrong with an exercise itself, as sentences."""
    faults = []
    if len(exercise.hints) != 3:
        faults.append(f"has {len(exercise.hints)} hints, not 3")
    if not runner.examples(exercise.statement):
        faults.append("has a statement without an example that can be run")
    if (exercise.kind not in KINDS or exercise.difficulty not in DIFFICULTIES
            or not 5 <= exercise.minutes <= 40):
        faults.append("has a meta.json out of bounds")
    try:
        wrong = wrong_answers(exercise)
    except ValueError as error:
        return [*faults, str(error)]
    if len(wrong) < 3:
        faults.append(f"has {len(wrong)} wrong answers, not 3 or more")
    with tempfile.TemporaryDirectory(prefix="practice-", ignore_cleanup_errors=True) as folder:
        paths = write_answers(exercise, folder)
        solution, starter, *others = sandbox.run_answers(exercise, paths)
    if not solution["passed"]:
        faults.append(f"solution.py fails: {report.first_failure(solution)}")
    if starter["passed"]:
        faults.append("starter.py passes")
    for answer, result in zip(["starter.py", *(one.name for one in wrong)], [starter, *others]):
        if result["problem"]:
            faults.append(f"{answer} cannot be run: {result['problem']['sentence']}")
    for answer, result in zip(wrong, others):
        said = report.first_failure(result)
        if result["passed"]:
            faults.append(f"{answer.name} passes: {answer.mistake}")
        elif answer.fails not in said and not result["problem"]:
            faults.append(f"{answer.name} fails for another reason than “{answer.fails}”: {said}")
    return faults
