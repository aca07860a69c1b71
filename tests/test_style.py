"""Protects what a reader of the code relies on: one layout, no lint, types that hold; and that what
runs on GitHub is what the README says.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["paged", "practice", "tests", "book"]


def findings(*command: str, **environment: str) -> str:
    """What a tool prints about this repository, run as a module of this Python; nothing when it is
    content."""
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True,
                         timeout=600, env={**os.environ, **environment})
    return "" if run.returncode == 0 else run.stdout + run.stderr


def test_no_lint():
    found = findings("ruff", "check", "--output-format", "concise", *SOURCES)
    assert not found, f"python -m ruff check:\n{found}"


def test_layout():
    found = findings("yapf", "--diff", "--recursive", "--parallel", *SOURCES)
    command = f"python -m yapf --in-place --recursive {' '.join(SOURCES)}"
    assert not found, f"{command} would do this:\n{found}"


def test_types():
    """Of everything that pyproject.toml names, and of the exercises.

    Their files have the same names in folders that are no package names, so mypy gets copies under
    names that are. The copies lie beside mypy's cache, which knows them by their paths.
    """
    base = ROOT / ".mypy_cache" / "bases"
    copies = base / "exercise_files"
    shutil.rmtree(copies, ignore_errors=True)
    for folder in (ROOT / "practice" / "exercises").iterdir():
        target = copies / f"exercise_{folder.name}"
        target.mkdir(parents=True)
        for file in folder.glob("*.py"):
            shutil.copy(file, target)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (files,) = re.findall(r'^\[tool.mypy\]\nfiles = \[(.*)\]', settings, re.M)
    paths = [path for pattern in re.findall(r'"(.*?)"', files) for path in ROOT.glob(pattern)]
    assert len(paths) > 5
    found = findings("mypy", *map(str, paths), str(copies), MYPYPATH=str(base))
    assert not found, f"python -m mypy:\n{found}"


def command_of(section: str) -> str:
    """The first command of a section of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", readme, re.M | re.S)
    return re.findall(r"^```bash\n(.*?)\n```$", text, re.M | re.S)[0]


def steps_of(workflow: str, job: str) -> tuple[dict, list[str]]:
    """A job of a workflow, and the commands that it runs."""
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text(encoding="utf-8")
    found = yaml.safe_load(text)["jobs"][job]
    return found, [step["run"] for step in found["steps"] if "run" in step]


def test_github_runs_the_readmes_tests_on_every_python():
    job, commands = steps_of("tests", "tests")
    assert commands == [command_of("Test")]
    versions = job["strategy"]["matrix"]["python"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ((first, last),) = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", readme)
    assert versions == [f"3.{minor}" for minor in range(int(first), int(last) + 1)]
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">=3.{first}"' in settings
    assert f'target-version = "py3{first}"' in settings
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()[0]
    assert f"Python 3.{first} to 3.{last}" in pins


def test_github_publishes_what_the_readmes_command_builds():
    job, commands = steps_of("pages", "build")
    assert commands == [command_of("Read")]
    (upload,) = [step for step in job["steps"] if "pages-artifact" in step.get("uses", "")]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`{upload['with']['path']}/index.html`" in readme
    assert steps_of("pages", "publish")[0]["needs"] == "build"
