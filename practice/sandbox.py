"""Runs answers in a child process and turns its end, whatever it was, into a report.

A report is what the terminal prints, what --json prints, and what the tests look at:

    {"passed", "problem": {"sentence", "trace", "printed"} or None,
     "cases": [results of runner.judge], "seconds"}
"""

import json
import linecache
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Seconds a case, seconds until the first case (the import of PyTorch is slow on a cold disk),
# megabytes.
LIMITS = {"python": (5, 20, 512), "torch": (20, 120, 6144), "triton": (60, 180, 8192)}


def run_answers(exercise, answers, seconds=None, on_event=None):
    """Judge the answer files one after the other in one child process; a report for each, in order.

    `seconds` replaces the time limit of a case. `on_event` is called with every event as it
    arrives.
    """
    reports = []
    while len(reports) < len(answers):  # an answer that ends the process ends it for itself only
        reports += _run_child(exercise, answers[len(reports):], seconds, on_event)
    return reports


def _run_child(exercise, answers, seconds, on_event):
    per_case, until_first, memory_mb = LIMITS[exercise.kind]
    per_case = seconds or per_case
    with tempfile.TemporaryDirectory(prefix="practice-", ignore_cleanup_errors=True) as folder:
        orders, faults = Path(folder, "orders.json"), Path(folder, "faults.txt")
        orders.write_text(
            json.dumps({
                "kind": exercise.kind, "memory_mb": memory_mb, "seconds": per_case,
                "starter": exercise.starter, "statement": exercise.statement,
                "tests": exercise.tests, "answers": [str(path)
                                                     for path in answers], "faults": str(faults)
            }), encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, str(HERE / "child.py"),
             str(orders)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=os.name == "posix", env={
                **os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
                "PYTHONSAFEPATH": ""
            })  # child.py imports the files beside it
        lines, errors = queue.Queue(), deque(maxlen=8)  # of an endless stderr, the end is kept
        chunks = iter(lambda: child.stderr.read1(1 << 16), b"")  # type: ignore[union-attr]
        threading.Thread(target=_pump, args=(child.stdout, lines.put), daemon=True).start()
        threading.Thread(target=_pump, args=(chunks, errors.append), daemon=True).start()
        try:
            return _collect(child, lines, per_case, until_first, on_event, faults, errors)
        finally:
            _kill(child)


def _pump(stream, put):
    """Pass a stream on line by line, then None at its end."""
    for line in stream:
        put(line)
    put(None)


def _collect(child, lines, per_case, until_first, on_event, faults, errors):
    """Fold the events of the child into reports, until it ends or a limit is passed."""
    reports, answer, case, call, began = [], "", None, None, time.monotonic()
    deadline = began + until_first

    def stop(sentence, trace=()):
        """The child is gone: the report says what it was doing."""
        if not reports:
            reports.append({"passed": False, "problem": None, "cases": [], "seconds": 0.0})
        end = {"sentence": sentence, "trace": list(trace), "printed": ""}
        if case is None:
            reports[-1]["problem"] = end
        else:
            reports[-1]["cases"].append({
                "case": case, "passed": False, "before": [], "call": call, "printed": "",
                "error": sentence, "trace": list(trace)
            })
        return _finish(reports, began)

    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            _kill(child)
            limit = until_first if not reports else per_case
            return stop(f"no end after {limit:g} seconds: an endless loop, or far too slow",
                        _frames(faults, answer))
        if line is None:
            return stop(*_obituary(child, answer, faults, errors))
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError,
                KeyError):  # half an event, of a child that died, or no event at all
            continue
        if on_event:
            on_event(event)
        del event["event"]
        if kind == "answer":
            reports.append({"passed": False, "problem": None, "cases": [], "seconds": 0.0})
            answer, case, call = event["answer"], None, None
            deadline = time.monotonic() + per_case
        elif kind == "problem":
            reports[-1]["problem"] = event
        elif kind == "case":
            case, call = event["case"], None
            deadline = time.monotonic() + per_case
        elif kind == "step":
            call = event["call"]
        elif kind == "result":
            reports[-1]["cases"].append(event)
            case = None
        elif kind == "end":
            return _finish(reports, began)


def _finish(reports, began):
    for report in reports:
        report["passed"] = report["problem"] is None and all(case["passed"]
                                                             for case in report["cases"])
        report["seconds"] = round((time.monotonic() - began) / len(reports), 2)
    return reports


def _obituary(child, answer, faults, errors):
    """(sentence, learner's frames) for a child that ended before its last case did."""
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "the answer closed the judge's channel", []
    frames = _frames(faults, answer)
    if code == 0:
        said = "the answer ended the whole process (os._exit, perhaps) in the middle of a case"
        return said, frames
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if name == "SIGKILL":
            said = "the system ended the process (SIGKILL): most likely it ran out of memory"
            return said, frames
        return f"the answer crashed the Python process ({name})", frames
    if code > 255:  # Windows says it with a code of its own
        return f"the answer crashed the Python process (0x{code:08X})", frames
    text = b"".join(error for error in errors if error).decode("utf-8", "replace")
    last = f": {text.strip().splitlines()[-1][:300]}" if text.strip() else ""
    return f"the Python process ended with code {code}{last}", frames


def _frames(faults, answer):
    """The learner's frames in what the child wrote about its end, innermost first."""
    linecache.checkcache(answer)  # `watch` has seen earlier versions of it
    text = faults.read_text(encoding="utf-8", errors="replace") if faults.exists() else ""
    found = re.findall(r'File "(.*)", line (\d+) in (.+)', text)
    return [{
        "line": int(line), "function": function, "source": linecache.getline(path,
                                                                             int(line)).strip()
    } for path, line, function in found if path == answer][::-1]


def _kill(child):
    """End the child, and on POSIX whatever it started."""
    try:
        if os.name == "posix":
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    except (ProcessLookupError, PermissionError):
        pass
    child.wait()


def why_not(kind):
    """None when exercises of this kind run on this machine, else one sentence."""
    for name in {"python": (), "torch": ("torch",), "triton": ("torch", "triton")}[kind]:
        if find_spec(name) is None:
            only = name == "triton" and sys.platform != "linux"
            return (f"{name} is not installed in {sys.executable}" +
                    ("; it is published for Linux only" if only else ""))
    return None


def machine():
    """What the exercises find here: versions, and whether kernels run on a GPU or in the
    interpreter."""
    found = {
        "python": platform.python_version(), "system": platform.system(), "torch": None,
        "triton": None, "gpu": None
    }
    for package in ("torch", "triton"):
        if find_spec(package):
            found[package] = version(package)
    if found["torch"]:
        ask = ("import torch; "
               "print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')")
        answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
        found["gpu"] = answer.stdout.strip() or None
    return found
