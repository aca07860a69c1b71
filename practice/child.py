"""The process in which answers run: `python child.py ORDERS`, started by `sandbox.py`.

ORDERS is the path of a JSON file: {"kind", "memory_mb", "seconds", "starter", "statement", "tests",
"answers": [paths], "faults": path}. Every event of `runner.judge` leaves as one JSON line on
standard output; what the answer itself writes to the file descriptor of standard output goes
nowhere. A crash in C, or a case that is about to use up its seconds, leaves its traceback in the
file "faults".
"""

import faulthandler
import json
import os
import sys
import threading
import traceback

import runner
from catalog import read_source


def main(orders_path):
    with open(orders_path, encoding="utf-8") as file:
        orders = json.load(file)
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)

    process = os.getpid()

    def send(event):
        if os.getpid() != process:  # a copy that the answer forked: one process judges
            os._exit(0)
        events.write(json.dumps(event) + "\n")
        events.flush()

    faults = open(orders["faults"], "w", encoding="utf-8")
    faulthandler.enable(faults)
    watch = Watch(faults, orders["seconds"])
    if not _prepare(orders["kind"]):
        _limit_memory(orders["kind"], orders["memory_mb"])
    sys.path.pop(0)  # an answer that says `import runner` gets no judge
    del sys.modules["runner"], sys.modules["catalog"]
    for path in orders["answers"]:
        send({"event": "answer", "answer": path})
        watch.restart()
        try:
            source = read_source(path)
        except SyntaxError as error:
            send({"event": "problem", "sentence": str(error), "trace": [], "printed": ""})
            continue
        for event in runner.judge(source, path, orders["starter"], orders["statement"],
                                  orders["tests"]):
            if event["event"] == "case":
                watch.restart()
            send(event)
    send({"event": "end"})
    events.flush()
    os._exit(0)  # not through the threads and exit handlers that an answer may have left behind


class Watch:
    """Writes down where the main thread is, shortly before the parent loses patience with a case.

    A thread of Python's own: faulthandler's watchdog reads frames while they change, and can crash
    on it.
    """

    def __init__(self, file, seconds):
        self.file, self.seconds, self.timer = file, seconds, None

    def restart(self):
        if self.timer is not None:
            self.timer.cancel()
        self.timer = threading.Timer(0.8 * self.seconds, self._write)
        self.timer.daemon = True
        self.timer.start()

    def _write(self):
        self.file.seek(0)
        self.file.truncate()
        main = threading.main_thread().ident
        assert main is not None, "the main thread runs"
        for frame, line in traceback.walk_stack(sys._current_frames()[main]):
            print(f'File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}',
                  file=self.file)
        self.file.flush()


def _prepare(kind):
    """Import the heavy libraries before the first case is timed; whether kernels run on a GPU."""
    if kind == "python":
        return False
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    if kind == "triton":
        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # must be set before the import
        import triton  # noqa: F401
    return kind == "triton" and os.environ.get("TRITON_INTERPRET") != "1"


def _limit_memory(kind, megabytes):
    """Cap the memory of this process, where the system can (Linux; not macOS and Windows).

    Not with a GPU in use: CUDA maps more than any sensible limit.
    """
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not sys.platform.startswith("linux"):
        return  # macOS accepts the limits and does not enforce them
    # Address space counts what is merely reserved, and PyTorch reserves much: there, count private
    # data.
    limit = resource.RLIMIT_AS if kind == "python" else resource.RLIMIT_DATA
    hard = resource.getrlimit(limit)[1]
    size = megabytes << 20
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    resource.setrlimit(limit, (size, hard))


if __name__ == "__main__":
    main(sys.argv[1])
