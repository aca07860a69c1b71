"""Files of requests on a Ray cluster of several workers, one of which is killed.

Protects what `python -m paged batch --ray` promises: the results of one engine, whatever happens to
the processes that compute them.
"""

import asyncio
import json
import threading
import time

import psutil
import pytest
import tokenizers
from tokenizers.models import WordLevel

from paged.__main__ import main
from paged.offline import replicas as replicas_module
from paged.offline.replicas import MOST_LOSSES, Replicas, start_ray
from paged.offline.requests import Line
from paged.offline.run import answer_all
from tests.fake_replica import FakeReplica
from tests.small_models import TINY_LLAMA, huggingface_model

pytest.importorskip("ray", reason="the package ray is not installed")
TEXT = "/v1/completions"
ARGUMENTS = {"device": "cpu"}


@pytest.fixture(scope="module")
def ray():
    ray = start_ray()
    yield ray
    ray.shutdown()


def workers(name):
    """Processes of the actors of this class."""
    found = [child for child in psutil.Process().children(recursive=True)]
    return [child for child in found if f"ray::{name}" in " ".join(child.cmdline())]


def fill(ray, lines, replicas=2, at_once=4, model="fake"):
    """Results of lines by fake replicas, and how often a line was lost."""
    written = []

    async def work():
        several = Replicas(ray, replicas, at_once, model, "fake", ARGUMENTS)
        assert several.num_places == replicas * at_once
        await several.run(answer_all(lines, several.answer, written.append, several.num_places))
        return several.num_lost

    return written, asyncio.run(work())


@pytest.fixture
def fake(ray, monkeypatch):
    monkeypatch.setattr(replicas_module, "Replica", FakeReplica)
    return ray


def test_a_killed_worker_changes_nothing(ray, tmp_path, capsys):
    huggingface_model(TINY_LLAMA).save_pretrained(tmp_path / "model")
    words = {f"t{token} ": token for token in range(TINY_LLAMA.vocab_size)}
    tokenizers.Tokenizer(WordLevel(words, "t0 ")).save(str(tmp_path / "model" / "tokenizer.json"))
    source, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    with open(source, "w", encoding="utf-8") as file:
        for number in range(24):
            body = {
                "prompt": [1 + number % 5, 2, number], "max_tokens": 50, "seed": number,
                "temperature": number % 2, "ignore_eos": True
            }
            request = {"custom_id": f"r{number}", "method": "POST", "url": TEXT, "body": body}
            file.write(json.dumps(request) + "\n")
    killed = []

    def kill_one():
        while len(killed) < 1:
            time.sleep(0.02)
            num_done = results.read_bytes().count(b"\n") if results.exists() else 0
            if num_done >= 4:
                victim = workers("Replica")[0]
                victim.kill()
                killed.append(num_done)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    options = ["--model", str(tmp_path / "model"), "--device", "cpu", "--num-blocks", "100"]
    argv = ["batch", str(source), *options, "--quiet", "--in-flight", "4"]
    assert main([*argv, "-o", str(results), "--ray", "--replicas", "2"]) == 0
    killer.join()
    assert killed[0] < 20 and "workers were lost: " in capsys.readouterr().err
    assert main([*argv, "-o", str(tmp_path / "alone.jsonl")]) == 0
    assert tokens(results) == tokens(tmp_path / "alone.jsonl")
    assert not workers("Replica")


def tokens(path):
    """Of each result; there is one a request."""
    found = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        result = json.loads(text)
        assert result["custom_id"] not in found
        (choice,) = result["response"]["body"]["choices"]
        found[result["custom_id"]] = choice["text"].split()
    assert len(found) == 24 and {len(one) for one in found.values()} == {50}
    return found


def test_lines_are_spread_over_replicas(fake):
    written, num_lost = fill(fake, [Line(n, str(n)) for n in range(40)])
    assert len({result["response"]["body"] for result in written}) == 2 and num_lost == 0
    assert sorted(int(result["id"]) for result in written) == list(range(40))


def test_a_line_that_kills_its_worker_loses_no_other(fake):
    """Not even those that were with the same worker each time."""
    lines = [Line(n, f"batch_req_{n}", body="die" if n == 3 else "") for n in range(30)]
    written, num_lost = fill(fake, lines, at_once=3)
    statuses = {result["id"]: result["response"]["status_code"] for result in written}
    assert len(written) == len(statuses) == 30 and num_lost >= MOST_LOSSES
    (bad,) = (result for result in written if result["response"]["status_code"] != 200)
    assert bad["id"].endswith("batch_req_3") and bad["response"]["status_code"] == 500
    assert "4 workers in a row" in bad["response"]["body"]["error"]["message"]


def test_an_engine_that_fails_says_why(fake):
    lines = [Line(n, f"batch_req_{n}", body="fail" if n == 3 else "") for n in range(8)]
    written, _ = fill(fake, lines)
    (bad,) = (result for result in written if result["response"]["status_code"] != 200)
    assert bad["response"]["body"]["error"][
        "message"] == "the engine has failed at this request: too hard"


def test_a_replica_that_cannot_be_made_ends_the_run(fake):
    with pytest.raises(ValueError, match="a replica could not be made: .*no such model$"):
        fill(fake, [Line(1, "1")], model="broken")
