"""One engine and many callers: threads, tasks, interruptions and failures.

Protects that every caller gets what he would get alone, that a failure reaches the request that it
belongs to and no other, and that nothing is left behind. Threads switch a thousand times as often
here as they usually do.
"""

import asyncio
import gc
import linecache
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from queue import SimpleQueue

import pytest

from paged import LLM, AsyncLLM, Engine, EngineConfig, SamplingParams
from paged.batch import RowOutput
from paged.call import Call, Checked
from paged.lab.oracle import OracleRunner, RunAheadOracle, truth
from paged.models.decoder import random_decoder
from paged.models.loader import Loaded
from paged.owner import Owner
from tests.small_models import TINY_LLAMA
from tests.test_llm import Letters

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BROKEN = 99  # a prompt with this token makes a step fail


@pytest.fixture(autouse=True)
def hurried_threads():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def in_threads(*functions) -> list:
    """What each function returns, all run at once; what one of them raises."""
    results: list = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index](), None
        except BaseException as error:
            results[index] = None, error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a caller waits for ever"
    for _, error in results:
        if error is not None:
            raise error
    return [result for result, _ in results]


def check_empty(owner: Owner) -> None:
    """Nothing is left: no request, no caller, every block free."""
    engine = owner.engine

    def check() -> None:
        engine.check_integrity()
        assert not engine.has_unfinished() and not owner._watched and not owner._asking
        assert not owner._suspects and engine.block_pool.num_free() == engine.config.num_blocks

    in_threads(lambda: owner.do(check))


# ── the owner, over the oracle ────────────────────────────────────────────────────────────────────


class Bytes:

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token])


KINDS = pytest.mark.parametrize("kind", [
    dict(),
    dict(preemption="swap"),
    dict(prefix_cache="radix"),
    dict(runner_class=RunAheadOracle)
], ids=["recompute", "swap", "radix", "ahead"])


def make_owner(runner_class=OracleRunner, num_blocks=12, tokenizer=None, **config) -> Owner:
    """An owner whose engine is tight: chunks, shared prefixes, preemption."""
    config = EngineConfig(num_blocks=num_blocks, block_size=2, max_num_seqs=4,
                          max_num_batched_tokens=7, **config)
    return Owner(Engine(config, runner_class(num_blocks, 2, num_blocks), tokenizer))


def generate(owner: Owner, *requests: tuple) -> list:
    """The ended News of (prompt, params) requests, in order."""
    box: SimpleQueue = SimpleQueue()
    checked = [
        Checked(None, owner.engine.check_request(prompt, params), params)
        for prompt, params in requests
    ]
    call = Call(owner, checked, box.put)
    try:
        call.start()
        return sorted((box.get() for _ in requests), key=lambda news: news.place)
    finally:
        call.close()


def stream(owner: Owner, prompt: list[int], params: SamplingParams, at_most: int = 1000) -> list:
    """The tokens of each snapshot, of the first so many."""
    box: SimpleQueue = SimpleQueue()
    call = Call(owner, [Checked(None, prompt, params)], box.put, partial=True)
    seen = []
    try:
        call.start()
        while True:
            output = call.next_output(box.get())
            seen.append(output.outputs[0].token_ids)
            if output.finished or len(seen) == at_most:
                return seen
            call.ask()
    finally:
        call.close()


def prompts(seed: int, number: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3) for _ in range(rng.randrange(1, 9))] for _ in range(number)]


@KINDS
def test_every_caller_gets_his_own(kind):
    owner = make_owner(**kind)

    def generates(seed: int) -> None:
        for prompt, other in zip(prompts(seed, 5), prompts(-seed, 5)):
            two = replace(PARAMS, n=2)
            first, second = generate(owner, (prompt, PARAMS), (other, two))
            assert first.output.outputs[0].token_ids == truth(prompt, 6)
            assert [c.token_ids
                    for c in second.output.outputs] == [truth(other, 6),
                                                        truth(other, 6, 1)]

    def streams(seed: int) -> None:
        for prompt in prompts(seed, 6):
            seen = stream(owner, prompt, PARAMS)
            assert seen[-1] == truth(prompt, 6)
            assert all(seen[-1][:len(tokens)] == tokens for tokens in seen)
            assert sorted(set(map(len, seen))) == list(map(len, seen))

    def leaves_early(seed: int) -> None:
        for prompt in prompts(seed, 8):
            (tokens, *_) = stream(owner, prompt, PARAMS, at_most=1)
            assert tokens == truth(prompt, 6)[:len(tokens)]

    def aborts(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            owner.do(owner.abort, f"nobody's {rng.random()}")

    in_threads(*(lambda f=f, seed=seed: f(seed) for seed in range(1, 4)
                 for f in (generates, streams, leaves_early, aborts)))
    check_empty(owner)
    owner.close()


def test_abort_reaches_the_caller_of_that_request_only():
    owner, params = make_owner(), replace(PARAMS, max_tokens=15)
    stop = threading.Event()

    def aborts() -> None:
        while not stop.is_set():
            owner.do(lambda: [owner.abort(name) for name in list(owner._watched)[:1]])

    aborter = threading.Thread(target=aborts)
    aborter.start()
    reasons = []

    def generates(seed: int) -> None:
        for prompt in prompts(seed, 6):
            (news,) = generate(owner, (prompt, params))
            (completion,) = news.output.outputs
            reasons.append(completion.finish_reason)
            wanted = truth(prompt, 15)
            assert completion.token_ids == wanted[:len(completion.token_ids)]
            assert completion.finish_reason == "abort" or completion.token_ids == wanted

    try:
        in_threads(*(lambda seed=seed: generates(seed) for seed in range(4)))
    finally:
        stop.set()
        aborter.join()
    assert "abort" in reasons
    check_empty(owner)


def test_nobody_steps_for_a_caller_who_does_not_wait():
    owner, steps = make_owner(), []
    launch = owner.engine.launch
    owner.engine.launch = lambda batch: steps.append(batch) or launch(batch)
    box: SimpleQueue = SimpleQueue()
    call = Call(owner, [Checked(None, [1, 2], PARAMS)], box.put, partial=True)
    call.start()
    box.get()
    owner.do(lambda: None)
    before, used = len(steps), time.process_time()
    time.sleep(0.05)
    assert len(steps) == before <= 2 and time.process_time() - used < 0.04  # asleep, not waiting
    call.close()
    check_empty(owner)


def test_what_is_there_is_given_without_a_step():
    owner, steps, boxes = make_owner(), [], [SimpleQueue(), SimpleQueue()]
    launch = owner.engine.launch
    owner.engine.launch = lambda batch: steps.append(batch) or launch(batch)
    calls = [Call(owner, [Checked(None, [1, 2], PARAMS)], box.put, partial=True) for box in boxes]
    owner.do(lambda: [owner.add(call) for call in calls])
    first = boxes[0].get()
    for _ in range(3):
        boxes[1].get()
        calls[1].ask()
    boxes[1].get()
    owner.do(lambda: None)
    before = len(steps)
    calls[0].ask()
    second = boxes[0].get()
    owner.do(lambda: None)
    assert len(steps) == before
    lengths = [len(news.output.outputs[0].token_ids) for news in (first, second)]
    assert lengths[1] >= lengths[0] + 3
    for call in calls:
        call.close()
    check_empty(owner)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


def fails_where(owner: Owner, fails) -> None:
    """Have the owner's runner raise at the batches for which `fails` is true."""
    launch = owner.engine.launch

    def launch_or_fail(batch):
        if fails(batch):
            raise RuntimeError("this batch fails")
        return launch(batch)

    owner.engine.launch = launch_or_fail


@KINDS
@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_request_that_makes_steps_fail_ends_with_the_error_and_alone(kind, place):
    owner, failures = make_owner(**kind), []

    def fails(batch) -> bool:
        if BROKEN in batch.input_ids:
            failures.append(batch.request_ids)
        return BROKEN in batch.input_ids

    fails_where(owner, fails)
    wanted = prompts(place, 6)
    asked = [(prompt, PARAMS) for prompt in wanted]
    asked.insert(place, ([1, 2, BROKEN, 1], replace(PARAMS, n=2)))
    news = generate(owner, *asked)
    failed = news.pop(place)
    assert str(failed.error) == "this batch fails"
    assert len(failures) == 2 and len(failures[1]) == 1  # in company, and alone
    assert [(c.finish_reason, c.error)
            for c in failed.output.outputs] == [("error", "this batch fails")] * 2
    assert [one.error for one in news] == [None] * 6
    assert [one.output.outputs[0].token_ids for one in news] == [truth(p, 6) for p in wanted]
    check_empty(owner)


@KINDS
def test_many_callers_and_one_who_fails(kind):
    owner = make_owner(**kind)
    fails_where(owner, lambda batch: BROKEN in batch.input_ids)

    def breaks() -> None:
        for _ in range(3):
            (news,) = generate(owner, ([2, BROKEN], PARAMS))
            assert news.error is not None
            with pytest.raises(RuntimeError, match="this batch fails"):
                stream(owner, [2, BROKEN], PARAMS)

    def works(seed: int) -> None:
        for prompt in prompts(seed, 4):
            assert stream(owner, prompt, PARAMS)[-1] == truth(prompt, 6)
            (news,) = generate(owner, (prompt, PARAMS))
            assert news.output.outputs[0].token_ids == truth(prompt, 6) and news.error is None

    in_threads(breaks, *(lambda seed=seed: works(seed) for seed in range(4)), breaks)
    check_empty(owner)


@KINDS
def test_steps_that_fail_whenever_requests_share_them_cost_time_only(kind):
    owner = make_owner(**kind)
    fails_where(owner, lambda batch: len(batch.request_ids) > 1)
    wanted = prompts(1, 6)
    news = generate(owner, *((prompt, PARAMS) for prompt in wanted))
    assert [one.output.outputs[0].token_ids for one in news] == [truth(p, 6) for p in wanted]
    check_empty(owner)


@KINDS
@pytest.mark.parametrize("share", [0.1, 0.5, 1])
def test_whatever_fails_everybody_hears_the_end(kind, share):
    owner, rng = make_owner(**kind), random.Random(7)
    fails_where(owner, lambda batch: rng.random() < share)
    wanted = prompts(2, 12)
    for prompt, (_, output, error) in zip(wanted, generate(owner, *((p, PARAMS) for p in wanted))):
        tokens = output.outputs[0].token_ids
        assert tokens == truth(prompt, 6)[:len(tokens)]
        assert (len(tokens) == 6) == (error is None) and output.finished
    check_empty(owner)


@KINDS
def test_a_token_without_text_fails_its_request_and_no_other(kind):
    """And the text of the others is whole, though their steps failed on the way."""

    class Holey(Bytes):

        def token_bytes(self, token):
            return {0: b"\xc3", 1: b"\xa9", 2: b"b"}[token]  # 3 is no token

    owner, wanted = make_owner(tokenizer=Holey(), **kind), prompts(3, 24)
    news = generate(owner, *((prompt, replace(PARAMS, logprobs=1)) for prompt in wanted))
    for prompt, (_, output, error) in zip(wanted, news):
        (completion,), tokens = output.outputs, truth(prompt, 6)
        good = tokens[:tokens.index(3)] if 3 in tokens else tokens
        assert completion.token_ids == good and len(completion.logprobs) == len(good)
        assert completion.text == b"".join(map(Holey().token_bytes, good)).decode(errors="replace")
        assert (type(error) is KeyError) == (3 in tokens)
    assert 0 < sum(one.error is not None for one in news) < 24
    check_empty(owner)


def test_each_suspect_runs_alone_once():
    owner, steps = make_owner(), []

    def fails(batch) -> bool:
        steps.append([int(name) for name in batch.request_ids])
        return 1 in steps[-1]

    fails_where(owner, fails)
    news = generate(owner, *(([token], PARAMS) for token in range(3)))
    assert [one.error is None for one in news] == [True, False, True]
    assert steps[:4] == [[0, 1, 2], [0], [1], [2]] and steps[4:] == [[0, 2]] * 5
    check_empty(owner)


def test_aborting_all_that_a_failure_left_to_try_lets_others_run():
    owner, steps = make_owner(), []

    def fails_once(batch) -> bool:
        steps.append(batch)
        if len(steps) == 2:  # the first of them runs alone, and has a chunk of its prompt
            assert len(batch.request_ids) == 1
            for name in list(owner._watched):
                owner.post(owner.abort, name)
        return len(steps) == 1

    fails_where(owner, fails_once)
    long = [1] * 9
    news = generate(owner, ([2], PARAMS), (long, PARAMS), ([0], PARAMS))
    assert [one.output.outputs[0].finish_reason for one in news] == ["abort"] * 3
    check_empty(owner)
    owner.engine.add_request([1, 2], PARAMS)
    owner.engine.step()
    assert len(steps) == 3 and owner.engine.abort("3")


def test_a_fault_of_the_owner_itself_leaves_nobody_waiting():
    owner = make_owner()
    add, owner.engine.add_checked_request = owner.engine.add_checked_request, lambda *_, **__: 1 / 0
    news = generate(owner, ([1, 2], PARAMS), ([1], PARAMS))
    assert [type(one.error) for one in news] == [ZeroDivisionError] * 2
    owner.engine.add_checked_request = add
    deliver, owner._deliver = owner._deliver, lambda output, error=None: 1 / 0
    (news,) = generate(owner, ([1, 2], PARAMS))
    assert type(news.error) is ZeroDivisionError
    owner._deliver = deliver
    (news,) = generate(owner, ([1, 2], PARAMS))
    assert news.output.outputs[0].token_ids == truth([1, 2], 6)
    check_empty(owner)


# ── LLM ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def llm():
    loaded = Loaded(random_decoder(TINY_LLAMA), TINY_LLAMA, Letters(), {3}, 0)
    with LLM(loaded, device="cpu", block_size=4, num_blocks=40, max_num_seqs=8,
             max_num_batched_tokens=32) as llm:
        yield llm


TEXTS = ["abc", "abcdefghijk", "xyz", "hello", "abcdefgx"]


def short(output) -> list:
    return [(c.index, c.text, c.token_ids, c.finish_reason) for c in output.outputs]


def test_llm_gives_threads_what_it_gives_one(llm):
    drawn = SamplingParams(n=2, seed=5, max_tokens=8)
    alone = [short(output) for output in llm.generate(TEXTS, drawn, use_tqdm=False)]
    greedy = [short(output) for output in llm.generate(TEXTS, PARAMS, use_tqdm=False)]
    beams = [short(output) for output in llm.beam_search(TEXTS[:2], 3, 4, use_tqdm=False)]

    def generates() -> None:
        assert [short(o) for o in llm.generate(TEXTS, drawn, use_tqdm=False)] == alone

    def streams() -> None:
        for text, want in zip(TEXTS, greedy):
            outputs = list(llm.stream(text, PARAMS))
            assert short(outputs[-1]) == want
            assert "".join(o.outputs[0].new_text for o in outputs) == want[0][1]

    def searches() -> None:
        assert [short(o) for o in llm.beam_search(TEXTS[:2], 3, 4, use_tqdm=False)] == beams

    def is_refused() -> None:
        for _ in range(5):
            with pytest.raises(ValueError, match="empty"):
                llm.generate(["abc", ""], PARAMS, use_tqdm=False)

    def gives_up() -> None:
        for _ in range(4):
            with pytest.raises(ZeroDivisionError):
                for _ in llm.stream("abc", replace(PARAMS, max_tokens=100)):
                    raise ZeroDivisionError

    def aborts() -> None:
        outputs = llm.stream("hello", replace(PARAMS, max_tokens=100))
        assert llm.abort(next(outputs).request_id)
        assert [o.outputs[0].finish_reason for o in outputs] == ["abort"]

    in_threads(*(generates, streams, searches, is_refused, gives_up, aborts) * 2)
    check_empty(llm.owner)


def test_a_failed_row_and_a_failed_step(llm, monkeypatch):
    """A row that fails is its request's; a step that fails for all of a call raises."""
    (want,) = llm.generate("abc", PARAMS, use_tqdm=False)
    launch = llm.engine.launch

    monkeypatch.setattr(llm.engine, "launch", lambda batch: [RowOutput(error="NaN")])
    (output,) = llm.generate("abc", PARAMS, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", "NaN")

    def fails(batch):
        if BROKEN in batch.input_ids:
            raise RuntimeError("device lost")
        return launch(batch)

    monkeypatch.setattr(llm.engine, "launch", fails)
    good, bad = llm.generate(["abc", [BROKEN]], PARAMS, use_tqdm=False)
    assert short(good) == short(want) and bad.outputs[0].error == "device lost"
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate([[BROKEN], [1, BROKEN]], PARAMS, use_tqdm=False)
    with pytest.raises(RuntimeError, match="device lost"):
        list(llm.stream([BROKEN], PARAMS))
    check_empty(llm.owner)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_ctrl_c_ends_the_main_threads_requests_and_no_others(llm, step, monkeypatch):
    (want,) = llm.generate("hello", replace(PARAMS, max_tokens=40), use_tqdm=False)
    launch, steps = llm.engine.launch, []
    others = threading.Event()

    def interrupt(batch):
        steps.append(batch)
        if len(steps) == step:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return launch(batch)

    got = []

    def other() -> None:
        for output in llm.stream("hello", replace(PARAMS, max_tokens=40)):
            got.append(output)
            others.set()

    thread = threading.Thread(target=other)
    thread.start()
    others.wait(30)
    monkeypatch.setattr(llm.engine, "launch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, replace(PARAMS, max_tokens=120), use_tqdm=False)
    thread.join(30)
    assert short(got[-1]) == short(want)
    check_empty(llm.owner)


def interrupted(function, at: int) -> bool:
    """Call a function, with Ctrl-C at a line of what the caller's own thread runs of llm and owner;
    False if it has fewer lines."""
    lines = 0

    def trace_lines(frame, event, arg):
        nonlocal lines
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # A second Ctrl-C is another matter, and between leaving `with` and its exit none strikes.
        if event == "line" and "close()" not in line and "with " not in line:
            lines += 1
            if lines == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace_lines

    def trace_calls(frame, event, arg):
        ours = frame.f_globals.get("__name__") in ("paged.llm", "paged.owner")
        return trace_lines if ours and frame.f_code.co_name not in ("close", "do", "job") else None

    sys.settrace(trace_calls)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("kind", ["generate", "stream"])
def test_ctrl_c_at_any_line_of_a_caller_leaves_nothing(llm, kind):

    def call() -> None:
        if kind == "generate":
            llm.generate(["abc", "xyz"], PARAMS, use_tqdm=False)
        else:
            list(llm.stream("abc", PARAMS))

    at = 1
    while interrupted(call, at):
        check_empty(llm.owner)
        at += 1
    assert at > 40


def test_a_stream_that_is_forgotten_is_aborted(llm):
    streams = [llm.stream(text, replace(PARAMS, max_tokens=50)) for text in TEXTS]
    for one in streams:
        next(one)
    streams.append(streams)  # a cycle: only the collector finds it, in whatever thread it runs
    del streams, one
    for _ in range(100):  # the owner may just be hiding all there is from the collector
        gc.collect()
        if not llm.owner.do(llm.engine.has_unfinished):
            break
    check_empty(llm.owner)


# ── asyncio ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def async_llm(llm):
    found = AsyncLLM.__new__(AsyncLLM)
    found.llm = llm
    return found


def test_async_calls(async_llm):
    want = [short(o) for o in async_llm.llm.generate(TEXTS, PARAMS, use_tqdm=False)]

    async def streams(text):
        outputs = [output async for output in async_llm.stream(text, PARAMS)]
        assert "".join(o.outputs[0].new_text for o in outputs) == outputs[-1].outputs[0].text
        return short(outputs[-1])

    async def generates(text):
        (output,) = await async_llm.generate(text, PARAMS)
        return short(output)

    async def main():
        everything = [f(text) for text in TEXTS for f in (streams, generates)]
        whole = asyncio.create_task(async_llm.generate(TEXTS, replace(PARAMS, max_tokens=120)))
        going = [asyncio.create_task(endless()) for _ in range(3)]
        await asyncio.sleep(0)
        whole.cancel()
        results = await asyncio.gather(*everything)
        for task in (whole, *going):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return results

    async def endless():
        while True:
            async for _ in async_llm.stream("abc", replace(PARAMS, max_tokens=120)):
                pass

    results = asyncio.run(main())
    assert results == [one for one in want for _ in range(2)]
    check_empty(async_llm.llm.owner)


def test_async_refusals_chat_and_abort(async_llm):
    question = [{"role": "user", "content": "abc"}]

    async def main():
        with pytest.raises(ValueError, match="empty"):
            async_llm.stream("")
        with pytest.raises(ValueError, match="empty"):
            await async_llm.generate(["a", ""])
        (answer,) = await async_llm.chat(question, PARAMS, continue_final_message=True)
        assert answer.prompt == "uabc"
        outputs = async_llm.stream("abc", replace(PARAMS, max_tokens=120))
        first = await outputs.__anext__()
        assert await async_llm.abort(first.request_id)
        assert [o.outputs[0].finish_reason async for o in outputs] == ["abort"]

    asyncio.run(main())
    check_empty(async_llm.llm.owner)


def test_a_loop_that_ends_takes_its_requests_along(async_llm):

    async def main():
        async for _ in async_llm.stream("abc", replace(PARAMS, max_tokens=120)):
            break
        asyncio.create_task(async_llm.generate(TEXTS, replace(PARAMS, max_tokens=120)))
        await asyncio.sleep(0.01)

    asyncio.run(main())
    check_empty(async_llm.llm.owner)


def test_an_async_llm_of_its_own():

    async def main():
        loaded = Loaded(random_decoder(TINY_LLAMA), TINY_LLAMA, Letters(), {3}, 0)
        async with AsyncLLM(loaded, device="cpu", block_size=4, num_blocks=40) as mine:
            (output,) = await mine.generate("abc", PARAMS)
        with pytest.raises(ValueError, match="has been closed"):
            await mine.generate("abc")
        return short(output)

    assert asyncio.run(main())[0][3] == "length"
