"""The server among clients that leave, dawdle, break off, come in crowds or without a key.

Protects that each request is answered or released, that no block is lost, that nobody waits for
another's slowness or failure, and that nobody gets in, or learns what another has asked.
"""

import asyncio
import json
import random
import socket
import threading
import time

import httpx
import openai
import pytest

from paged.batch import RowOutput
from paged.server.door import Door, Limits
from tests.servers import make_llm, serving

LONG = dict(max_tokens=300, ignore_eos=True, model="tiny", temperature=0)


def body_of(stream: bool, **more) -> bytes:
    return json.dumps(LONG | {"prompt": "abc", "stream": stream} | more).encode()


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def steps_of(server) -> list:
    """Grows with every step that the engine launches."""
    steps, launch = [], server.llm.engine.launch

    def noting(batch):
        steps.append(len(batch.request_ids))
        return launch(batch)

    server.llm.engine.launch = noting
    return steps


# ── those who leave, and those who dawdle ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_gives_back_his_blocks(server, stream):
    steps = steps_of(server)
    connection = server.connect("/v1/completions", body_of(stream, n=2))
    while not steps:
        time.sleep(0.01)
    connection.close()
    server.wait_until_empty()
    assert len(steps) < 200, "it was computed to its end"
    assert server.complete().status_code == 200
    server.wait_until_empty()


def test_who_breaks_off_his_body_is_forgotten(server):
    whole = body_of(False)
    connection = server.connect("/v1/completions", whole[:20], len(whole))
    connection.close()
    server.wait_until_empty()


def test_a_slow_reader_holds_up_nobody():
    """He reads nothing: the socket fills up, and his request waits for him with what it has."""
    with serving(make_llm(max_num_seqs=8)) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        body = body_of(True, logprobs=20, n=4)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                           b"application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answers = [server.complete(f"number {i}", max_tokens=20).json() for i in range(5)]
        assert all(answer["usage"]["completion_tokens"] == 20 for answer in answers)
        read = b""
        while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = connection.recv(1 << 16)
            assert part, "the answer has no end"
            read += part
        connection.close()
        server.wait_until_empty()


def test_who_does_not_read_at_all_has_left():
    """The transport is full for ever: the door and the request wait as long as the limit says."""
    ended = []

    async def app(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended.append(True)

    async def full(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive():
        return {"type": "http.disconnect"}

    door = Door(app, limits=Limits(send_seconds=0.05))
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    asyncio.run(asyncio.wait_for(door(scope, receive, full), 20))
    assert ended == [True] and not door.num_open


# ── crowds ────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_says_when_to_come_again():
    with serving(make_llm(max_num_seqs=2), max_requests=3) as server:
        waiting = [server.connect("/v1/completions", body_of(True, n=n)) for n in (1, 2)]
        while server.server.desk.num_sequences < 3:
            time.sleep(0.01)
        answer = server.complete()
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert server.complete(n=4).status_code == 400  # can never be
        assert server.complete(prompt=["a"] * 4).status_code == 400
        for connection in waiting:
            connection.close()
        server.wait_until_empty()
        assert server.complete().status_code == 200


def test_bodies_too_large_or_too_late():
    limits = Limits(body_bytes=1000, body_seconds=0.2)
    with serving(limits=limits) as server:
        for size, status in ((1000, 200), (1001, 413)):
            body = body_of(False, max_tokens=1).ljust(size)
            for content in (body, iter([body[:500], body[500:]])):  # with its length, and without
                answer = httpx.post(server.url + "/v1/completions", content=content, timeout=60,
                                    headers={"Content-Type": "application/json"})
                assert answer.status_code == status
        assert answer.json()["error"]["code"] == "body_too_large"
        connection = server.connect("/v1/completions", b"{", 100)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        connection.close()
        for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
            answer = httpx.post(server.url + "/v1/completions", content=body_of(False),
                                headers={"Content-Type": kind} if kind else {})
            assert answer.status_code == 415
        server.wait_until_empty()


# ── failures ──────────────────────────────────────────────────────────────────────────────────────

BROKEN = ord("~")  # where this letter is computed, a step fails


def breaking(server, how: str) -> None:
    """From now on steps, or their rows, fail in which the broken letter stands."""
    engine = server.llm.engine
    (token,) = server.llm.tokenizer.encode("~")
    launch = engine.launch

    def launch_or_fail(batch):
        broken = [token in row for row in rows_of(batch)]
        if how == "step" and any(broken):
            raise RuntimeError("a secret of the prompt")
        results = launch(batch)
        return [
            RowOutput([], error="the logits are NaN") if bad else result
            for bad, result in zip(broken, results)
        ]

    engine.launch = launch_or_fail


def rows_of(batch) -> list[list[int]]:
    starts = batch.query_start_loc
    return [batch.input_ids[a:b] for a, b in zip(starts, starts[1:])]


@pytest.mark.parametrize("how", ["step", "row"])
def test_a_failure_reaches_its_own_request(how, caplog):
    with serving() as server:
        good = server.complete("good", max_tokens=30).json()["choices"][0]["text"]
        breaking(server, how)
        answers: dict = {}

        def ask(name: str, prompt: str) -> None:
            answers[name] = server.complete(prompt, max_tokens=30)

        threads = [
            threading.Thread(target=ask, args=(f"{prompt} {i}", prompt)) for i in range(3)
            for prompt in ("good", "bad ~")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, answer in answers.items():
            if name.startswith("good"):
                assert answer.json()["choices"][0]["text"] == good
            else:
                assert answer.status_code == 500
                assert answer.json()["error"]["type"] == "server_error"
                assert answer.json()["error"]["code"] == "engine_failed"
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIError, match="engine has failed"):
            list(client.completions.create(prompt="bad ~", model="tiny", stream=True))
        server.wait_until_empty()
        assert server.complete("good", max_tokens=30).json()["choices"][0]["text"] == good
        assert "secret" not in caplog.text


def test_what_nobody_thought_of_is_an_error_too(server, monkeypatch, caplog):
    monkeypatch.setattr(server.server.desk, "check", None)
    answer = server.complete("a secret")
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    server.wait_until_empty()
    assert "a request has failed" in caplog.text and "secret" not in caplog.text


# ── the end ───────────────────────────────────────────────────────────────────────────────────────


def test_closing_finishes_what_runs_and_refuses_what_comes(server):
    connection = server.connect("/v1/completions", body_of(True))
    while not server.server.desk.num_sequences:
        time.sleep(0.01)
    server.server.door.closing = True
    try:
        for answer in (server.complete(), httpx.get(server.url + "/health")):
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "shutting_down"
        assert httpx.get(server.url + "/metrics").status_code == 200
        read = b""
        while b"[DONE]" not in read:
            part = connection.recv(1 << 16)
            assert part, "it was cut off"
            read += part
        assert read.count(b'"finish_reason":"length"') == 1
    finally:
        server.server.door.closing = False
        connection.close()
    server.wait_until_empty()


# ── all of it at once ─────────────────────────────────────────────────────────────────────────────


async def visit(server, number: int) -> str:
    """One client; says how it went."""
    rng = random.Random(number)
    await asyncio.sleep(4 * rng.random())
    stream, chat = rng.random() < 0.6, rng.random() < 0.5
    text = "system " * rng.randrange(4) + f"question {rng.randrange(20)}"
    body = dict(model="tiny", max_tokens=rng.randrange(1, 24), seed=number, n=rng.choice([1, 1, 2]),
                ignore_eos=True, stream=stream)
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    sent = json.dumps(body).encode()
    manner = rng.choice(["polite"] * 4 + ["leaves", "breaks", "malformed"])
    if manner == "malformed":
        sent = sent[:-rng.randrange(1, len(sent))]
    head = (f"POST /v1/{'chat/' * chat}completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            "application/json\r\nConnection: close\r\nContent-Length: "
            f"{len(sent)}\r\n\r\n").encode()
    for _ in range(200):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            if manner == "breaks":
                writer.write((head + sent)[:rng.randrange(1, len(head) + len(sent))])
                await writer.drain()
                return manner
            writer.write(head + sent)
            if manner == "leaves":
                await asyncio.sleep(rng.random() * 0.3)
                if rng.random() < 0.5:
                    await reader.read(50)
                return manner
            answer = await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()
        if not answer.startswith(b"HTTP/1.1 429"):
            break
        assert b"retry-after" in answer.lower()
        await asyncio.sleep(0.2)
    status = int(answer.split(b" ", 2)[1])
    assert status == (400 if manner == "malformed" else 200), answer
    if manner == "polite":
        assert answer.count(b'"finish_reason":"length"') == body["n"], answer
        assert not stream or answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    return manner


def test_hundreds_of_clients_of_every_kind():
    """A third leaves or breaks off; the pool is too small, so that requests preempt each other."""
    with serving(make_llm(num_blocks=60, max_num_seqs=12, max_num_batched_tokens=64),
                 max_requests=40) as server:

        async def crowd() -> list[str]:
            return await asyncio.gather(*(visit(server, number) for number in range(300)))

        manners = asyncio.run(crowd())
        server.wait_until_empty()
        counts = {manner: manners.count(manner) for manner in set(manners)}
        assert sum(counts.values()) == 300 and counts["leaves"] + counts["breaks"] >= 80, counts
        text = httpx.get(server.url + "/metrics").text
        assert 'paged_requests_refused_total{status="429"}' in text
        assert server.llm.engine.scheduler.num_preemptions > 0
        assert server.complete().status_code == 200
        server.wait_until_empty()
