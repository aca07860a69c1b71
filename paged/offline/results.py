"""A file of results that may end anywhere, and goes on from there.

Each result is a line, written whole and flushed when it is there. If a run is ended by force, the
last line may be cut off: it does not count, and is taken away before the next result is written.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paged.offline.requests import Line

BEGINNING = b'{"id": "batch_req_'


class Results:
    """The results of one file of requests, open for more; a context.

    The file is made if it is not there. Raises ValueError, and changes nothing, where the file
    holds something else, or where another process is writing to it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._done: dict[int, str] = {}  # ids, by line number
        self._file = open(path, "a+b")
        try:
            self._lock()
            self._file.truncate(self._read())
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def has(self, line: Line) -> bool:
        """Whether this line of the requests has its result."""
        return line.number in self._done

    def check(self, lines: Iterable[Line]) -> tuple[int, int]:
        """How many lines there are, and how many have their result. Raises ValueError where a
        result is of a line that is not among them, or was another then."""
        total = found = 0
        for line in lines:
            total += 1
            if self.has(line):
                found += 1
                if self._done[line.number] != line.id:
                    raise ValueError(
                        f"line {line.number} of the requests is not the one that {self.path} has "
                        f"a result of: name another file for the results, or take the line with "
                        f"{BEGINNING.decode()}{self._done[line.number]} out of it")
        if found != len(self._done):
            raise ValueError(f"{self.path} has results of {len(self._done) - found} lines that are "
                             f"not among these requests: name another file for the results")
        return total, found

    def write(self, result: dict[str, Any]) -> None:
        """Add the result of a line."""
        self._file.write(json.dumps(result, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing to {self.path}: wait for it, or name "
                             f"another file") from None

    def _read(self) -> int:
        """Enter what is done; returns the bytes up to the last whole line."""
        self._file.seek(0)
        good = 0
        for at, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):  # only the last one can be cut off
                if raw[:len(BEGINNING)] != BEGINNING[:len(raw)]:
                    raise self._stranger(at)
                break
            try:
                line_id = json.loads(raw)["id"].removeprefix("batch_req_")
                number = int(line_id.partition("-")[0])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise self._stranger(at) from None
            self._done[number] = line_id
            good += len(raw)
        return good

    def _stranger(self, at: int) -> ValueError:
        return ValueError(f"line {at} of {self.path} is no result of a batch: name another file "
                          f"for the results")
