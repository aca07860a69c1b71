"""The page at /theatre: what the engine did in its last steps, where the server was asked to keep
them.

Protects that nobody sees prompts who may not, that a server that was not asked records nothing,
that what is kept does not grow, and that the page shows what the engine did.
"""

import base64
import html
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from paged.engine import Engine, EngineConfig
from paged.lab.oracle import OracleRunner, RunAheadOracle
from paged.lab.theatre import LastSteps, page, states
from paged.sampling import SamplingParams
from paged.server.theatre import STEPS
from tests.servers import make_llm, serving
from tests.test_theatre import as_recorded, seen_directly


def say(shown: str) -> list[str]:
    """The sentences of a page."""
    return [html.unescape(text) for text in re.findall("<li>(.*?)</li>", shown)]


def test_off_by_default_and_then_nothing_is_recorded():
    with serving() as server:
        runner = server.llm.runner
        assert httpx.get(server.url + "/theatre").status_code == 404
        server.complete("abc")
        engine = server.llm.engine
        assert engine.runner is runner and engine.launch == runner.execute
        assert not engine.trace.limit


def test_the_page_shows_the_prompts_and_answers_of_the_last_steps():
    with serving(theatre=True) as server:
        first = httpx.get(server.url + "/theatre")
        assert first.status_code == 200 and first.headers["cache-control"] == "no-store"
        assert say(first.text) == ["Nothing has run yet. This is the engine as it waits."]
        answer = server.complete("no <script>alert(1)</script>", max_tokens=5).json()
        assert answer["usage"]["completion_tokens"] == 5
        shown = httpx.get(server.url + "/theatre").text
        told = say(shown)
        assert told[0] == "The engine before its first step."
        assert any(text.startswith("0 arrives with 28 prompt tokens") for text in told)
        assert told[-1].startswith("Step 5 is over"), "the picture is as new as the answer"
        assert "Steps 1 to 5 of this server" in shown and 'href="theatre"' in shown
        assert shown.count("<script>") == 1 and shown.count("</script>") == 1
        assert not re.search(r"(?:src|href)=\"(?!theatre\")", shown), "it needs nothing else"
        server.complete("xyz", max_tokens=STEPS)
        server.wait_until_empty()
        told = say(httpx.get(server.url + "/theatre").text)
        assert told[0].startswith(f"The last {STEPS} steps.")
        assert not any(text.startswith("0 ") for text in told), "the first request is forgotten"


def test_the_theatre_asks_for_the_key():
    with serving(theatre=True, keys=["first", "sécond"]) as server:
        url = server.url + "/theatre"

        def basic(text: str) -> str:
            return f"Basic {base64.b64encode(text.encode()).decode()}"

        for sent in (None, "Bearer wrong", basic("first:wrong"), basic("first"), "Basic first",
                     "Basic", "Basic \xff", basic("a:first:"), "Digest first"):
            headers = {} if sent is None else {"Authorization": sent.encode("latin-1")}
            answer = httpx.get(url, headers=headers)
            assert answer.status_code == 401, sent
            assert answer.headers["www-authenticate"].startswith("Basic "), "a browser asks"
        for key in ("first", "sécond"):
            bearer = httpx.get(url, headers={"Authorization": f"Bearer {key}".encode()})
            assert bearer.status_code == 200
            for name in ("", "anybody"):
                given = {"Authorization": basic(f"{name}:{key}")}
                assert httpx.get(url, headers=given).status_code == 200
                assert httpx.get(server.url + "/v1/models", headers=given).status_code == 401


def test_a_pool_that_nobody_can_look_at_is_refused():
    with make_llm(num_blocks=5000) as llm, pytest.raises(ValueError, match="5000 .* at most 4096"):
        with serving(llm, theatre=True):
            pass


def test_pictures_taken_while_it_runs_disturb_nobody():
    with serving(make_llm(num_blocks=64), theatre=True) as server:
        wanted = [server.complete("ab" * n, max_tokens=30).json()["choices"] for n in range(1, 7)]
        with ThreadPoolExecutor(8) as threads:
            answers = [
                threads.submit(server.complete, "ab" * n, max_tokens=30) for n in range(1, 7)
            ]
            while not all(answer.done() for answer in answers):
                shown = httpx.get(server.url + "/theatre", timeout=60)
                assert shown.status_code == 200 and "Wrong:" not in shown.text
                time.sleep(0.01)
        assert [answer.result().json()["choices"] for answer in answers] == wanted
        server.wait_until_empty()


@pytest.mark.parametrize("runner", [OracleRunner, RunAheadOracle])
@pytest.mark.parametrize("options", [{}, {"preemption": "swap"}, {"prefix_cache": "radix"}])
def test_what_is_kept_is_the_engines_and_does_not_grow(runner, options):
    """Requests come, go, are preempted and given up, for many times the steps that are kept."""
    draw, steps = random.Random(1), 6
    config = EngineConfig(num_blocks=12, block_size=2, max_num_seqs=4, max_num_batched_tokens=9,
                          **options)
    recorder = LastSteps(steps)
    engine = Engine(config, runner(12, 2, 12))
    recorder.watch(engine)
    seen, sizes, known = {}, [], []
    while recorder.step < 80:
        if draw.random() < 0.5 and len(engine.scheduler.waiting) < 4:
            prompt = draw.choices(range(3), k=draw.randint(1, 9))
            engine.add_request(
                prompt, SamplingParams(n=draw.randint(1, 2), seed=0, max_tokens=draw.randint(1, 8)))
        queued = engine.scheduler.running + engine.scheduler.waiting
        if draw.random() < 0.1 and queued:
            engine.abort(draw.choice(queued).output.request_id)
        if not engine.has_unfinished():
            continue
        engine.step()
        seen[recorder.step] = seen_directly(engine)
        if recorder.step % 5:
            continue
        recording = json.loads(json.dumps(recorder.told(recorder.copied("Now", "", "now"))))
        assert len(say(page([recording], "Now"))) == len(recording["beats"])
        beats, kept = recording["beats"], list(states(recording))
        assert beats[0]["event"] == "KEPT" and beats[-1]["step"] == recorder.step
        assert beats[1]["step"] > recorder.step - steps
        assert not any(beat["fields"].get("wrong") for beat in beats)
        for here, after, state in zip(beats, beats[1:], kept):
            if here["event"] == "STEP" and after["event"] != "STATE_TRANSITION":
                want = seen[here["step"]]
                assert as_recorded(state) == want | {"known": as_recorded(state)["known"]}
        assert as_recorded(kept[-1]) == seen[recorder.step]
        sizes.append(len(json.dumps(beats)))
        known.append(len(recorder._known))
    assert len(sizes) > 12 and max(sizes[8:]) < 2 * max(sizes[:8])
    assert max(known[8:]) < 2 * max(known[:8]) and len(recorder.events) <= 1


@pytest.mark.book
def test_in_a_browser_under_its_policy(browser):
    """The page's script runs, and nothing else would; a key is asked for as a password."""
    with serving(theatre=True, keys=["open"]) as server:
        server.complete("abc", key="open")
        context = browser.new_context(http_credentials={"username": "", "password": "open"})
        shown, wrong = context.new_page(), []
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("console", lambda line: line.type == "error" and wrong.append(line.text))
        shown.goto(server.url + "/theatre")
        assert shown.is_visible(".transport") and not shown.is_visible(".static")
        count = shown.inner_text(".count")
        assert count.startswith("step 6"), "it opens where the engine is"
        shown.focus(".paged-theatre")
        shown.keyboard.press("ArrowRight")
        assert shown.inner_text(".count") != count and "#theatre/now/" in shown.url
        server.post("/v1/completions", key="open", model="tiny", prompt="abcdef",
                    max_tokens=STEPS + 4, ignore_eos=True)
        shown.click("text=Take a new picture")
        last = f"step {6 + STEPS + 4} ·"
        shown.wait_for_function(
            f"document.querySelector('.count').textContent.startsWith({last!r})")
        assert shown.locator(".map thead th").count() == STEPS + 1, "the steps that are kept"
        assert [text for text in wrong if "401" not in text] == []
        context.close()
