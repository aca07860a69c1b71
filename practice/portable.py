"""Carries answers between the terminal and the pages of the book, as one JSON file:

    {"format": "paged-practice", "answers": {name: source}, "solved": {name: date}, "hints": {name: seen}}
"""

import json

FORMAT = "paged-practice"


def export_answers(answers, exercises, path):
    """Write all answers and the progress into one file; how many answers it holds."""
    sources = {e.name: answers.path(e).read_text(encoding="utf-8")
               for e in exercises if answers.exists(e)}
    data = {"format": FORMAT, "answers": sources, **answers.progress()}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return len(sources)


def import_answers(answers, exercises, path, replace):
    """Take over answers and progress. An answer that exists and differs is kept, unless `replace`.

    Returns names under "written", "same", "different" and "unknown". Raises ValueError for a file that is not
    an export, before anything is written.
    """
    data = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it is not an export of these exercises")
    sources = data.get("answers", {})
    if not all(isinstance(source, str) for source in sources.values()):
        raise ValueError("an answer in it is not text")
    by_name = {e.name: e for e in exercises}
    done = {"written": [], "same": [], "different": [], "unknown": []}
    for name, source in sources.items():
        if name not in by_name:
            done["unknown"].append(name)
            continue
        target = answers.path(by_name[name])
        if target.exists():
            if target.read_text(encoding="utf-8") == source:
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
        for name, value in data.get(key, {}).items():
            if name in by_name and name not in done["different"]:
                progress[key].setdefault(name, value)
    answers.save_progress(progress)
    return done
