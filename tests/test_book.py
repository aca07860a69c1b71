"""Protects the book as a reader meets it: it builds without a warning, and its pages work in a
browser.

The build starts from nothing, runs every chapter, and fails on a warning or a cell that raises.
Every page is then opened in Chromium, light and dark, wide and on a phone: no script errors, no
request to another site, no sideways scrolling, nothing that axe-core calls serious, buttons and
links that lead to the right place, figures that react to the keyboard, search that finds the
chapter of a term.
"""

import ast
import gzip
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
import yaml
from axe_playwright_python.base import AXE_FILE_PATH

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "book"), str(ROOT / "book" / "_ext")]
import measure_engine
import repository
import sync

from paged.lab.notebook import record
from paged.models.loader.default_model import FILE, cache_directory
from tests.serving import served

pytestmark = pytest.mark.book


def listed_pages() -> list[str]:
    """The pages named in _toc.yml, as book/name."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [entry for part in toc.get("parts", [toc]) for entry in part.get("chapters", [])]
    chapters += [section for entry in chapters for section in entry.get("sections", [])]
    return [toc["root"]] + [entry["file"] for entry in chapters]


PAGES = listed_pages()
CHAPTERS = [chapter.relative_to(ROOT).with_suffix("").as_posix() for chapter in sync.chapters()]
SETTINGS = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
REPOSITORY = SETTINGS["repository"]


def test_every_chapter_is_in_the_table_of_contents():
    assert set(CHAPTERS) <= set(PAGES)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_notebook_is_in_step(chapter):
    """The .ipynb says what its .md says, and holds no outputs."""
    assert sync.main(["--check", str(ROOT / f"{chapter}.md")]) == 0, "run python book/sync.py"


def test_the_repository_is_named_once():
    """A fork changes its address in _config.yml and runs book/sync.py, nothing else."""
    naming = []
    for path in ROOT.rglob("*"):
        name = path.relative_to(ROOT)
        if path.suffix in (".md", ".py", ".yml", ".toml", ".txt", ".js",
                           ".css") and not (name.parts[0].startswith(".")
                                            or name.parts[0] in ("_build", "node_modules")):
            if REPOSITORY["url"] in path.read_text(encoding="utf-8", errors="ignore"):
                naming.append(name.as_posix())
    assert naming == ["_config.yml"]


def test_the_versions_of_the_decode_kernel_are_recorded():
    """The closing figure of Kernels has a bar for every version on every batch, and each listing
    its times."""
    chapter = (ROOT / "book" / "kernels.md").read_text(encoding="utf-8")
    steps = record("kernels_versions_h200")
    shapes = {row["shape"] for row in steps["rows"]}
    versions = re.findall(r'^figures\("(\w+)"\)$', chapter, re.M)
    assert len(versions) == 6 and shapes == {"64 × 4,096", "1 × 8,192", "64 skewed"}
    rows = {(row["version"], row["shape"]): row["graph_us"] for row in steps["rows"]}
    assert set(rows) == {(version, shape) for version in versions for shape in shapes}
    assert all(len(times) == 20 for times in rows.values())
    figure = chapter[chapter.index("def plot_versions"):].split("```")[0]
    assert figure.count("\nplot_versions()\n") == 1 and "step(name, shape)[1]" in figure
    assert [version for version in re.findall(r'\("(\w+)", "', figure)
            if version in versions] == versions
    assert 'steps = record("kernels_versions_h200")' in chapter and all(f'"{shape}"' in figure
                                                                        for shape in shapes)


def test_the_museum_on_a_gpu_is_recorded():
    """The engine chapter holds it against its own run: the same events, except that each request
    ends a step later."""

    def bare(events):
        return [{
            key: value
            for key, value in event.items() if key not in ("seconds", "device", "card")
        } for event in events if event["event"] in kinds]

    gpu, chapter = record("engine_h200"), ROOT / "book" / "engine.md"
    assert {"command", "date", "device", "driver", "torch", "cuda", "commit",
            "attention"} <= set(gpu)
    kinds = {event["event"] for event in gpu["events"]}
    steps = [event for event in gpu["events"] if event["event"] == "STEP"]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert all(step["seconds"] > 0
               for step in steps) and steps[0]["prefill"] and not steps[0]["decode"]
    assert 'device="cuda"' in gpu["place"]
    code = "\n".join(measure_engine.CELL.findall(chapter.read_text(encoding="utf-8")))
    assert code.count(measure_engine.PLACE) == 1 and "engine.step()" in code
    if not (cache_directory() / FILE).exists():
        pytest.skip("the default model is not in the cache")
    names = measure_engine.museum(chapter, measure_engine.PLACE)
    assert gpu["answers"] == {
        name: output.outputs[0].text
        for name, output in names["outputs"].items()
    }
    here, there = bare(names["trace"].events), bare(gpu["events"])
    moves, moves_there = ([(event["event"], event["block"], event["free"]) for event in events
                           if "block" in event] for events in (here, there))
    assert moves == moves_there
    ends, ends_there = ({
        event["request"]: event["step"]
        for event in events if event.get("after") == "finished"
    } for events in (here, there))
    assert ends_there == {request: step + 1
                          for request, step in ends.items()} and set(ends) == {"A", "B"}
    before = [[event for event in events if event["step"] < ends["A"]] for events in (here, there)]
    assert before[0] == before[1]


RESOURCES = """
import subprocess, tempfile
from pathlib import Path
import torch, triton
from measure_kernels import versions_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", float: "fp32",
         int: "i32"}

def compile_and_report(kernel, *args, grid, warmup, **options):
    bound = dict(zip(kernel.arg_names, args)) | options
    signature, constants, aligned = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params)):
        tensor = isinstance(bound[name], torch.Tensor)
        kind = TYPES.get(bound[name].dtype if tensor else type(bound[name]))
        signature[name] = "constexpr" if parameter.is_constexpr else kind
        if parameter.is_constexpr:
            constants[(i,)] = bound[name]
        elif tensor or bound[name] % 16 == 0:
            aligned[(i,)] = [["tt.divisibility", 16]]
    launch = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    source, target = ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32)
    binary = triton.compile(source, target, launch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
                               text=True, stdout=subprocess.PIPE, check=True).stdout
    print(kernel.__name__, usage.split("REG:")[1].split()[0], binary.metadata.shared)

JITFunction.run = compile_and_report
q = torch.zeros(64, 16, 128, dtype=torch.bfloat16)
k = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
tables = torch.zeros(64, 256, dtype=torch.int32)
with tempfile.TemporaryDirectory() as folder:
    for version in versions_of(Path("book/kernels.md"), Path(folder)):
        if version.__name__ in ("heads_together", "pipelined"):
            version(q, k, k, tables, tables[:, 0].contiguous(), 0.1)
"""


def test_programs_that_fit_on_a_multiprocessor(tmp_path):
    """Kernels explains versions 3 and 4 by them: compiled for an H200, by registers and shared
    memory."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "book")])
    }
    run = subprocess.run([sys.executable, "-c", RESOURCES], env=environment, cwd=ROOT,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    fits = {}
    for line in run.stdout.splitlines():
        kernel, registers, shared = line.split()
        by_registers = 2**16 // (4 * 32 * 8 * -(-int(registers) // 8)
                                 )  # 4 warps; handed out in eights
        fits[kernel] = min(by_registers, 228 * 2**10 //
                           (int(shared) + 2**10))  # 1 KiB a program is the system's
    said = re.search(r"^fit = (\{.*?\})",
                     (ROOT / "book" / "kernels.md").read_text(encoding="utf-8"), re.M)
    assert ast.literal_eval(
        said[1]) == {"heads_together": fits["group_kernel"], "pipelined": fits["split_kernel"]}


@pytest.fixture(scope="session")
def site(installed, tmp_path_factory) -> Path:
    """The HTML of a complete build into a new folder, by the installed wheel."""
    folder = tmp_path_factory.mktemp("site")
    program = Path(sys.executable).with_name("jupyter-book")
    # As from a reader's shell, without what conftest.py sets for the tests.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(installed)
    where = subprocess.run([sys.executable, "-c", "import paged; print(paged.__file__)"],
                           cwd=ROOT / "book", env=environment, capture_output=True, text=True)
    assert where.stdout.startswith(str(installed)), where
    run = subprocess.run(
        [program, "build",
         str(ROOT), "-W", "--keep-going", "--path-output",
         str(folder)], env={**environment, "NO_COLOR": "1"}, capture_output=True, text=True,
        timeout=1500)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
    return folder / "_build" / "html"


@pytest.mark.timeout(1600)
def test_builds_without_warnings(site):
    for page in PAGES:
        assert (site / f"{page}.html").exists()
    assert (site / "index.html").exists()


@pytest.mark.parametrize("page", CHAPTERS)
def test_page_shows_no_error_output(site, page):
    html = (site / f"{page}.html").read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" not in html
    assert "output stderr" not in html, "a cell wrote to stderr: a warning, or a progress bar"
    assert "cdn." not in html and "unpkg" not in html, "the page must not load from elsewhere"


@pytest.mark.parametrize("page", CHAPTERS)
def test_buttons_lead_to_the_right_place(site, page):
    """To the repository that this checkout was cloned from, or nowhere."""
    html = (site / f"{page}.html").read_text(encoding="utf-8")
    home, branch = repository.address(), REPOSITORY["branch"]
    if home is None:
        assert "colab.research" not in html and "/edit/" not in html and "/issues/new" not in html
    else:
        owner = home.removeprefix("https://github.com/")
        for address in (
                f"https://colab.research.google.com/github/{owner}/blob/{branch}/{page}.ipynb",
                f"{home}/edit/{branch}/{page}.md", f"{home}/issues/new?"):
            assert address in html, address
    assert f"_sources/{page}.ipynb" in html
    downloaded = (site / "_sources" / f"{page}.ipynb").read_text(encoding="utf-8")
    assert f"git+{REPOSITORY['url']}" in downloaded and sync.FROM_CHECKOUT not in downloaded


def test_every_link_leads_somewhere(site):
    """Inside the book: to a page, and to a place on it."""
    text = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    places = {path: set(re.findall(r'\bid="([^"]+)"', html)) for path, html in text.items()}
    for path, html in text.items():
        for link in set(re.findall(r'<a [^>]*?href="([^"]+)"', html)):
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = Path(urlsplit(urljoin(path.as_uri(), parts.path)).path) if parts.path else path
            assert target.exists(), f"{path.name}: {link}"
            if target.suffix == ".html" and parts.fragment and target in places:
                assert parts.fragment in places[target], f"{path.name}: {link}"


def test_exercises_have_their_scripts_and_statements(site):
    """On their pages and on no other; what is downloaded is the statement."""
    html = (site / "book/practice/slots.html").read_text(encoding="utf-8")
    for name in ("data.js", "editor.js", "exercises.js", "exercises.css"):
        assert f"exercises/{name}" in html
    assert "exercises/" not in (site
                                / "book/theatre.html").read_text(encoding="utf-8").split("<body")[0]
    assert "slot_mapping_for" in (site
                                  / "_sources/book/practice/slots.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", CHAPTERS)
def test_files_are_links_and_plots_have_words(site, page):
    html = (site / f"{page}.html").read_text(encoding="utf-8")
    bare = re.sub(r"<a .*?</a>", "", html, flags=re.S)
    for name in re.findall(r'<code class="docutils literal[^>]*><span class="pre">([^<]*)', bare):
        assert not (name.startswith(("paged/", "tests/")) and (ROOT / name).is_file()), name
    assert "<img " not in re.sub(r"<header.*?</header>", "", html,
                                 flags=re.S), "a plot as a picture"
    for plot in re.findall(r'<figure class="paged-plot".*?</figure>', html, re.S):
        shows, caption = re.findall(r'aria-label="([^"]+)" style', plot), plot.split("</a>. ")[-1]
        assert len(shows) == 1 and len(shows[0]) > 60 and len(caption) > 20
    assert re.search(r'<meta name="description" content="[^"]{40,}', html)


@pytest.fixture(scope="session")
def address(site):
    with served(site) as address:
        yield address


@pytest.fixture
def open_page(browser):
    """open_page(url, **context options): the page, and a list that collects what goes wrong in
    it."""
    contexts = []

    def open_(url: str, **options):
        contexts.append(browser.new_context(**options))
        page, wrong = contexts[-1].new_page(), []
        home = ("/".join(url.split("/")[:3]), "data:", "blob:")

        def note(is_wrong: bool, what: str) -> None:
            if is_wrong:
                wrong.append(what)

        page.on("pageerror", lambda error: note(True, f"script error: {error}"))
        page.on("console", lambda line: note(line.type == "error", f"console: {line.text}"))
        page.on("response", lambda got: note(got.status >= 400, f"{got.status}: {got.url}"))
        page.on("request", lambda sent: note(not sent.url.startswith(home), f"outside: {sent.url}"))
        page.goto(url, wait_until="load")
        return page, wrong

    yield open_
    for context in contexts:
        context.close()


PHONE = {"width": 390, "height": 844}


def is_dark(page, selector: str) -> bool:
    """Whether the element's background is dark."""
    color = page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", color)[:3]) < 384


SETTLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def resize(page, size: dict) -> None:
    """Give the window a size; return when what watches it has laid itself out anew."""
    page.set_viewport_size(size)
    page.evaluate(SETTLED)


def excess_width(page) -> int:
    """Pixels by which the page can be scrolled sideways."""
    return page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.fixture(scope="session")
def axe():
    return AXE_FILE_PATH.read_text(encoding="utf-8")


def barriers(page, axe: str, plain_code: bool) -> list:
    """What axe-core finds serious, or worse, in an open page: rule and elements.

    plain_code: without the colours of code, which are most of a chapter's elements and of the time.
    """
    if plain_code:
        page.evaluate("document.querySelectorAll('pre').forEach("
                      "code => { code.textContent = code.textContent })")
    page.evaluate(axe)
    found = page.evaluate(
        "axe.run(document, {resultTypes: ['violations'], preload: false})")["violations"]
    return [(rule["id"], [node["html"][:150] for node in rule["nodes"][:3]]) for rule in found
            if rule["impact"] in ("serious", "critical")]


COLUMN = """() => {
  const article = document.querySelector("article.bd-article");
  const right = article ? article.getBoundingClientRect().right + 1 : Infinity;
  return [...document.querySelectorAll("article :is(pre, table, figure, .formula)")]
    .filter((box) => box.scrollWidth > box.clientWidth + 1
      || box.getBoundingClientRect().right > right)
    .map((box) => box.outerHTML.slice(0, 80));
}"""

# axe-core takes seconds a page: each page is looked at in one of these, in turn.
LOOKS = [("light", False), ("dark", False), ("light", True), ("dark", True)]
LISTED = PAGES + ["genindex", "search", "source/paged/block_pool.py"]
_EXERCISES = [page for page in LISTED if "practice/" in page]
# Exercises are alike: four, one in each look, and the rest on request.
EXAMINED = set(LISTED) - set(_EXERCISES[4:])


@pytest.mark.parametrize("page", LISTED)
def test_page_in_a_browser(address, open_page, axe, page):
    if page not in EXAMINED and not os.environ.get("PAGED_EVERYTHING"):
        pytest.skip("an exercise like others: PAGED_EVERYTHING=1 opens every page")
    scheme, small = LOOKS[LISTED.index(page) % len(LOOKS)]
    opened, wrong = open_page(f"{address}/{page}.html", color_scheme=scheme)
    opened.wait_for_timeout(300)
    figures = opened.query_selector_all(".paged-figure")
    assert all(figure.query_selector(".title") for figure in figures), "a figure stayed empty"
    resize(opened, {"width": 1440, "height": 900})
    assert not (wide := opened.evaluate(COLUMN)), f"wider than the column: {wide}"
    for size in ({"width": 1280, "height": 900}, PHONE)[::1 if small else -1]:
        resize(opened, size)
        excess = excess_width(opened)
        assert excess <= 0, f"{size}: scrolls sideways by {excess} pixels"
    for system in ("light", "dark")[::1 if scheme == "dark" else -1]:  # ends in the page's look
        opened.emulate_media(color_scheme=system)
        for selector in ["body", ".paged-figure"][:1 + bool(figures)]:
            for _ in range(100):
                if is_dark(opened, selector) == (system == "dark"):
                    break
                opened.wait_for_timeout(50)
            else:
                pytest.fail(f"{system}: the background of {selector}")
    found = barriers(opened, axe, page not in _EXERCISES)
    assert not found, f"{scheme}, {'phone' if small else 'wide'}: {found}"
    assert not wrong, wrong


def test_on_paper(address, open_page):
    """Code wraps, colours stay; under a system's own colours the figures keep theirs."""
    opened, _ = open_page(f"{address}/book/slots.html")
    opened.emulate_media(media="print")
    assert opened.evaluate("[...document.querySelectorAll('article pre')]"
                           ".every((code) => code.scrollWidth <= code.clientWidth + 1)")
    style = "getComputedStyle(document.querySelector('.paged-figure .swatch'))"
    assert opened.evaluate(f"{style}.printColorAdjust") == "exact"
    forced, _ = open_page(f"{address}/book/slots.html", forced_colors="active")
    assert forced.evaluate(f"{style}.forcedColorAdjust") == "none"


@pytest.mark.parametrize("page", ["book/kernels", "book/theatre", "book/practice/slots"])
def test_a_page_is_light(address, open_page, page):
    """With all that it loads, compressed, and without Python for the exercises."""
    opened, _ = open_page("about:blank")
    bodies = {}
    opened.on("response", lambda got: bodies.setdefault(got.url, got))
    opened.goto(f"{address}/{page}.html", wait_until="networkidle")
    sizes = {url: len(gzip.compress(got.body())) for url, got in list(bodies.items()) if got.ok}
    assert len(sizes) > 5
    assert sum(sizes.values()) < 400_000, sorted(sizes.items(), key=lambda size: -size[1])[:5]


@pytest.mark.parametrize("term, place", [
    ("copy-on-write", "book/block-pool.html#the-code"),
    ("hash", "book/prefix-cache.html#the-idea-a-block-is-known-by-everything-up-to-its-end"),
    ("block table", "book/block-pool.html#the-idea-an-operating-system-in-three-arrays"),
    ("BlockPool", "book/block-pool.html#the-code"),
    ("preemption", "book/scheduling.html#two-ways-to-come-back"),
])
def test_search_finds_the_chapter_of_a_term(address, open_page, term, place):
    opened, wrong = open_page(f"{address}/search.html?q={term.replace(' ', '+')}")
    opened.wait_for_selector("#search-results li a")
    opened.wait_for_function("!document.querySelector('#search-results h2 span')?.textContent")
    first = opened.locator("#search-results li a").first
    assert first.get_attribute("href").split("?")[0].endswith(place)
    first.click()
    opened.wait_for_load_state()
    anchor = place.split("#")[1]
    top = opened.evaluate(f"document.getElementById('{anchor}').getBoundingClientRect().top")
    assert -5 <= top <= 300, "the page does not open at the section"
    assert not wrong


def test_the_contents_follow(address, open_page):
    opened, _ = open_page(f"{address}/book/kernels.html", viewport={"width": 1440, "height": 900})
    for name in ("6. Equal shares", "Say it in two minutes"):
        opened.evaluate(
            "(name) => [...document.querySelectorAll('article :is(h2, h3)')]"
            ".find((heading) => heading.textContent.startsWith(name)).scrollIntoView()", name)
        opened.wait_for_timeout(300)
        (active,) = opened.query_selector_all(".bd-toc a.active")
        assert active.inner_text().strip() == name


def react(page) -> int:
    """Use every explorer of a page by keyboard, assert that it answers, and count them."""
    figures = page.query_selector_all(".paged-figure")
    for figure in figures:
        slider = figure.query_selector("input[type=range]")
        before = figure.inner_text()
        slider.focus()
        page.keyboard.press("ArrowRight")
        assert figure.inner_text() != before, "the slider changes nothing"
    return len(figures)


def test_figures_react(address, open_page):
    """In the chapters that have them; two promise one each."""
    with_figures = 0
    for page in CHAPTERS:
        opened, wrong = open_page(f"{address}/{page}.html", reduced_motion="reduce", viewport=PHONE)
        with_figures += react(opened) > 0
        assert not wrong, f"{page}: {wrong}"
    assert with_figures >= min(2, len(CHAPTERS))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_work_without_the_book(tmp_path, monkeypatch, open_page, scheme):
    """In Jupyter, Colab or a file there is no style of ours but the figure's own."""
    from paged.lab import notebook

    shown = []
    monkeypatch.setattr(notebook, "display", shown.append)
    notebook.explorer("Bars", lambda size, n: {"paged": {"used": n, "internal": size}},
                      {"Size": [1, 2, 4], "Requests": [10, 20]},
                      {"used": "tokens", "internal": "waste"}, "slots")
    file = tmp_path / "output.html"
    file.write_text(
        "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        + "".join(output.data for output in shown), encoding="utf-8")
    opened, wrong = open_page(file.as_uri(), color_scheme=scheme, viewport=PHONE)
    assert react(opened) == 1 and not wrong
    assert excess_width(opened) <= 0
    assert is_dark(opened, ".paged-figure") == (scheme == "dark")
