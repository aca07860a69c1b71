"""Protects the pages of the exercises: a reader can solve one in the browser, and both runners
judge alike.

The pages are built without the chapters, which takes seconds, and opened in Chromium: type an
answer, run it, fail, fix it, pass, come back later; stop an endless loop; carry answers out and in.
Then every solution, starter and wrong answer is judged by the page's own worker, and must end as it
does in the terminal.
"""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from practice import portable, sandbox
from practice.catalog import Answers, load_exercises
from practice.check import write_answers
from tests.serving import served

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))
import exercises as extension  # noqa: E402

EXERCISES = load_exercises()
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}
IN_PAGE = [exercise for exercise in EXERCISES if exercise.kind == "python"]
CONF = """
import sys
sys.path.insert(0, {extensions!r})
import exercises
exercises.LIMIT_S = 3
extensions = ["myst_parser", "exercises"]
html_theme = "sphinx_book_theme"
root_doc = "book/practice/index"
include_patterns = ["book/practice/*"]
html_static_path = ["book/_static"]
html_css_files = ["book.css"]
"""

# -------------------------------------------------------------------------------- without a browser


def test_every_exercise_has_its_page_in_the_reading_order():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [entry for part in toc.get("parts", [toc]) for entry in part.get("chapters", [])]
    practice = next(entry for entry in chapters if entry["file"] == "book/practice/index")
    assert [entry["file"]
            for entry in practice["sections"]] == [f"book/practice/{e.name}" for e in EXERCISES]
    for exercise in EXERCISES:
        page = (ROOT / f"book/practice/{exercise.name}.md").read_text(encoding="utf-8")
        assert page == f"# {exercise.title}\n\n```{{practice}} {exercise.name}\n```\n"


def test_without_npm_the_pages_use_the_cdn(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert extension.fetch_pyodide() is None


@pytest.mark.parametrize("content, error", [(None, None), (b"not pyodide", RuntimeError)])
def test_what_npm_gives_is_checked(monkeypatch, tmp_path, content, error):
    """npm that fails means the CDN; npm that gives other files is an error, and nothing is
    cached."""
    import io
    import tarfile

    def pack(command, cwd, **options):
        if content is None:
            raise subprocess.CalledProcessError(1, command)
        with tarfile.open(Path(cwd) / "pyodide.tgz", "w:gz") as archive:
            for name in extension.FILES:
                entry = tarfile.TarInfo(f"package/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))

    monkeypatch.setenv("PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name, path=None: "npm")
    monkeypatch.setattr(subprocess, "run", pack)
    with pytest.raises(error) if error else contextlib.nullcontext():
        assert extension.fetch_pyodide() is None
    assert not list(tmp_path.rglob("*.mjs"))


# ----------------------------------------------------------------------------------- in the browser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The exercise pages alone, built by Sphinx."""
    source, html = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("html")
    for folder in ("practice", "_static"):
        shutil.copytree(ROOT / "book" / folder, source / "book" / folder)
    (source / "conf.py").write_text(CONF.format(extensions=str(ROOT / "book/_ext")),
                                    encoding="utf-8")
    with open(source / "book/practice/index.md", "a", encoding="utf-8") as file:
        file.write("\n```{toctree}\n:glob:\n*\n```\n")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html",
         str(source),
         str(html)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if not (html / "_static/exercises/pyodide/pyodide.mjs").exists():
        pytest.skip("Pyodide is neither in the cache nor to be had by npm")
    return html


@pytest.fixture(scope="module")
def address(site):
    with served(site) as address:
        yield f"{address}/book/practice"


@pytest.fixture
def context(browser):
    """A reader's browser: what one page stores, the next one finds."""
    made = browser.new_context(viewport={"width": 1280, "height": 900})
    made.set_default_timeout(90_000)
    yield made
    made.close()


def write(page, text):
    page.locator(".practice textarea").focus()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)


def run(page, text=None):
    """Write an answer and run it; the status line when it is judged."""
    if text is not None:
        write(page, text)
    page.locator(".practice textarea").focus()
    page.keyboard.press("Control+Enter")
    page.wait_for_function("document.querySelector('.practice .stop').hidden")
    return page.inner_text(".practice .status")


@pytest.mark.book
def test_an_exercise_from_the_first_run_to_the_next_day(address, context):
    page, requests, wrong = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{address}/slots.html")
    assert page.input_value(".practice textarea") == BY_NAME["slots"].starter
    assert not [url for url in requests if "pyodide" in url
                ], "Python is loaded before anybody asks for it"

    assert "0 of 15 cases pass" in run(page)
    assert "not written yet" in page.inner_text(".practice .results")
    assert "10 of 15" in run(
        page, "def slot_mapping_for(block_table, positions, block_size):\n"
        "    print('seen', block_table)\n"
        "    return [block_table[p // block_size] * block_size + p % block_size\n"
        "            for p in positions]\n")
    text = page.inner_text(".practice .failure >> nth=0")
    for part in ("slot_mapping_for([7, 1, 3], [12], 4)", "raises ValueError", "IndexError",
                 "line 3", "seen [7, 1, 3]"):
        assert part in text
    assert "runner.py" not in text
    page.click(".practice .failure >> nth=0 >> button.line")
    assert page.evaluate("document.activeElement.selectionStart") > 60

    assert "Solved: all 15 cases" in run(page, BY_NAME["slots"].solution)
    why = " ".join(BY_NAME["slots"].explanation.split(".")[0].split())
    assert why in " ".join(page.inner_text(".success").split())
    assert page.locator(".success a").get_attribute("href") == "append_block.html"
    home = (address.removesuffix("/book/practice"), "blob:", "data:")
    assert not [url for url in requests if not url.startswith(home)]

    page.reload()
    assert page.input_value(".practice textarea") == BY_NAME["slots"].solution
    assert "Solved before" in page.inner_text(".practice .status")
    page.goto(f"{address}/index.html")
    assert f"1 of {len(EXERCISES)} solved" in page.inner_text(".practice-summary")
    assert page.locator("tr.solved").get_attribute("data-exercise") == "slots"
    assert not wrong


@pytest.mark.book
def test_what_an_answer_can_do_wrong_in_the_page(address, context):
    """Loops are stopped, by hand and by the clock; crashes and bad code are said; the page lives
    on."""
    page = context.new_page()
    page.goto(f"{address}/slots.html")
    define = "def slot_mapping_for(block_table, positions, block_size):\n"
    run(page)  # Python is loaded once
    write(page, define + "    while True:\n        pass\n")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".practice .stop:visible")
    page.wait_for_timeout(300)
    assert page.evaluate("1 + 1") == 2  # the page answers while the loop runs
    page.click(".practice .stop")
    results = ".practice .results"
    assert "stopped by you" in page.inner_text(results)
    for text, said in ((define + "    while True:\n        pass\n",
                        "no end after 3 seconds"), ("while True:\n    pass\n",
                                                    "no end after 3 seconds"),
                       (define + "    return slot_mapping_for(1, 2, 3)\n",
                        "calls itself without an end"),
                       (define + "    import sys\n    sys.exit(3)\n",
                        "ended the program (sys.exit(3))"),
                       (define + "    return [0] * (1 << 30)\n",
                        "more memory"), (define + "    return input()\n", "nobody to type it"),
                       (define + "return 1\n",
                        "Python cannot read line 2"), ("def slots(): pass\n",
                                                       "does not define slot_mapping_for"),
                       (define + "    import os\n    os.abort()\n",
                        "crashed"), (define + "    return 1 / 0\n", "ZeroDivisionError")):
        run(page, text)
        assert said in page.inner_text(results), text
    assert "Solved" in run(page, BY_NAME["slots"].solution)


@pytest.mark.book
def test_with_the_keyboard_alone(address, context):
    page = context.new_page()
    page.goto(f"{address}/projections.html")
    area = page.locator(".practice textarea")
    area.focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("def f(x):\nreturn x", delay=2)
    assert area.input_value() == "def f(x):\n    return x"  # indented after the colon
    page.keyboard.press("Shift+Tab")
    assert area.input_value() == "def f(x):\nreturn x"
    page.keyboard.press("Control+/")
    assert area.input_value() == "def f(x):\n# return x"
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    assert area.input_value() == "def f(x):\n    return x"
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.keyboard.press("Backspace")
    page.keyboard.press("Tab")
    assert area.input_value() == "def f(x):\n    return x\n    "
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "run"
    page.keyboard.press("Enter")
    page.wait_for_selector(".practice .results .failure")
    assert "does not define projections_without_cache" in page.inner_text(".practice .results")
    page.on("dialog", lambda dialog: dialog.accept())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Reset"
    page.keyboard.press("Enter")
    assert area.input_value() == BY_NAME["projections"].starter
    page.keyboard.press("Control+z")
    assert area.input_value().startswith("def f(x):")  # even a reset can be undone
    assert page.locator(".colours").text_content().rstrip("\n") == area.input_value().rstrip("\n")


@pytest.mark.book
def test_answers_are_carried_out_and_in(address, context, browser, tmp_path):
    page = context.new_page()
    page.goto(f"{address}/top_p.html")
    write(page, "mine = 1\n")
    page.goto(f"{address}/index.html")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "paged-practice.json")
    answers = Answers(tmp_path / "answers")
    portable.import_answers(answers, EXERCISES, tmp_path / "paged-practice.json", replace=False)
    assert answers.path(BY_NAME["top_p"]).read_text(encoding="utf-8") == "mine = 1\n"

    answers.path(BY_NAME["slots"]).write_text(BY_NAME["slots"].solution, encoding="utf-8")
    answers.path(BY_NAME["top_p"]).write_text("other = 2\n", encoding="utf-8")
    answers.record(BY_NAME["slots"], solved=True)
    portable.export_answers(answers, EXERCISES, tmp_path / "back.json")
    asked = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    page.set_input_files("input[type=file]", tmp_path / "back.json")
    page.wait_for_selector("text=1 answers imported, 1 kept as they were here")
    assert "top_p" in asked[0]
    stored = page.evaluate("JSON.parse(localStorage.getItem('paged-practice'))")
    assert stored["answers"] == {"top_p": "mine = 1\n", "slots": BY_NAME["slots"].solution}
    assert list(stored["solved"]) == ["slots"]
    # The folder of answers itself, and a file that is neither.
    (tmp_path / "notes.json").write_text("{}", encoding="utf-8")
    files = [
        answers.path(BY_NAME["slots"]), tmp_path / "answers" / "progress.json",
        tmp_path / "notes.json"
    ]
    page.set_input_files("input[type=file]", files)
    page.wait_for_selector("text=Not an export: notes.json")


@pytest.mark.book
def test_from_the_cdn_every_file_is_checked(site, address, context):
    """Without Pyodide in the site, or in a page opened from a file, it comes from the CDN, hash by
    hash."""
    data = (site / "_static/exercises/data.js").read_text(encoding="utf-8")
    spoiled = []

    def serve(route):
        path = site / "_static/exercises/pyodide" / route.request.url.rsplit("/", 1)[1]
        body = path.read_bytes() + (b" " if path.name in spoiled else b"")
        kind = {".mjs": "text/javascript", ".wasm": "application/wasm"}.get(
            path.suffix, "application/zip")
        route.fulfill(body=body, content_type=kind, headers={"Access-Control-Allow-Origin": "*"})

    context.route(
        "**/exercises/data.js*", lambda route: route.fulfill(
            body=data.replace('"local": true', '"local": false'), content_type="text/javascript"))
    context.route(f"{extension.CDN}**", serve)
    page = context.new_page()
    page.goto(f"{address}/slots.html")
    assert "Solved" in run(page, BY_NAME["slots"].solution)
    spoiled.append("python_stdlib.zip")
    page.reload()
    run(page)
    assert "Python could not be loaded" in page.inner_text(".practice .results")
    spoiled.clear()
    page.goto((site / "book/practice/slots.html").as_uri())
    assert "Solved" in run(page, BY_NAME["slots"].solution)


JUDGE_ALL = """async (jobs) => {
  const { runner, worker, files } = window.PRACTICE;
  const source = URL.createObjectURL(new Blob([worker], { type: "text/javascript" }));
  const made = new Worker(source, { type: "module" });
  const next = (message) => new Promise((resolve) => {
    const cases = [];
    made.onmessage = ({ data }) => {
      if (data.event === "result") cases.push([data.case, data.passed]);
      if (data.event === "problem" || data.fatal) resolve(data.sentence || data.fatal);
      if (data.ready || data.done) resolve(cases);
    };
    made.postMessage(message);
  });
  const base = new URL("../../_static/exercises/pyodide/", location.href).href;
  await next({ base, files, runner });
  const results = [];
  for (const job of jobs) results.push(await next(job));
  made.terminate();
  return results;
}"""


@pytest.mark.book
def test_both_runners_judge_alike(address, context, tmp_path):
    """Every solution, starter and wrong answer fails the same cases in the page as in the
    terminal."""
    page = context.new_page()
    page.goto(f"{address}/slots.html")
    paths = {}
    for exercise in IN_PAGE:
        folder = tmp_path / exercise.name
        folder.mkdir()
        paths[exercise.name] = write_answers(exercise, folder)
    assert all(len(files) >= 5 for files in paths.values())
    jobs = [{
        "answer": path.read_text(encoding="utf-8"), "starter": exercise.starter,
        "statement": exercise.statement, "tests": exercise.tests
    } for exercise in IN_PAGE for path in paths[exercise.name]]
    in_page = iter(page.evaluate(JUDGE_ALL, jobs))
    for exercise in IN_PAGE:
        files = paths[exercise.name]
        for path, report in zip(files, sandbox.run_answers(exercise, files)):
            in_terminal = [[case["case"], case["passed"]] for case in report["cases"]]
            assert next(in_page) == in_terminal, path


@pytest.mark.book
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(address, browser, scheme):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme,
                                  has_touch=True)
    page = context.new_page()
    for exercise in EXERCISES:
        page.goto(f"{address}/{exercise.name}.html")
        widths = page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths[0] <= widths[1], f"{exercise.name} scrolls sideways"
    page.goto(f"{address}/slots.html")
    size = page.evaluate("getComputedStyle(document.querySelector('.practice textarea')).fontSize")
    assert float(size.removesuffix("px")) >= 16  # below that, a phone zooms in on focus
    context.close()
