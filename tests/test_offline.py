"""Files of requests: results as a server's, a bad line's error, and a file of results that may be
cut off anywhere.

Protects `python -m paged batch`: nothing is lost, nothing is computed twice.
"""

import asyncio
import json
from contextlib import suppress

import pytest

from paged.__main__ import main
from paged.offline import requests as requests_module
from paged.offline.requests import Line, read_requests
from paged.offline.results import Results
from paged.offline.run import MOST_FAILURES, answer_all
from tests.test_llm import loaded  # noqa: F401 - a fixture
from tests.test_main import tiny  # noqa: F401 - a fixture

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OPTIONS = ["--num-blocks", "40", "--block-size", "4", "--device", "cpu", "--quiet"]


def line(name, body, path=TEXT, **other):
    return json.dumps({"custom_id": name, "method": "POST", "url": path, "body": body, **other})


def greedy(prompt, max_tokens=4):
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


GOOD = [line(f"r{i}", greedy(prompt)) for i, prompt in enumerate(["abc", "b", "cab", "de", "fgh"])]


@pytest.fixture
def answered(tmp_path, tiny, monkeypatch):  # noqa: F811
    """Runs the command over some lines; the results, and how many lines went to the engine."""
    from paged.async_llm import AsyncLLM
    engine_run = AsyncLLM.run

    def run(lines, *options, name="results.jsonl"):
        calls = []

        async def counted(self, checked):
            calls.append(checked)
            return await engine_run(self, checked)

        monkeypatch.setattr(AsyncLLM, "run", counted)
        source, target = tmp_path / "requests.jsonl", tmp_path / name
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        status = main(["batch", str(source), "-o", str(target), *OPTIONS, *options])
        return status, read(target) if status == 0 else [], len(calls)

    run.folder = tmp_path
    return run


def read(path):
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def texts(results):
    return {
        result["custom_id"]: result["response"]["body"]["choices"][0]["text"]
        for result in results
    }


def test_results_are_those_of_a_server(answered, loaded):  # noqa: F811
    from paged import LLM, SamplingParams
    chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "temperature": 0}
    status, results, calls = answered([*GOOD, line("chat", chat, CHAT)])
    assert (status, calls, len(results)) == (0, 6, 6)
    by_name = {result["custom_id"]: result for result in results}
    llm = LLM(loaded, device="cpu", block_size=4, num_blocks=40)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for text in GOOD:
        asked = json.loads(text)
        result = by_name[asked["custom_id"]]
        assert set(result) == {"id", "custom_id", "response", "error"} and result["error"] is None
        response = result["response"]
        assert response["status_code"] == 200 and response["body"]["object"] == "text_completion"
        (want,) = llm.generate(asked["body"]["prompt"], params, use_tqdm=False)
        assert response["body"]["choices"][0]["text"] == want.outputs[0].text
        assert response["body"]["usage"]["completion_tokens"] == 4
    body = by_name["chat"]["response"]["body"]
    assert body["object"] == "chat.completion"
    (want,) = llm.chat(chat["messages"], SamplingParams(max_tokens=4, temperature=0),
                       use_tqdm=False)
    message = body["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", want.outputs[0].text)
    assert len({result["id"] for result in results}) == 6


@pytest.mark.parametrize("bad, words", [("nonsense", "no JSON"), ("[1]", "no JSON object"),
                                        ("{" * 5000, "no JSON"), (line("", {}), "custom_id"),
                                        (line(3, {}), "custom_id"),
                                        (line("r1", greedy("a")), "that of line 2 already"),
                                        (line("x", {}, "/v1/embeddings"), "url"),
                                        (line("x", {}, None), "url"),
                                        (line("x", {}, more=1), "more"),
                                        ('{"custom_id": "x", "url": "/v1/completions"}', "method")])
def test_a_bad_line_has_its_error_and_the_others_go_on(answered, bad, words):
    status, results, calls = answered([*GOOD[:3], "", bad, *GOOD[3:]])
    (error,) = (result for result in results if result["error"] is not None)
    assert (status, calls, len(results)) == (0, 5, 6)
    assert error["response"] is None and error["id"].startswith("batch_req_5-")
    assert error["error"]["code"] == "invalid_line" and words in error["error"]["message"]
    assert "line 5" in error["error"]["message"]


def test_a_body_that_cannot_be_served_is_answered_as_a_server_would(answered):
    bad = [
        line("a", {"prompt": "abc", "top_p": 3}),
        line("b", {"prompt": "abc", "nonsense": 1}),
        line("c", greedy("a" * 200)),
        line("d", {"prompt": "abc", "stream": True}),
        line("e", "abc"),
        line("f", {"prompt": "abc", "model": "gpt"}),
        line("g", {"prompt": "abc", "temperature": float("nan")})
    ]
    _, results, _ = answered([*GOOD, *bad])
    found = {result["custom_id"]: result["response"] for result in results}
    statuses = {name: response["status_code"] for name, response in found.items()}
    assert statuses == dict.fromkeys(
        ("r0", "r1", "r2", "r3", "r4"),
        200) | {"a": 400, "b": 400, "c": 400, "d": 400, "e": 400, "f": 404, "g": 400}
    params = {name: found[name]["body"]["error"]["param"] for name in "abcdfg"}
    assert params == {
        "a": "top_p", "b": "nonsense", "c": "prompt", "d": "stream", "f": "model",
        "g": "temperature"
    }
    assert all(result["error"] is None for result in results)


def test_goes_on_wherever_the_file_ends(answered):
    """Whole lines are kept as they are, and only the others go to the engine."""
    _, results, _ = answered(GOOD)
    whole = (answered.folder / "results.jsonl").read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 1, ends[0] - 1, ends[0], ends[1] + 1, ends[2] + 200, ends[-1] - 1, ends[-1]):
        path = answered.folder / "cut.jsonl"
        path.write_bytes(whole[:cut])
        status, again, calls = answered(GOOD, name="cut.jsonl")
        kept = sum(end <= cut for end in ends)
        assert (status, calls, len(again)) == (0, len(GOOD) - kept, len(GOOD)), cut
        assert again[:kept] == results[:kept] and texts(again) == texts(results)


def test_errors_are_not_tried_again_and_new_lines_are(answered):
    bad = ["nonsense", line("r0", greedy("a")), line("p", {"prompt": "abc", "top_p": 3})]
    _, first, calls = answered([*GOOD, *bad])
    assert calls == 5
    status, again, calls = answered([*GOOD, *bad, line("new", greedy("x"))])
    assert (status, calls) == (0, 1) and again[:-1] == first
    assert again[-1]["custom_id"] == "new"


def test_an_interruption_leaves_a_file_that_goes_on(answered, monkeypatch, capsys):
    write = Results.write
    count = []

    def interrupted(self, result):
        write(self, result)
        count.append(result)
        if len(count) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Results, "write", interrupted)
    assert answered(GOOD, "--in-flight", "2")[0] == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    kept = read(answered.folder / "results.jsonl")
    assert 2 <= len(kept) < 5
    monkeypatch.setattr(Results, "write", write)
    status, results, calls = answered(GOOD)
    assert (status, calls, len(texts(results))) == (0, 5 - len(kept), 5)


@pytest.mark.parametrize("content", [
    b"some notes", b"some notes\n", b'{"a": 1}\n', b'{"id": 3}\n', b'{"id": "x"}\n', b"\x00\x00\n"
])
def test_a_file_of_something_else_stays_as_it_is(answered, content, capsys):
    path = answered.folder / "results.jsonl"
    path.write_bytes(content)
    source = answered.folder / "requests.jsonl"
    source.write_text("\n".join(GOOD), encoding="utf-8")
    assert main(["batch", str(source), "-o", str(path), *OPTIONS]) == 2
    assert "is no result of a batch" in capsys.readouterr().err and path.read_bytes() == content
    assert main(["batch", str(source), "-o", str(source), *OPTIONS]) == 2
    assert source.read_text(encoding="utf-8") == "\n".join(GOOD)


def test_results_of_other_requests_are_refused(answered, capsys):
    answered(GOOD)
    path = answered.folder / "results.jsonl"
    before = path.read_bytes()
    for lines, words in (([*GOOD[:2], line("r2", greedy("z")),
                           *GOOD[3:]], "line 3"), (GOOD[:3], "2 lines that are not among")):
        (answered.folder / "requests.jsonl").write_text("\n".join(lines), encoding="utf-8")
        argv = ["batch", str(answered.folder / "requests.jsonl"), "-o", str(path), *OPTIONS]
        assert main(argv) == 2
        assert words in capsys.readouterr().err and path.read_bytes() == before


def test_two_processes_do_not_write_to_one_file(answered, capsys):
    answered(GOOD)
    with Results(answered.folder / "results.jsonl"):
        assert answered(GOOD)[0] == 2
    assert "another process is writing" in capsys.readouterr().err
    assert answered(GOOD)[0] == 0


def test_options_are_checked(answered, capsys):
    for option, words in ((("--in-flight", "0"), "--in-flight"),
                          (("--replicas", "0"), "--replicas"), (("--replicas", "2"), "add --ray")):
        assert answered(GOOD, *option)[0] == 2
        assert words in capsys.readouterr().err
    assert main(["batch", "nowhere.jsonl", "-o", str(answered.folder / "x"), *OPTIONS]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    assert not list(answered.folder.glob("x"))


def test_no_more_lines_are_read_than_are_under_way(monkeypatch):
    """A file may be longer than memory."""
    taken, under_way, most = [], 0, 0

    def lines():
        for number in range(1, 31):
            taken.append(number)
            yield Line(number, str(number))

    async def answer(line):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        assert len(taken) - len(written) <= 4
        await asyncio.sleep(0.001 * (line.number % 3))
        under_way -= 1
        return {"id": line.id, "response": {"status_code": 200}}

    written: list[dict] = []
    asyncio.run(answer_all(lines(), answer, written.append, 4))
    assert sorted(int(result["id"]) for result in written) == list(range(1, 31)) and most == 4


@pytest.mark.parametrize("num_at_once", [1, 5, 40])
def test_an_engine_that_fails_at_everything_ends_the_run(num_at_once):
    """Its lines have no result, and can be tried again."""
    written: list[dict] = []

    async def answer(line):
        await asyncio.sleep(0)
        if line.number > 10:
            raise RuntimeError("the card is gone")
        return {"id": line.id, "response": {"status_code": 200}}

    lines = [Line(number, str(number)) for number in range(1, 100)]
    with pytest.raises(RuntimeError, match="the card is gone"):
        asyncio.run(answer_all(lines, answer, written.append, num_at_once))
    assert sorted(int(result["id"]) for result in written) == list(range(1, 11))


@pytest.mark.parametrize("failures, num_written", [(MOST_FAILURES - 1, MOST_FAILURES + 1),
                                                   (MOST_FAILURES, 1)])
def test_so_many_failures_in_a_row_are_the_engines(failures, num_written):
    written: list[dict] = []

    async def answer(line):
        if 1 < line.number <= failures + 1:
            raise RuntimeError("gone")
        return {"id": line.id, "response": {"status_code": 200}}

    lines = [Line(number, str(number)) for number in range(1, failures + 3)]
    with suppress(RuntimeError):
        asyncio.run(answer_all(lines, answer, written.append, 1))
    assert len(written) == num_written


def test_nobody_goes_on_when_the_run_has_failed():
    written: list[dict] = []

    async def answer(line):
        if line.number <= MOST_FAILURES:
            raise RuntimeError("gone")
        await asyncio.sleep(0.01)
        return {"id": line.id, "response": {"status_code": 200}}

    lines = [Line(number, str(number)) for number in range(1, 2 * MOST_FAILURES)]
    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(answer_all(lines, answer, written.append, 2))
    assert written == []


def test_a_line_at_which_the_engine_fails_has_its_error():
    written: list[dict] = []

    async def answer(line):
        if line.number % 20 == 0:
            raise RuntimeError("too hard")
        return {"id": f"batch_req_{line.id}", "response": {"status_code": 200}}

    lines = [Line(number, str(number)) for number in range(1, 20 * MOST_FAILURES + 1)]
    asyncio.run(answer_all(lines, answer, written.append, 3))
    assert len(written) == len(lines)
    failed = [result for result in written if result["response"]["status_code"] == 500]
    assert len(failed) == MOST_FAILURES
    assert failed[0]["response"]["body"]["error"][
        "message"] == "the engine has failed at this request: too hard"


def test_windows_lines_and_a_mark_of_byte_order_are_read(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(("\ufeff" + "\r\n".join(GOOD[:2]) + "\r\n").encode())
    found = list(read_requests(path))
    assert [one.custom_id for one in found] == ["r0", "r1"]
    assert all(one.problem is None for one in found)
    path.write_bytes(b"\xff\xfe\n")
    (bad,) = requests_module.read_requests(path)
    assert bad.problem is not None and "no JSON" in bad.problem
