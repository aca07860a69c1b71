"""Builds the wrong answers of an exercise: its solution, with a mistake put in.

`wrong.md` has a section for each; CONTRIBUTING.md shows its form. A mistake is a difference as
`diff -u` prints it: text to find in the solution, and what takes its place. No line numbers: a
change that finds its text elsewhere than once is an error, so that no answer stays behind when its
solution changes.
"""

import re
from dataclasses import dataclass

# A name, the mistake in a sentence, what the judge must say in one line, the difference.
SECTION = re.compile(r"(\w+)\n\n(\S.*?)\n\nFails: (\S.*?)\n\n```diff\n(.*?)^```\n*", re.M | re.S)


@dataclass(frozen=True)
class WrongAnswer:
    """A plausible answer that the cases must reject: its mistake in a sentence, what the judge must
    say of it, and its whole text."""

    name: str
    mistake: str
    fails: str
    text: str


def wrong_answers(exercise):
    """The wrong answers of an exercise. Raises ValueError as `read_wrong_answers` does."""
    document = (exercise.folder / "wrong.md").read_text(encoding="utf-8")
    return read_wrong_answers(document, exercise.solution)


def read_wrong_answers(document, solution):
    """The wrong answers of a `wrong.md`. Raises ValueError with a sentence for a section without
    one of its parts, two of one name, and a difference that does not apply or changes nothing."""
    before, *sections = re.split(r"^## ", document, flags=re.M)
    if before.strip():
        raise ValueError(f"wrong.md begins with {before.split()[0]!r}, not with ## and a name")
    answers = {}
    for section in sections:
        match = SECTION.fullmatch(section)
        if not match:
            raise ValueError(f"{section.splitlines()[0]} in wrong.md needs, with an empty line "
                             "between them: a name, its mistake, a line Fails:, a ```diff block")
        name, mistake, fails, diff = match.groups()
        if name in answers:
            raise ValueError(f"wrong.md has two answers of the name {name}")
        try:
            text = apply(diff, solution)
        except ValueError as error:
            raise ValueError(f"{name} in wrong.md {error}") from None
        answers[name] = WrongAnswer(name, " ".join(mistake.split()), " ".join(fails.split()), text)
    return list(answers.values())


def apply(diff, text):
    """The text with all changes of a difference in it. Raises ValueError, as the end of a
    sentence, unless each finds its place in the original."""
    lines, places = text.splitlines(), []
    for number, change in enumerate(re.split(r"^@@.*\n", diff, flags=re.M), 1):
        rows = [row or " " for row in change.splitlines()]  # an editor may strip an empty line
        if not rows and number == 1:
            continue  # a difference that begins with @@
        if odd := [row for row in rows if row[0] not in " +-"]:
            raise ValueError(f"has a line that begins with neither space, + nor -: {odd[0]}")
        old = [row[1:] for row in rows if row[0] in " -"]
        new = [row[1:] for row in rows if row[0] in " +"]
        found = [at for at in range(len(lines) - len(old) + 1) if lines[at:at + len(old)] == old]
        if not old or len(found) != 1:
            raise ValueError(f"does not apply: the old lines of change {number} stand in the "
                             f"solution {len(found) if old else 0} times, not once")
        if old == new:
            raise ValueError(f"changes nothing in change {number}")
        places.append((found[0], found[0] + len(old), new))
    if not places:
        raise ValueError("changes nothing: its difference is empty")
    places.sort()
    for (_, end, _), (start, _, _) in zip(places, places[1:]):
        if start < end:
            raise ValueError(f"does not apply: two of its changes meet in line {start + 1}")
    for start, end, new in reversed(places):
        lines[start:end] = new
    return "\n".join(lines) + "\n"
