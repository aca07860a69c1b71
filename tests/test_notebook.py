"""Protects what the chapters share: a check that really fails, figures that carry all they need."""

import json
import re

import pytest

torch = pytest.importorskip("torch")

from paged import BlockPool
from paged.lab import notebook


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


def test_source_names_file_and_line(shown):
    from paged.attention import paged_attention
    from paged.runner import ModelRunner

    notebook.source(BlockPool.allocate, paged_attention,
                    ModelRunner.launch)  # the last one is decorated
    for output, start in zip(
            shown, (r"paged/block_pool.py`, from line \d+:\n\n```python\ndef allocate\(self",
                    r"paged/attention/__init__.py`, from line \d+:\n\n```python\ndef ",
                    r"paged/runner.py`, from line \d+:\n\n```python\n@torch.inference_mode"),
            strict=True):
        assert re.match("`" + start, output.data)


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
    for _ in range(2):
        notebook.explorer("t", lambda n: {"b": {"used": n}}, {"n": [1]}, {"used": "tokens"},
                          "slots")
    ids = [re.search(r'id="([\w-]+)"', output.data)[1] for output in shown]
    assert len(set(ids)) == 2
