"""Where this checkout is published: the address behind the buttons and links of its pages.

It is that of the git remote `origin`, if it lies on GitHub, which Colab can open. A checkout
without one has no such buttons.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REMOTE = re.compile(r"(?:https?://(?:[^@/]+@)?|ssh://git@|git@)"
                    r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?")
BUTTONS = ("use_repository_button", "use_issues_button", "use_edit_page_button")


def web_address(remote: str) -> str | None:
    """The page of a repository by its remote, whatever the protocol; None where there is none."""
    found = REMOTE.fullmatch(remote.strip())
    return f"https://github.com/{found[1]}" if found else None


def git(*arguments: str, root: Path = ROOT) -> str:
    """What git says in a checkout; an empty string where it cannot say anything."""
    try:
        run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


@cache
def address(root: Path = ROOT) -> str | None:
    """The page of this checkout's repository, if it has one."""
    return web_address(git("remote", "get-url", "origin", root=root))


def pages_address(repository: str | None) -> str | None:
    """Where GitHub Pages publishes a repository: an address that ends in a slash."""
    if repository is None:
        return None
    owner, name = repository.rsplit("/", 2)[1:]
    home = f"{owner.lower()}.github.io"
    return f"https://{home}/" if name.lower() == home else f"https://{home}/{name}/"


def point_buttons(options: dict, repository: str | None) -> dict:
    """Options of the theme with buttons that lead to the repository, or with none."""
    if repository:
        return {**options, "repository_url": repository}
    return {**options, **dict.fromkeys(BUTTONS, False)}


def configure(app, config):
    config.html_theme_options = point_buttons(config.html_theme_options, address())


def drop_launch_buttons(app, pagename, templatename, context, doctree):
    """Leave the button to Colab out. (Were the theme not asked for it, it would not write the
    notebooks for the download button either.)"""
    if address() is None:
        context["header_buttons"] = [
            button for button in context.get("header_buttons", [])
            if button.get("label") != "launch-buttons"
        ]


def setup(app):
    app.connect("config-inited", configure, priority=900)
    app.connect("html-page-context", drop_launch_buttons, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
