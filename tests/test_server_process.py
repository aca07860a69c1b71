"""python -m paged serve as a process: what it says, whom it lets in, how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from paged.__main__ import main
from tests.servers import make_loaded

ROOT = Path(__file__).resolve().parents[1]
RUN = """
import sys
import paged.llm
from tests.servers import make_loaded
paged.llm.load = lambda *arguments, **options: make_loaded()
from paged.__main__ import main
sys.exit(main(["serve", "--model", "/models/tiny", "--port", "0", *sys.argv[1:]]))
"""
LONG = {"model": "tiny", "prompt": "abc", "stream": True, "ignore_eos": True, "temperature": 0}


@contextmanager
def process(*options: str, **environment: str):
    """The process, its address, and what it has said until it was ready."""
    run = subprocess.Popen([sys.executable, "-c", RUN, "--num-blocks", "512", *options], cwd=ROOT,
                           stderr=subprocess.PIPE, text=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    said = ""
    try:
        assert run.stderr is not None
        while "at most\n" not in said:
            line = run.stderr.readline()
            assert line, f"it has ended: {said}"
            said += line
        yield run, re.findall(r"at (http://\S+) to", said)[0], said
    finally:
        run.kill()
        run.communicate()


def test_a_signal_lets_what_runs_finish():
    key = "from the environment"
    with process(PAGED_API_KEY=key) as (run, url, said):
        assert "to whoever brings the API key" in said and "model=tiny" in said
        assert "512 blocks of 16 tokens" in said and "512 tokens a request" in said
        assert url.startswith("http://127.0.0.1:")
        headers = {"Authorization": f"Bearer {key}"}
        body = LONG | {"max_tokens": 500}
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 401
        with httpx.stream("POST", url + "/v1/completions", json=body, headers=headers,
                          timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            run.send_signal(signal.SIGTERM)
            refused = None
            while refused is None or refused.status_code != 503:  # the signal is on its way
                refused = httpx.get(url + "/health", timeout=60)
            assert refused.json()["error"]["code"] == "shutting_down"
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" and '"finish_reason":"length"' in "".join(rest)
        out, err = run.communicate(timeout=60)
        assert run.returncode == 0 and err.endswith("ended\n") and "Traceback" not in err, err
        assert "500 generated, length" in err


def test_a_second_signal_does_not_wait():
    with process("--num-blocks", "40", "--grace-period", "600") as (run, url, said):
        assert "without a key" in said
        with httpx.stream("POST", url + "/v1/completions", json=LONG | {"max_tokens": 500},
                          timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            assert json.loads(first.removeprefix("data: "))["object"] == "text_completion"
            run.send_signal(signal.SIGINT)
            while httpx.get(url + "/health", timeout=60).status_code != 503:
                pass
            run.send_signal(signal.SIGINT)
            with pytest.raises(httpx.HTTPError):
                list(lines)
        run.communicate(timeout=60)
        assert run.returncode == 0


def test_the_theatre_is_there_when_asked_for_and_says_what_it_shows(capsys, monkeypatch):
    with process("--theatre", "--api-key", "abc") as (run, url, said):
        assert f"{url}/theatre shows prompts; the API key is the password" in said
        assert httpx.get(url + "/theatre").status_code == 401
        assert httpx.get(url + "/theatre", auth=("", "abc")).status_code == 200
    monkeypatch.setattr("paged.llm.load", lambda *arguments, **options: make_loaded())
    assert main(["serve", "--quiet", "--theatre", "--num-blocks", "4097"]) == 2
    assert "the pool has 4097 blocks, and the theatre shows at most 4096" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "sees everybody's prompts" in " ".join(capsys.readouterr().out.split())


def test_mistakes_are_sentences(capsys, monkeypatch):
    monkeypatch.setattr("paged.llm.load", lambda *arguments, **options: make_loaded())
    for argv, words in ((["--port", "99999"], "--port is 99999: it must be from 0 to 65535"), ([
            "--max-requests", "0"
    ], "--max-requests is 0"), (["--max-model-len",
                                 "9999"], "the model was trained for 512 positions")):
        assert main(["serve", "--quiet", *argv]) == 2
        assert words in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 2
    assert "pip install 'paged[serve]'" in capsys.readouterr().err


def test_help_helps(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    for words in ("/v1/chat/completions", "--api-key", "PAGED_API_KEY", "--max-requests", "SIGTERM",
                  "--num-blocks", "127.0.0.1"):
        assert words in said
