"""The pages of the exercises: `{practice} NAME` and `{practice-progress}`.

An exercise stands once, in practice/exercises. Its page is a stub that names it, and everything
else is read from there when the book is built: statement, editor, hints, solution. Plain-Python
exercises run in the page, in Pyodide, through the very runner of the terminal.

Pyodide is copied into the site when npm is at hand. Otherwise pages take it from a CDN, pinned by
version and hash. Either way it is loaded when a reader presses Run, and not before.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from html import escape
from pathlib import Path

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from paged.models.loader.default_model import cache_directory  # noqa: E402
from practice import runner  # noqa: E402
from practice.catalog import load_exercises  # noqa: E402

PYODIDE = "314.0.7"
CDN = f"https://cdn.jsdelivr.net/npm/pyodide@{PYODIDE}/"
FILES = {
    "pyodide.mjs": "sha384-Lp79fMwxa4n2BLtugpUAoQMlbxIdg8iCUiP1r3h7nJLkQjwlXT1JzZTeHVL+f4Dg",
    "pyodide.asm.mjs": "sha384-/2281iaC0Iimw0B3Kagy1DBfZcJG3W4KYW+EmOqhsdY3fR9BJ88FE2Zt6y0KQKpa",
    "pyodide.asm.wasm": "sha384-y++qrQ72KPA1fTjLIuGMP+jppgGxjbLCgfdb0zMrnNnQVhxRUXTOTF6rTxNzllSu",
    "python_stdlib.zip": "sha384-xW3A5jmenkrPXbsgrIaB1FCJh9OuLT7FRMagsJMgtlhVc19k/mSy3+7nMaF/d767",
    "pyodide-lock.json": "sha384-o8SQQvpVlZnOl04+3dFTJipKxul9GbViVusA379wlOrfHSgxbzt0yPiqCTxOiYES",
}
LIMIT_S = 10  # seconds after which a run in the page is stopped
logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------ Pyodide


def integrity(data: bytes) -> str:
    return "sha384-" + base64.b64encode(hashlib.sha384(data).digest()).decode()


def complete(folder: Path) -> bool:
    """Whether a folder holds every file of Pyodide, unchanged."""
    return all((folder / name).is_file() and integrity((folder / name).read_bytes()) == expected
               for name, expected in FILES.items())


def fetch_pyodide() -> Path | None:
    """A folder with Pyodide: from the cache, or by npm. None when there is neither."""
    cached = cache_directory() / f"pyodide-{PYODIDE}"
    if complete(cached):
        return cached
    npm = shutil.which("npm") or shutil.which("npm", path=str(Path(sys.executable).parent))
    if npm is None:
        return None
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        command = [
            npm, "pack", f"pyodide@{PYODIDE}", "--silent", "--pack-destination", folder,
            "--fetch-retries=1", "--fetch-timeout=30000"
        ]
        try:
            subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=True)
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                for name in FILES:
                    member = archive.extractfile(f"package/{name}")
                    if member is None:
                        raise KeyError(f"package/{name} is no file")
                    Path(folder, name).write_bytes(member.read())
        except (OSError, subprocess.SubprocessError, StopIteration, KeyError) as error:
            logger.info("npm cannot give Pyodide (%s): pages take it from %s", error, CDN)
            return None
        if not complete(Path(folder)):
            raise RuntimeError(
                f"npm gave a pyodide {PYODIDE} whose files do not have the expected hashes")
        cached.mkdir(exist_ok=True)
        for name in FILES:
            Path(folder, name).replace(cached / name)
    return cached


def write_assets(app, error):
    """Beside the pages: Pyodide, if it can be had, and exercises/data.js with all that a run
    needs."""
    if error or app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_static" / "exercises"
    folder.mkdir(parents=True, exist_ok=True)
    pyodide = fetch_pyodide()
    if pyodide:
        (folder / "pyodide").mkdir(exist_ok=True)
        for name in FILES:
            shutil.copyfile(pyodide / name, folder / "pyodide" / name)
    data = {
        "runner": Path(runner.__file__).read_text(encoding="utf-8"),
        "worker": (ROOT / "book/_static/exercises/worker.js").read_text(encoding="utf-8"),
        "files": FILES, "cdn": CDN, "local": bool(pyodide), "limit": LIMIT_S,
        "exercises": {e.name: e.title
                      for e in load_exercises()}, "parts": parts()
    }
    (folder / "data.js").write_text(f"window.PRACTICE = {json.dumps(data)};\n", encoding="utf-8")

    for exercise in load_exercises():
        page = Path(app.outdir) / "_sources" / "book" / "practice" / f"{exercise.name}.md"
        if page.exists():  # a stub, to a reader who downloads it
            page.write_text(f"# {exercise.title}\n\n{exercise.statement}", encoding="utf-8")


def parts() -> dict[str, str]:
    """The part of the book that an exercise belongs to: that of its chapter, else its chapter."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    part_of = {}
    for part in toc["parts"]:
        for entry in part["chapters"]:
            text = (ROOT / f"{entry['file']}.md").read_text(encoding="utf-8")
            part_of[re.findall("^# (.*)$", text, re.M)[0]] = part["caption"]
    return {e.name: part_of.get(e.chapter, e.chapter) for e in load_exercises()}


# -------------------------------------------------------------------------------------------- pages


def html(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


def chapter_link(title: str, pages: set[str]) -> str:
    """A link to the chapter of this title, or the title alone while the book has no such page."""
    for path in (ROOT / "book").glob("*.md"):
        if f"book/{path.stem}" in pages and f"\n# {title}\n" in "\n" + path.read_text(
                encoding="utf-8"):
            return f"[{title}](../{path.name})"
    return title


class Practice(SphinxDirective):
    """`{practice} NAME`: the page of one exercise."""

    required_arguments = 1

    def run(self):
        exercise = next((e for e in load_exercises() if e.name == self.arguments[0]), None)
        if exercise is None:
            raise self.error(f"there is no exercise {self.arguments[0]}")
        for path in exercise.folder.rglob("*"):
            self.env.note_dependency(str(path))
        self.env.metadata[self.env.docname]["practice"] = exercise.name
        chapter = chapter_link(exercise.chapter, self.env.found_docs)
        where = "in this page or in a terminal" if exercise.kind == "python" else "in a terminal"
        about = self.parsed(
            f"{exercise.level.capitalize()}, about {exercise.minutes} minutes, {where}. "
            f"Chapter: {chapter}.", "practice-about")
        run = self.workbench(exercise) if exercise.kind == "python" else self.terminal(exercise)
        hints = []
        for number, hint in enumerate(exercise.hints, 1):
            hints += self.folded(f"Hint {number}", self.parsed(hint, "practice-hint"))
        answer = nodes.literal_block(exercise.solution.strip(), exercise.solution.strip(),
                                     language="python")
        why = self.parsed(exercise.explanation, "practice-explanation")
        task = nodes.container(classes=["practice-task"])
        task += [about, self.parsed(exercise.statement, "practice-statement")]
        work = nodes.container(classes=["practice-work"])
        work += [*run, *hints, *self.folded("Solution", answer, why)]
        bench = nodes.container(classes=["practice-bench"])
        bench += [task, work]
        return [bench]

    def parsed(self, text, name):
        container = nodes.container(classes=[name])
        self.state.nested_parse(StringList(text.splitlines(), source=self.env.docname), 0,
                                container)
        return container

    def folded(self, summary, *content):
        return [html(f"<details><summary>{summary}</summary>"), *content, html("</details>")]

    def workbench(self, exercise):
        data = {
            "name": exercise.name, "starter": exercise.starter, "tests": exercise.tests,
            "statement": exercise.statement
        }
        text = json.dumps(data).replace("</", "<\\/")
        return [
            html(f'<div class="practice" data-exercise="{exercise.name}">'
                 f'<script type="application/json">{text}</script>'
                 f'<noscript>Running code needs JavaScript. In a terminal: '
                 f'<code>python practice/judge.py start {exercise.name}</code></noscript></div>')
        ]

    def terminal(self, exercise):
        needs = {
            "torch": "PyTorch", "triton": "PyTorch and Triton (without a GPU, Triton's interpreter)"
        }
        text = "\n".join(
            f"python practice/judge.py {command} {exercise.name}" for command in ("start", "run"))
        return [
            self.parsed(
                f"This exercise needs {needs[exercise.kind]}. In a clone of the repository:",
                "practice-terminal"),
            nodes.literal_block(text, text, language="console")
        ]


class PracticeProgress(SphinxDirective):
    """`{practice-progress}`: all exercises, what is solved, and answers out and in."""

    def run(self):
        self.env.metadata[self.env.docname]["practice"] = "progress"
        rows, chapter = [], None
        for e in load_exercises():
            self.env.note_dependency(str(e.folder / "meta.json"))
            if e.chapter != chapter:
                chapter = e.chapter
                rows.append(f'<tr><th colspan="4" scope="rowgroup">{escape(chapter)}</th></tr>')
            where = "page, terminal" if e.kind == "python" else f"terminal ({e.kind})"
            rows.append(f'<tr data-exercise="{e.name}"><td class="state" aria-label="open">·</td>'
                        f'<td><a href="{e.name}.html">{e.number}. {escape(e.title)}</a></td>'
                        f'<td>{e.level}, {e.minutes} min</td><td>{where}</td></tr>')
        return [
            html('<div class="practice-progress"><div class="practice-summary" role="status"></div>'
                 f'<table class="practice-table"><tbody>{"".join(rows)}</tbody></table></div>')
        ]


def add_page_assets(app, pagename, templatename, context, doctree):
    """Scripts and styles on the pages that have exercises, and on no other."""
    if "practice" in app.env.metadata.get(pagename, {}):
        app.add_css_file("exercises/exercises.css")
        for name in ("data.js", "editor.js", "exercises.js"):
            app.add_js_file(f"exercises/{name}", loading_method="defer")


def edit_statement(app, pagename, templatename, context, doctree):
    """The edit button of an exercise's page opens its statement."""
    named = app.env.metadata.get(pagename, {}).get("practice")
    for exercise in load_exercises():
        if exercise.name == named:
            folder = exercise.folder.relative_to(ROOT).as_posix()
            point_edit_button(context.get("header_buttons", []), f"{pagename}.md",
                              f"{folder}/statement.md")


def point_edit_button(buttons: list[dict], page: str, statement: str) -> None:
    """Change the address of the edit button, alone or in a group."""
    for button in buttons:
        point_edit_button(button.get("buttons", []), page, statement)
        if button.get("label") == "source-edit-button":
            button["url"] = button["url"].replace(page, statement)


def setup(app):
    app.add_directive("practice", Practice)
    app.add_directive("practice-progress", PracticeProgress)
    app.connect("html-page-context", add_page_assets)
    app.connect("html-page-context", edit_statement, priority=900)  # when there are buttons
    app.connect("build-finished", write_assets)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
