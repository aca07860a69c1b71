"""Protects the two ways in which the package leaves this folder: modules that need no torch, and
the wheel.

The modules of the block logic import in a Python that has neither torch nor NumPy nor xxhash (a
browser). A wheel built from this tree works in an empty folder, where the notebooks, as Colab opens
them, run to the end.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "book"))
import sync

ROOT = Path(__file__).resolve().parents[1]
TORCH_FREE = ["block_pool", "prefix_cache", "slots", "scheduler", "memory", "trace", "sampling"]
NOTEBOOKS = [chapter.with_suffix(".ipynb") for chapter in sync.chapters()]


def python(code: str, folder: Path, **environment: str) -> str:
    """The output of some code in a fresh Python in that folder."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, env={**inherited, **environment},
                         capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_in_a_bare_python(module):
    blocked = {name: None for name in ("torch", "numpy", "xxhash", "triton", "transformers")}
    python(f"import sys; sys.modules.update({blocked}); import paged.{module}", ROOT)


def test_import_is_light():
    """`import paged` brings in none of the heavy libraries."""
    python("import paged, sys; assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)",
           ROOT)


def requirements() -> dict[str, list]:
    from packaging.requirements import Requirement

    pins: dict[str, list] = {}
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            pins.setdefault(pin.name.lower().replace("_", "-"), []).append(pin)
    return pins


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_range_has_one_exact_pin_inside_it(version):
    """requirements.txt holds what pyproject.toml asks for, exactly once for each Python."""
    from packaging.requirements import Requirement

    environment = {
        "python_version": version, "python_full_version": f"{version}.9", "sys_platform": "linux"
    }
    pins = {
        name: [pin for pin in found if pin.marker is None or pin.marker.evaluate(environment)]
        for name, found in requirements().items()
    }
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = "dependencies|notebook|book|serve|ray|test"
    lists = re.findall(rf"^(?:{names}) = \[(.*?)\]$", text, re.M | re.S)
    wanted = [Requirement(item) for items in lists for item in re.findall(r'"([^"]+)"', items)]
    wanted = [want for want in wanted if want.name != "paged"]
    assert len(lists) == 6 and len(wanted) > 15
    for want in wanted:
        found = pins.get(want.name.lower(), [])
        assert len(found) == 1, f"{want.name} has {len(found)} pins for Python {version}"
        pin = next(iter(found[0].specifier))
        assert pin.operator == "==" and want.specifier.contains(
            pin.version), f"{found[0]} is not in {want}"


def test_wheel_holds_the_package_and_what_it_reads(installed):
    names = {
        path.relative_to(installed).as_posix()
        for path in installed.rglob("*") if path.is_file()
    }
    assert {
        "paged/lab/figures/figures.css", "paged/lab/figures/explorer.js", "paged/lab/notebook.py",
        "paged/lab/figures/theatre.css", "paged/lab/figures/theatre.js",
        "paged/data/how-engines-break.md"
    } <= names
    records = {path.name for path in (ROOT / "book" / "data").glob("*.json")}
    assert {f"paged/data/{name}" for name in records} <= names
    strangers = [
        name for name in names if not name.startswith("paged") and not name.startswith("bin/")
    ]
    assert not strangers, strangers


@pytest.mark.book
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "notebook", [path for path in NOTEBOOKS if path.stem in ("slots", "how-engines-break")],
    ids=lambda path: path.stem)
def test_notebook_runs_outside_the_checkout(installed, tmp_path, notebook):
    """The .ipynb that Colab opens, over the installed wheel, in an empty folder. The build of the
    book runs all of them over the wheel, in the checkout."""
    target = tmp_path / notebook.name
    target.write_text(notebook.read_text(encoding="utf-8"), encoding="utf-8")
    code = f"""
import nbclient, nbformat
notebook = nbformat.read({str(target)!r}, as_version=4)
where = nbformat.v4.new_code_cell("import paged; print(paged.__file__)")
notebook.cells.append(where)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
print(where.outputs[0].text)
"""
    assert python(code, tmp_path, PYTHONPATH=str(installed)).strip().startswith(str(installed))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_opens_no_file_of_the_checkout(notebook):
    """Elsewhere there is none: records come from the package."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert not re.findall(r"\bopen\(|read_text\(|read_csv|__file__|\.\./(?!\[)",
                          code.replace(sync.FROM_CHECKOUT, ""))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_installs_what_is_missing(notebook):
    """From the repository of _config.yml, nothing when the package is there, and never another
    PyTorch."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    wanted = sync.install_from_repository(f"try:\n    import paged\nexcept ModuleNotFoundError:\n"
                                          f"    %pip install -q {sync.FROM_CHECKOUT}")
    assert first == wanted and "git+https://" in first


def floors() -> dict[str, int]:
    """{module or room: its floor}, from the map in paged/README.md."""
    block = re.search(r"```text\n(.*?)```", (ROOT / "paged/README.md").read_text(encoding="utf-8"),
                      re.S)
    assert block is not None, "the map is gone"
    found, floor = {}, -1
    for line in block[1].splitlines():
        ((number, names),) = re.findall(r"^(\d?)\s+([^ ].*?)(?:\s{4,}.*)?$", line)
        floor = int(number) if number else floor
        found |= {name.rstrip("/"): floor for name in names.split()}
    return found


def test_a_module_imports_from_its_own_floor_and_below():
    """The map names every module of the package, and no import goes up."""
    floor_of, there = floors(), set()
    for path in sorted((ROOT / "paged").rglob("*.py")):
        name = path.relative_to(ROOT / "paged").parts[0].removesuffix(".py")
        if name == "__init__":  # attributes that are imported when they are asked for
            continue
        there.add(name)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = [
            child for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for child in ast.walk(node)
        ]
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node in for_types:
                continue
            package, *rooms = node.module.split(".")
            if package == "paged":
                imported = rooms[:1] or [alias.name for alias in node.names]
                for other in imported:
                    assert floor_of[other] <= floor_of[name], f"{path} imports paged.{other}"
    assert there == set(floor_of), "the map and the package differ"
