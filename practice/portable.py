"""Carries answers between the terminal and the pages of the book, as one JSON file:

    {"format": "paged-practice", "answers": {name: source}, "solved": {name: date},
     "hints": {name: seen}}
"""

import json

from practice.catalog import progress_in, read_source

FORMAT = "paged-practice"


def export_answers(answers, exercises, path):
    """Write all answers and the progress into one file; how many answers it holds.

    Raises SyntaxError with a sentence for an answer that cannot be read, before anything is
    written.
    """
    sources = {}
    for exercise in exercises:
        if answers.exists(exercise):
            try:
                sources[exercise.name] = read_source(answers.path(exercise))
            except SyntaxError as error:
                raise SyntaxError(
                    f"{answers.path(exercise).name} cannot be exported: {error}") from None
    data = {"format": FORMAT, "answers": sources, **answers.progress()}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return len(sources)


def import_answers(answers, exercises, path, replace):
    """Take over answers and progress. An answer that exists and differs is kept, unless `replace`.

    Returns names under "written", "same", "different" and "unknown". Raises ValueError for a file
    that is not an export, before anything is written.
    """
    data = json.loads(path.read_bytes())  # UTF-8 or what PowerShell writes: json finds out
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it is not an export of these exercises")
    sources = data.get("answers", {})
    if not isinstance(sources, dict) or not all(
            isinstance(source, str) for source in sources.values()):
        raise ValueError("its answers are not texts by name")
    for source in sources.values():
        source.encode()  # half a surrogate pair cannot be written to a file
    brought = progress_in(data)
    if any(part != data.get(key, {}) for key, part in brought.items()):
        raise ValueError(
            "its progress is not a date for each solved exercise and a number of hints")
    by_name = {e.name: e for e in exercises}
    done = {"written": [], "same": [], "different": [], "unknown": []}
    for name, source in sources.items():
        if name not in by_name:
            done["unknown"].append(name)
            continue
        source = source.replace("\r\n", "\n").replace("\r", "\n")
        target = answers.path(by_name[name])
        if target.exists():
            if _text(target) == source:
                done["same"].append(name)
                continue
            if not replace:
                done["different"].append(name)
                continue
            answers.set_aside(by_name[name])
        answers.folder.mkdir(parents=True, exist_ok=True)
        target.write_text(source, encoding="utf-8")
        done["written"].append(name)
    progress = answers.progress()
    for key in ("solved", "hints"):
        for name, value in brought[key].items():
            if name in by_name and name not in done["different"]:
                progress[key].setdefault(name, value)
    answers.save_progress(progress)
    return done


def _text(path):
    """The text of an answer, or None for one that cannot be read: it differs from all others."""
    try:
        return read_source(path)
    except SyntaxError:
        return None
