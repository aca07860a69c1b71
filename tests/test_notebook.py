"""Protects what the chapters share: a check that really fails, figures that carry all they need."""

import json
import re

import pytest

torch = pytest.importorskip("torch")

from paged import BlockPool
from paged.lab import notebook, plots
from paged.lab.colors import INKS


@pytest.fixture
def shown(monkeypatch):
    """What a cell would have displayed."""
    outputs = []
    monkeypatch.setattr(notebook, "display", outputs.append)
    return outputs


@pytest.mark.parametrize("got, want, complaint", [
    (torch.zeros(2), torch.zeros(3), "shapes"),
    (torch.zeros(2), torch.tensor([0.0, 1e-3]), "1.0e-03, allowed 1e-05"),
    (torch.tensor([0.0, float("nan")]), torch.zeros(2), "nan"),
])
def test_check_fails(got, want, complaint):
    with pytest.raises(AssertionError, match=complaint):
        notebook.check("decode", got, want)


def test_check_passes_in_one_line(capsys):
    notebook.check("decode", torch.ones(2, dtype=torch.bfloat16), torch.ones(2))
    notebook.check("nothing", torch.empty(0, 4), torch.empty(0, 4))
    assert capsys.readouterr().out.count("\n") == 2


def test_table_formats_numbers(shown):
    notebook.table([["a|b", 12345, 0.99612], ["c", 7, 123456.7]], ["name", "count", "share"])
    assert shown[0].data.splitlines() == [
        "| name | count | share |", "| :-- | --: | --: |", r"| a\|b | 12,345 | 0.9961 |",
        "| c | 7 | 123,457 |"
    ]


def test_source_names_file_and_line(shown, monkeypatch):
    from paged.attention import paged_attention
    from paged.runner import ModelRunner

    monkeypatch.setattr(notebook, "OPEN", 10**6)
    notebook.source(BlockPool.allocate, paged_attention,
                    ModelRunner.launch)  # the last one is decorated
    for output, start in zip(
            shown, (r"paged/block_pool.py`, from line \d+:\n\n```python\ndef allocate\(self",
                    r"paged/attention/__init__.py`, from line \d+:\n\n```python\ndef ",
                    r"paged/runner.py`, from line \d+:\n\n```python\n@torch.inference_mode"),
            strict=True):
        assert re.match("`" + start, output.data)


def test_a_long_listing_is_folded(shown):
    notebook.source(BlockPool.allocate, BlockPool)
    short, long = (output.data for output in shown)
    assert "<details" not in short and "class BlockPool" in long
    assert re.search(r"<summary><code>BlockPool</code>, \d+ lines</summary>\n\n```python\n", long)
    assert long.endswith("```\n\n</details>")


def test_record_finds_both_copies_and_names_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook, "__file__", str(tmp_path / "paged" / "lab" / "notebook.py"))
    for folder, name in (("book/data", "one"), ("paged/data", "two")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.json").write_text(json.dumps({"name": name}))
    assert [notebook.record(name)["name"] for name in ("one", "two")] == ["one", "two"]
    with pytest.raises(FileNotFoundError, match="there are one, two"):
        notebook.record("three")


def test_style_keeps_the_background_clear():
    import matplotlib

    with matplotlib.rc_context():
        notebook.style()
        assert matplotlib.rcParams["figure.facecolor"] == "none"


@pytest.fixture
def drawn(monkeypatch):
    """A plot of bars with text, as it is put into a cell's output."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    shown = []
    monkeypatch.setattr(plots, "display", shown.append)

    def draw(shows="Two bars, the left one higher.", caption="Bars of `x`."):
        with matplotlib.rc_context():
            notebook.style()
            figure, axis = plt.subplots()
            axis.bar([0, 1], [2, 1], color=[notebook.COLORS[name] for name in ("used", "shared")])
            axis.text(0, 1, "on", color="white")
            axis.text(1, 1, "said", color=notebook.COLORS["shared"])
            notebook.plot(shows, caption)
            assert not plt.get_fignums(), "a figure shown twice"
        return shown[-1].data

    return draw


def test_a_plot_says_what_it_shows(drawn):
    html = drawn()
    assert 'role="img" aria-label="Two bars, the left one higher."' in html
    (number,) = re.findall(r'id="figure-(\d+)"', html)
    assert f'<a href="#figure-{number}">Figure {number}</a>. Bars of <code>x</code>.' in html
    assert f'id="figure-{number}"' in drawn(), "a cell that runs again keeps its number"
    assert f'id="figure-{int(number) + 1}"' in drawn("Something else.")


def test_a_plot_follows_the_page(drawn):
    """Its colours are variables, of shapes and of text apart; what they stand for has contrast."""
    svg = drawn().split("</style>")[1]
    said = set(re.findall(r"#[0-9a-f]{6}", svg))
    assert said == {"#ffffff"}, "colours that do not change with the page"
    for variable in ("--used", "--shared", "--shared-ink", "--plot-ink"):
        assert f"var({variable})" in svg
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) and all(name.startswith("figure-") for name in ids)


def test_what_is_shared_is_told_without_its_colour(monkeypatch):
    """Lines have dashes, dots are rings, areas have stripes; what is used has none of these."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    shown = []
    monkeypatch.setattr(plots, "display", shown.append)

    def drawn(name: str) -> str:
        with matplotlib.rc_context():
            notebook.style()
            _, axis = plt.subplots()
            color = notebook.COLORS[name]
            axis.plot([0, 1], [2, 1], color=color)
            axis.axhline(1, color=color)
            axis.scatter([0, 1], [1, 2], color=color, alpha=0.5, linewidth=0)
            axis.fill_between([0, 1], [0, 1], color=color)
            notebook.plot(f"All of it {name}.", "Lines, dots, and an area.")
        return shown[-1].data.split("</style>")[1]

    used, shared = drawn("used"), drawn("shared")
    assert len(re.findall(r"stroke-dasharray: 7 4; stroke: var\(--shared\)", shared)) == 2
    assert len(re.findall(r'<use [^>]*style="fill: none; stroke: var\(--shared\)"', shared)) == 2
    assert len(re.findall(r'style="fill: url\(#[^)]*stripes\)', shared)) == 1
    assert "stroke-dasharray" not in used and "stripes" not in used and "var(--used)" in used


def test_a_picture_in_a_plot_stays_what_it_is():
    from paged.lab.plots import themed
    svg = '<svg><image id="a" xlink:href="data:image/png;base64,AA"/><use xlink:href="#a"/></svg>'
    got = themed(svg, "p")
    assert 'id="p-a"' in got and 'href="data:image/png;base64,AA"' in got and 'href="#p-a"' in got


def luminance(color: str) -> float:
    parts = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055)**2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_read():
    """WCAG's 4.5 to 1: on the colours, and in them on the pages' and the figures' backgrounds."""
    for name, color in notebook.COLORS.items():
        on = "#ffffff" if name in ("used", "shared", "external", "new") else notebook.DARK
        assert contrast(color, on) >= 4.5, name
    for name, (on_light, on_dark) in INKS.items():
        assert all(contrast(on_light, ground) >= 4.5 for ground in ("#ffffff", "#f6f8fa")), name
        assert all(contrast(on_dark, ground) >= 4.5 for ground in ("#121212", "#1b2128")), name


def payload(html: str) -> dict:
    """The data inside a figure's script."""
    (data,) = re.findall(r'figure\(document\.getElementById\("[\w-]+"\), (.*)\);\n', html)
    return json.loads(data)


def test_explorer_computes_every_combination(shown):
    notebook.explorer("A </script> title", lambda size, n: {"paged": {"used": n, "internal": size}},
                      {"Size": [1, 2], "Requests": [10, 20, 30]},
                      {"used": "tokens", "internal": "waste"}, "slots")
    html = shown[0].data
    assert payload(html)["amounts"] == [[[n, size]] for size in (1, 2) for n in (10, 20, 30)]
    assert html.count("</script>") == 1, "data may not end the script"
    assert "http" not in html.replace("http://www.w3.org", ""), "a figure may load nothing"


def test_figures_of_one_page_have_their_own_ids(shown):
    for title in "tu":
        notebook.explorer(title, lambda n: {"b": {"used": n}}, {"n": [1]}, {"used": "tokens"},
                          "slots")
    ids = [re.search(r'id="([\w-]+)"', output.data)[1] for output in shown]
    assert len(set(ids)) == 2
