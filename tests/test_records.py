"""Protects what the README beside the records promises: each says where it comes from, a command in
this repository repeats it or it says that none does, and a chapter that reads it says so too.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from paged.__main__ import main
from paged.lab.notebook import record

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "book" / "data"
NAMES = sorted(path.stem for path in DATA.glob("*.json"))
MEASURED = [name for name in NAMES if name != "cards"]
REPEATED = [name for name in MEASURED if record(name)["command"]]
NOT_REPEATED = [name for name in MEASURED if not record(name)["command"]]
CHAPTERS = sorted((ROOT / "book").glob("*.md"))


def has_samples(value) -> bool:
    """Whether there is a list of five numbers or more, a compressed one, or a trace in a record."""
    if isinstance(value, dict):
        return bool({"samples", "events"} & set(value)) or any(map(has_samples, value.values()))
    if isinstance(value, list):
        return len(value) >= 5 and all(isinstance(number, int | float)
                                       for number in value) or any(map(has_samples, value))
    return False


@pytest.mark.parametrize("name", MEASURED)
def test_a_record_has_its_device_date_and_versions(name):
    kept = record(name)
    assert kept["device"] and kept["torch"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", kept["date"])


@pytest.mark.parametrize("name", REPEATED)
def test_a_record_that_a_command_repeats(name):
    """Commit, driver, versions and raw samples; and the command is there, with its options."""
    kept = record(name)
    assert re.fullmatch("[0-9a-f]{7}", kept["commit"])
    assert kept["python"] and {"cuda", "driver"} <= set(kept)
    assert (kept["cuda"] is None) == (kept["driver"] is None)
    assert has_samples(kept)

    python, *words = shlex.split(kept["command"])
    assert python == "python"
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file() and len(words) == 1
        return
    module, *arguments = words[1:]
    if module != "paged":
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file() and not arguments
        return
    known, helped = io.StringIO(), [*arguments[:2], "--help"]
    with contextlib.redirect_stdout(known), pytest.raises(SystemExit) as ended:
        main(helped)
    assert ended.value.code == 0
    for option in arguments[2:]:
        assert not option.startswith("--") or re.search(rf"{option}\b", known.getvalue()), option


@pytest.mark.parametrize("name", NOT_REPEATED)
def test_a_record_that_no_command_repeats(name):
    """It says so, and so does the README, which names no other."""
    assert "no command repeats" in record(name)["conditions"]
    text = (DATA / "README.md").read_text(encoding="utf-8")
    assert set(
        re.findall(r"`(\w+_h200)`", "".join(
            line for line in text.splitlines() if line.startswith("- ")))) == set(NOT_REPEATED)


def test_cards_have_sources():
    for name in set(record("cards")) - {"what"}:
        card = record("cards")[name]
        assert card["source"] and card["properties"] and card["guide"]


def reads(chapter: str) -> dict[str, list[str]]:
    """The records that a chapter reads, each with the names that its cells give it."""
    found: dict[str, list[str]] = {name: [] for name in re.findall(r'record\("(\w+)"\)', chapter)}
    for names, values in re.findall(r'^([\w, ]+) = (record\(.*)$', chapter, re.M):
        for variable, name in zip(names.split(", "), re.findall(r'record\("(\w+)"\)', values)):
            found[name].append(variable)
    return found


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_says_what_repeats_its_records(path):
    """The command of each; where there is none, its conditions, or that no command repeats it."""
    chapter = path.read_text(encoding="utf-8")
    paragraphs = [" ".join(text.split()) for text in re.split(r"\n\s*\n", chapter)]
    for name, variables in reads(chapter).items():
        field = "command" if name in REPEATED else "conditions"
        if any(f"{{{variable}['{field}']}}" in chapter for variable in variables):
            continue
        if name in REPEATED:
            command = record(name)["command"].split(" --")[0]
            assert command in chapter, f"{name}: by {command}"
        elif name != "cards":
            assert any(f"`{name}`" in text and re.search(r'[Nn]o "? ?(f")?command repeats', text)
                       for text in paragraphs), f"{name}: by no command"
