"""Protects what the pages are made with: book/_ext, and the figures that are dragged.

The pages themselves are opened by tests/test_book.py; here the parts are held without a build.
"""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import docutils.core
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "book"), str(ROOT / "book" / "_ext")]
import citations
import icons
import paged_page
import preview
import repository
import sources

from paged import Engine, EngineConfig, SamplingParams, Trace
from paged.lab import notebook, sliders


@pytest.mark.parametrize("remote, page", [
    ("https://github.com/some/book.git", "https://github.com/some/book"),
    ("git@github.com:some/book.git", "https://github.com/some/book"),
    ("ssh://git@github.com/some/book", "https://github.com/some/book"),
    ("https://token@github.com/some/book/", "https://github.com/some/book"),
    ("/home/somebody/book", None),
    ("https://example.org/some/book.git", None),
    ("", None),
])
def test_the_page_of_a_remote(remote, page):
    assert repository.web_address(remote) == page


def test_buttons_follow_the_remote(tmp_path):
    options = {
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
        "repository_url": "https://github.com/from/config", "use_issues_button": True,
        "use_edit_page_button": True, "use_repository_button": True, "other": 1
    }
    (tmp_path / "none").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "none")], check=True)
    none = repository.point_buttons(options, repository.address(tmp_path / "none"))
    assert none["other"] == 1 and not any(none[name] for name in repository.BUTTONS)
    subprocess.run(["git", "init", "-q", str(tmp_path / "fork")], check=True)
    subprocess.run([
        "git", "-C",
        str(tmp_path / "fork"), "remote", "add", "origin", "git@github.com:a/fork.git"
    ], check=True)
    fork = repository.point_buttons(options, repository.address(tmp_path / "fork"))
    assert fork == {**options, "repository_url": "https://github.com/a/fork"}


@pytest.mark.parametrize("page, pages", [
    (None, None),
    ("https://github.com/Some/book", "https://some.github.io/book/"),
    ("https://github.com/Some/some.github.io", "https://some.github.io/"),
])
def test_the_picture_of_a_link_has_an_absolute_address_or_none(monkeypatch, page, pages):
    monkeypatch.setattr(repository, "address", lambda: page)
    context = {"metatags": "", "title": "A <em>page</em>"}
    paged_page.describe(None, "", "", context, docutils.core.publish_doctree("What it says."))
    tags = dict(re.findall(r'<meta \w+="([^"]+)" content="([^"]*)" />', context["metatags"]))
    assert tags["og:title"] == "A page" and tags["og:description"] == "What it says."
    assert tags.get("og:image") == tags.get("twitter:image") == (pages
                                                                 and f"{pages}_static/preview.png")


def test_the_picture_of_a_link(tmp_path):
    """A PNG of the size that is promised; the tables in it are those of a real pool."""
    preview.draw(tmp_path / preview.PLACE, "A title")
    data = (tmp_path / "_static" / "preview.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == preview.SIZE
    (first, second), counts = preview.tables()
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])
    assert [counts[block] for block in first] == [2, 2, 1, 1, 1, 1]


def test_no_colab_without_a_repository(monkeypatch):
    for home, left in ((None, 1), ("https://github.com/a/b", 2)):
        monkeypatch.setattr(repository, "address", lambda: home)
        context = {"header_buttons": [{"label": "download-buttons"}, {"label": "launch-buttons"}]}
        repository.drop_launch_buttons(None, "", "", context, None)
        assert len(context["header_buttons"]) == left


def test_files_of_this_repository():
    assert sources.ours("paged/slots.py") and sources.ours("book/sync.py")
    assert not sources.ours("paged/no_such_file.py") and not sources.ours("vllm/v1/engine/core.py")


def test_files_of_other_engines_lead_to_the_cited_version():
    """Of the same short name twice in a chapter, each to its own."""
    found = [
        citations.Citation("vLLM", "0.33.0", "vllm/v1/a/pool.py", (), "c", 1),
        citations.Citation("SGLang", "0.5.23", "sglang/srt/pool.py", (), "c", 2)
    ]
    assert sources.cited(
        "pool.py", found) == ("https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/a/pool.py")
    assert sources.cited(
        "pool.py",
        found) == ("https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/pool.py")
    assert sources.cited("another.py", found) is None
    commit = [citations.Citation("SGLang", "053b63f", "sglang/srt/pool.py", (), "c", 1)]
    assert sources.cited(
        "pool.py",
        commit) == ("https://github.com/sgl-project/sglang/blob/053b63f/python/sglang/srt/pool.py")
    projects = {
        c.project
        for path in (ROOT / "book").glob("*.md")
        for c in citations.citations(path) if citations.FILE.fullmatch(c.place)
    }
    assert projects <= set(sources.PLACES)


@pytest.mark.skipif(not icons.SCRIPT.exists(), reason="this theme has no script of icons")
def test_icons_are_drawn_without_their_script():
    css = icons.style_sheet(['<i class="fa-solid fa-bars"></i><i class="fab fa-github fa-lg"></i>'])
    assert ".fa-solid.fa-bars { --icon: url(" in css and ".fab.fa-github {" in css
    assert ".fa-lg {" in css and len(css) < 10_000
    with pytest.raises(KeyError, match="no-such-icon"):
        icons.style_sheet(['<i class="fas fa-no-such-icon"></i>'])


def test_terms_are_those_of_headings():
    terms = yaml.safe_load((ROOT / "book" / "terms.yml").read_text(encoding="utf-8"))
    said = [term for headings in terms.values() for names in headings.values() for term in names]
    assert len(said) == len(set(said)), "a term is explained in one place"
    for page, headings in terms.items():
        text = (ROOT / "book" / f"{page}.md").read_text(encoding="utf-8")
        for heading in headings:
            assert re.search(rf"^##+ {re.escape(heading)}$", text, re.M), f"{page}: {heading}"


def test_plots_are_shown_with_words():
    for path in (ROOT / "book").glob("*.md"):
        assert "plt.show()" not in path.read_text(encoding="utf-8"), f"{path.name}: use plot(...)"


def test_the_parts_of_the_book():
    """What an exercise calls next is of its part, and chapters are numbered through."""
    import exercises
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    captions = [part["caption"] for part in toc["parts"]]
    assert captions == ["Pages", "An engine", "A GPU", "Beyond one engine", "Practice"]
    assert all(part["numbered"] == 1 for part in toc["parts"][:-1])
    assert set(exercises.parts().values()) <= set(captions)


# ------------------------------------------------------------------------- figures that are dragged


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(notebook, "display", outputs.append)
    return outputs


def payload(output) -> dict:
    (data,) = re.findall(r'figure\(document\.getElementById\("[\w-]+"\), (.*)\);\n', output.data)
    return json.loads(data)


def test_slot_finder_refuses_a_table_that_cannot_be(shown):
    sliders.slot_finder("slots", 5, 8, {2: [3, 0, 1], 4: [1, 0]}, at=4)
    assert payload(shown[0])["at"] == 1
    with pytest.raises(ValueError, match="5 tokens in blocks of 2 of 8 rows"):
        sliders.slot_finder("slots", 5, 8, {2: [3, 0]}, at=2)
    with pytest.raises(ValueError, match="cannot have"):
        sliders.slot_finder("slots", 5, 8, {2: [3, 0, 4]}, at=2)


def test_online_softmax_ends_at_attention(shown):
    scores, values = [0.5, -1.0, 3.0, 2.0, -2.0], [[1.0, 2.0], [0.0, 1.0], [4.0, -1.0], [2.0, 2.0],
                                                   [9.0, 9.0]]
    sliders.online_softmax("softmax", scores, values, tile=2)
    data = payload(shown[0])
    assert [step["m"] for step in data["steps"]] == [None, 0.5, 3.0, 3.0]
    assert data["steps"][-1]["out"] == pytest.approx(data["want"])
    assert data["steps"][2]["alpha"] == pytest.approx(2.718281828**-2.5)


class OneToken:

    def execute(self, batch):
        return [1] * len(batch.request_ids)


def crowded(budget, seats, blocks):
    """The trace of three requests."""
    trace = Trace()
    engine = Engine(
        EngineConfig(num_blocks=blocks, block_size=2, max_num_seqs=seats,
                     max_num_batched_tokens=budget), OneToken(), trace=trace)
    for i in range(3):
        engine.add_request([10 * i + j for j in range(6)], SamplingParams(max_tokens=6), str(i))
    while engine.has_unfinished():
        engine.step()
    return trace


def test_lanes_say_what_each_request_did():
    """Held to the trace: prompts are computed whole, all decode, and somebody is put back."""
    trace = crowded(8, 3, 8)
    for lane in sliders.lanes(trace, ["0", "1", "2"]):
        steps = [kind for kind, count in lane for _ in range(count)]
        assert len(steps) == len(trace.select("STEP"))
        assert steps.count("used") >= 3 and "new" in steps
    assert any(
        kind == "external" for lane in sliders.lanes(trace, ["0", "1", "2"]) for kind, _ in lane)
    alone = sliders.lanes(crowded(8, 1, 8), ["0", "1", "2"])
    assert [kind for kind, _ in alone[0]] == ["new", "used", ""]
    assert [kind for kind, _ in alone[1]] == ["free", "new", "used", ""]


def test_request_timeline_runs_every_combination(shown):
    sliders.request_timeline("t", crowded, {"Budget": [4, 8], "Seats": [1, 3], "Pool": [8]},
                             ["0", "1", "2"])
    data = payload(shown[0])
    assert [(run["budget"], run["blocks"]) for run in data["runs"]] == [(4, 8), (4, 8), (8, 8),
                                                                        (8, 8)]
    assert data["steps"] == max(len(run["tokens"]) for run in data["runs"])
    assert all(max(run["tokens"]) <= run["budget"] for run in data["runs"])
