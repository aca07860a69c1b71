"""The engine's contract: what add_request refuses, what step returns, how requests end and what
faults leave.

Protects the interface that outside runners rely on, the lengths and limits that broke public
engines, aborts at every moment, and failures at every moment: neither an exception nor Ctrl-C
    leaves a request behind.
"""

import sys

import pytest

from paged import Engine, EngineConfig, SamplingParams
from paged.batch import RowOutput
from paged.lab.oracle import OracleRunner, RunAheadOracle, next_token, truth
from tests.engines import generate, make_engine, run

EXAMPLE = dict(num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=8,
               max_model_len=64, enable_prefix_caching=True)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 250 for i in range(length)]


# ── the contract ──────────────────────────────────────────────────────────────────────────────────


def test_a_runner_needs_execute_and_the_listed_fields_only():

    class Runner:

        def execute(self, batch):
            seen.append(batch)
            for name in ("request_ids", "input_ids", "positions", "slot_mapping", "query_start_loc",
                         "seq_lens", "block_tables", "block_copies"):
                assert type(getattr(batch, name)) is list, name
            assert batch.query_start_loc[-1] == len(batch.input_ids) == len(batch.positions)
            assert len(batch.request_ids) == len(batch.seq_lens) == len(batch.block_tables)
            return [7] * len(batch.request_ids)

    seen = []
    engine = Engine(EngineConfig(**EXAMPLE), runner=Runner())
    assert engine.step() == [] and not engine.has_unfinished()
    request_id = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5))
    assert isinstance(request_id, str) and engine.has_unfinished()
    for number in range(1, 6):
        (output,) = engine.step()
        assert (output.request_id, output.prompt_token_ids) == (request_id, [1, 2, 3])
        assert output.outputs[0].token_ids == [7] * number
        assert output.finished == (number == 5)
    assert output.outputs[0].finish_reason == "length"
    assert not engine.has_unfinished() and engine.step() == []
    assert engine.block_pool.num_free() == 8 and engine.block_pool.ref_cnt == [0] * 8
    assert len(seen) == 5  # an idle step does not run the model


def test_positions_and_slots_follow_the_block_table():
    engine = make_engine(num_blocks=4, block_size=2)
    generate(engine, (prompt(3), 3))
    assert [(batch.positions, batch.slot_mapping, batch.block_tables)
            for batch in engine.runner.batches] == [([0, 1, 2], [0, 1, 2], [[0, 1]]),
                                                    ([3], [3], [[0, 1]]), ([4], [4], [[0, 1, 2]])]


@pytest.mark.parametrize("make", [
    lambda: EngineConfig(num_blocks=1, blocksize=2), lambda: SamplingParams(temprature=0),
    lambda: make_engine().add_request([1], seed=3),
    lambda: Engine(EngineConfig(1), None, device="cpu"), lambda: make_engine().add_request()
])
def test_unknown_and_missing_arguments_are_errors(make):
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize("values, numbers",
                         [(dict(num_blocks=0), ["num_blocks", "0"]),
                          (dict(block_size=-1), ["block_size", "-1"]),
                          (dict(max_num_seqs=0), ["max_num_seqs"]),
                          (dict(max_num_batched_tokens=1.5), ["batched_tokens", "1.5"]),
                          (dict(max_model_len=True), ["max_model_len"]),
                          (dict(preemption="drop"), ["drop", "recompute", "swap"]),
                          (dict(num_host_blocks=0), ["num_host_blocks", "0"])])
def test_impossible_sizes_are_refused_by_name(values, numbers):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{**EXAMPLE, **values})
    assert all(number in str(error.value) for number in numbers), error.value


@pytest.mark.parametrize("tokens, params, numbers",
                         [([], dict(), ["empty"]),
                          (prompt(10), dict(max_tokens=8), ["10", "8", "9", "num_blocks"]),
                          (prompt(2), dict(n=5, max_tokens=2), ["5", "max_num_seqs", "4"]),
                          ([1, -2], dict(), ["-2"]), ([1, "a"], dict(), ["token ids"]),
                          ([1.5], dict(), ["token ids"]), ("text", dict(), ["LLM.generate"]),
                          (7, dict(), ["token ids"]),
                          ([1], dict(stop=".", max_tokens=2), ["tokenizer"])])
def test_impossible_requests_are_refused_with_their_numbers(tokens, params, numbers):
    engine = Engine(EngineConfig(**EXAMPLE), OracleRunner(8, 2))
    with pytest.raises(ValueError) as error:
        engine.add_request(tokens, SamplingParams(**params))
    assert all(number in str(error.value) for number in numbers), error.value
    assert not engine.has_unfinished() and engine.step() == []


@pytest.mark.parametrize("tokens, params", [(prompt(10), dict(max_tokens=7)),
                                            (prompt(2), dict(n=4, max_tokens=3))])
def test_requests_that_just_fit_are_served(tokens, params):
    """All of the pool, all seats."""
    engine = make_engine(**EXAMPLE)
    request_id = engine.add_request(tokens, SamplingParams(**params))
    for completion in run(engine)[request_id].outputs:
        assert completion.token_ids == truth(tokens, params["max_tokens"], completion.index)


def test_more_positions_than_max_model_len_are_refused():
    engine = Engine(EngineConfig(num_blocks=100, block_size=2, max_model_len=64),
                    OracleRunner(100, 2))
    with pytest.raises(ValueError,
                       match="60 tokens and max_tokens=6 need 65 positions, max_model_len is 64"):
        engine.add_request(prompt(60), SamplingParams(max_tokens=6))
    engine.add_request(prompt(60), SamplingParams(max_tokens=5))


def test_tokens_outside_the_vocabulary_are_refused():
    engine = Engine(EngineConfig(**EXAMPLE), OracleRunner(8, 2), vocab_size=10)
    with pytest.raises(ValueError, match="10"):
        engine.add_request([1, 10])
    engine.add_request([1, 9], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_tokens_to_generate_is_refused(max_tokens):
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=max_tokens)


def test_params_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="SamplingParams"):
        make_engine().add_request([1], {"max_tokens": 3})


def test_the_last_request_must_be_able_to_grow():
    """Two blocks of 4, prompt 8, max_tokens 4: refused on arrival, since no preemption could ever
    help it."""
    engine = make_engine(num_blocks=2, block_size=4)
    with pytest.raises(ValueError, match="3 blocks.*pool has 2"):
        engine.add_request(prompt(8), SamplingParams(max_tokens=4))
    generate(engine, (prompt(8), 1))  # the last sampled token is never cached
    generate(engine, (prompt(7), 2))


# ── lengths ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("together", [False, True], ids=["one_by_one", "together"])
@pytest.mark.parametrize("length", range(1, 17))
def test_every_length_twice(block_size, length, max_tokens, together):
    engine = make_engine(num_blocks=40, block_size=block_size)
    if together:
        generate(engine, (prompt(length), max_tokens), (prompt(length), max_tokens))
    else:
        generate(engine, (prompt(length), max_tokens))
        engine.add_request(prompt(length), SamplingParams(max_tokens=max_tokens))
        (output,) = run(engine).values()
        assert output.num_cached_tokens == (length - 1) // block_size * block_size
        assert output.outputs[0].token_ids == truth(prompt(length), max_tokens)


def test_at_least_one_token_of_a_cached_prompt_is_computed():
    engine = make_engine(num_blocks=8, block_size=4)
    generate(engine, (prompt(8), 1))
    generate(engine, (prompt(8), 1))
    assert engine.runner.batches[-1].num_tokens == [4]  # the last block, though it is cached


def test_a_chunk_offers_only_what_it_computes():
    """A common first block in one batch, and the first prompt ends in the middle of the second
    block."""
    engine = make_engine(num_blocks=12, block_size=4, max_num_batched_tokens=9)
    engine.add_request(prompt(12), SamplingParams(max_tokens=1))
    engine.step()  # nine tokens: two full blocks and a row
    engine.add_request(prompt(12), SamplingParams(max_tokens=1))
    engine.step()
    assert engine.runner.batches[1].num_tokens == [3, 4]  # the last block is not taken over
    assert all(output.finished for output in run(engine).values())


# ── what ends a request ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("run_ahead", [False, True])
def test_any_of_several_end_tokens_ends_a_request(run_ahead):
    tokens = truth([1, 2, 3], 12)
    end = next(token for token in tokens if token != tokens[0])
    stops_at = tokens.index(end) + 1
    for eos, params, length in [({end, 99}, dict(), stops_at),
                                ({98, 99}, dict(stop_token_ids=[end]), stops_at),
                                ({end}, dict(ignore_eos=True), 12),
                                ({98}, dict(ignore_eos=True, stop_token_ids=[end]), stops_at)]:
        runner = (RunAheadOracle if run_ahead else OracleRunner)(8, 4)
        engine = Engine(EngineConfig(num_blocks=8, block_size=4), runner, eos_token_ids=eos)
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=12, **params))
        (output,) = run(engine).values()
        assert output.outputs[0].token_ids == tokens[:
                                                     length]  # the token that ends it is part of it
        assert output.outputs[0].finish_reason == ("length" if length == 12 else "stop")


def test_completions_have_seeds_of_their_own_and_end_by_themselves():
    engine = make_engine(num_blocks=20)
    engine.add_request([5, 6], SamplingParams(n=4, seed=11, max_tokens=9, stop_token_ids=[2]))
    engine.step()
    (group,) = engine._groups.values()
    assert [request.seed for request in group.live] == [11, 12, 13, 14]
    (output,) = run(engine).values()
    for index, completion in enumerate(output.outputs):
        assert completion.token_ids == truth([5, 6], 9, index, [2])
    assert output.metrics.num_output_tokens == sum(len(c.token_ids) for c in output.outputs)


def test_unseeded_requests_draw_different_seeds_and_engines_the_same():
    seeds = []
    for _ in range(2):
        engine = make_engine()
        for _ in range(3):
            engine.add_request([1])
        seeds.append([group.live[0].seed for group in engine._groups.values()])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3


class Letters:
    """A tokenizer of four tokens, one of them half a character."""

    BYTES = [b"ab", b"b", b"a\xc3", b"\xa9a"]

    def token_bytes(self, token: int) -> bytes:
        return self.BYTES[token]


def text_of(tokens, stop=()) -> str:
    """The whole text, cut before the stop string that is complete first."""
    text = ""
    for character in b"".join(Letters.BYTES[token] for token in tokens).decode(errors="replace"):
        text += character
        for word in stop:
            if text.endswith(word):
                return text[:-len(word)]
    return text


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("stop", [[], ["ba"], ["bab"], ["abb"], ["\u00e9"], ["bb", "aab"], ["zzz"]])
def test_stop_strings_across_token_boundaries(run_ahead, stop):
    """The text ends before the first stop string, over however many tokens, and streams without
    it."""
    for first in range(12):
        runner = (RunAheadOracle if run_ahead else OracleRunner)(16, 4)
        engine = Engine(EngineConfig(num_blocks=16, block_size=4), runner, tokenizer=Letters())
        engine.add_request([first], SamplingParams(max_tokens=9, stop=stop or None))
        streamed, output = "", None
        while engine.has_unfinished():
            for output in engine.step():
                streamed += output.outputs[0].new_text
        (completion,) = output.outputs
        tokens = truth([first], 9)
        want = text_of(tokens, stop)
        assert completion.text == streamed == want
        assert completion.token_ids == tokens[:len(completion.token_ids)]
        stopped = want != text_of(tokens)
        assert completion.finish_reason == ("stop" if stopped else "length")
        if stopped:  # no token is generated that was not needed
            assert text_of(completion.token_ids[:-1], stop) == text_of(completion.token_ids[:-1])


# ── names ─────────────────────────────────────────────────────────────────────────────────────────


def test_request_ids():
    engine = make_engine()
    assert engine.add_request([1], request_id="1") == "1"
    assert engine.add_request([1]) == "2"  # number 1 is taken
    with pytest.raises(ValueError, match="'1' is in use"):
        engine.add_request([1], request_id="1")
    run(engine)
    assert engine.add_request([1], request_id="1") == "1"  # finished: the name is free again
    assert engine.abort("1") and not engine.abort("1") and not engine.abort("never")


def test_tenants_do_not_share():
    engine = make_engine(num_blocks=20)
    for salt in (None, "a", "b", "a"):
        engine.add_request(prompt(9), SamplingParams(max_tokens=1), salt=salt)
        run(engine)
    assert [batch.num_tokens for batch in engine.runner.batches] == [[9], [9], [9], [1]]


# ── abort, failure, interruption ──────────────────────────────────────────────────────────────────


def crowd(runner_class=OracleRunner, tokenizer=None, **config) -> Engine:
    """A tight engine with a bit of everything: chunks, shared prefixes, completions, preemption."""
    config = EngineConfig(num_blocks=9, block_size=2, max_num_seqs=4, max_num_batched_tokens=6,
                          **config)
    engine = Engine(config, runner_class(9, 2, 9), tokenizer)
    add_crowd(engine)
    return engine


def add_crowd(engine: Engine) -> None:
    engine.add_request(prompt(9), SamplingParams(max_tokens=6, logprobs=1), request_id="long")
    engine.add_request(prompt(3), SamplingParams(max_tokens=4, n=2), request_id="two")
    engine.add_request(prompt(8, 3), SamplingParams(max_tokens=5), request_id="late")


def outputs_of_crowd(engine: Engine) -> dict[str, list[list[int]]]:
    return {name: [c.token_ids for c in output.outputs] for name, output in run(engine).items()}


WANTED = {
    "long": [truth(prompt(9), 6)], "two": [truth(prompt(3), 4),
                                           truth(prompt(3), 4, 1)],
    "late": [truth(prompt(8, 3), 5)]
}
KINDS = pytest.mark.parametrize("kind", [
    dict(),
    dict(preemption="swap"),
    dict(enable_prefix_caching=False),
    dict(runner_class=RunAheadOracle)
], ids=["recompute", "swap", "uncached", "ahead"])


@KINDS
@pytest.mark.parametrize("name", WANTED)
def test_abort_at_every_moment(kind, name):
    """Waiting, mid-chunk, decoding, preempted, the last one running: the others get what is
    theirs."""
    steps = 0
    while True:
        engine = crowd(**kind)
        for _ in range(steps):
            engine.step()
        if not engine.has_unfinished():
            break
        group = engine._groups.get(name)
        output = group.output if group else None
        assert engine.abort(name) is (group is not None)
        engine.check_integrity()
        if output:
            assert output.finished and "abort" in [c.finish_reason for c in output.outputs]
        others = {key: value for key, value in outputs_of_crowd(engine).items() if key != name}
        assert all(WANTED[key] == value for key, value in others.items())
        steps += 1
    assert steps > 10


def test_an_aborted_request_leaves_nothing_scheduled():
    engine = crowd()
    for name in WANTED:
        engine.abort(name)
    assert not engine.has_unfinished() and engine.step() == []
    assert engine.block_pool.num_free() == 9


@KINDS
@pytest.mark.parametrize(
    "fault", [RuntimeError("device lost"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_runner_that_fails_at_any_step_costs_time_and_nothing_else(kind, fault):
    failing_step, failed = 0, True
    while failed:
        failing_step, failed = failing_step + 1, False
        engine, number = crowd(**kind), 0
        launch = engine.launch

        def fail_once(batch):
            nonlocal number, failed
            number += 1
            if number == failing_step:
                failed = True
                raise fault
            return launch(batch)

        engine.launch = fail_once
        outputs = {}
        while engine.has_unfinished():
            try:
                for output in engine.step():
                    outputs[output.request_id] = [c.token_ids for c in output.outputs]
            except type(fault):
                assert engine.block_pool.num_free() == 9  # all wait, with nothing computed
            engine.check_integrity()
        assert outputs == WANTED
    assert failing_step > 10


def test_a_runner_that_returns_too_few_tokens_is_an_error():
    engine = crowd()
    engine.launch = lambda batch: [0]
    engine.step()  # one request: one token is right
    with pytest.raises(ValueError, match="1 tokens for 2 requests|1 tokens for 3 requests"):
        for _ in range(3):
            engine.step()


def interrupt(engine: Engine, at: int) -> bool:
    """Step until the package has executed so many lines and interrupt it there; False if it ended
    before."""
    lines = 0

    def in_module(frame, event, arg):
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return in_module

    def everywhere(frame, event, arg):
        module = frame.f_globals.get("__name__", "")
        return in_module if module.startswith("paged.") and module != "paged.lab.oracle" else None

    sys.settrace(everywhere)
    try:
        while engine.has_unfinished():
            engine.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@KINDS
def test_interrupted_at_any_line_a_step_leaves_requests_that_go_on(kind):
    """And nothing is lost, nothing computed wrong, where the engine is not even reset."""
    interrupted, at = True, 1
    while interrupted:
        engine = crowd(tokenizer=Letters(), **kind)
        outputs = [group.output for group in engine._groups.values()]
        interrupted = interrupt(engine, at)
        at += 11
        run(engine)
        assert all(c.text == text_of(c.token_ids) for o in outputs for c in o.outputs)
        (long,) = outputs[0].outputs
        of_tokens = [logprobs[t] for logprobs, t in zip(long.logprobs, long.token_ids, strict=True)]
        assert long.cumulative_logprob == pytest.approx(sum(of_tokens))
        assert {o.request_id: [c.token_ids for c in o.outputs] for o in outputs} == WANTED
        assert all(output.finished for output in outputs)


@KINDS
def test_interrupted_at_any_line_a_reset_engine_is_empty_and_works(kind):
    """Ctrl-C may strike anywhere: here it does, at one line after the other of what a run
    executes."""
    engine = crowd(**kind)
    interrupted, at = True, 1
    while interrupted:
        interrupted = interrupt(engine, at)
        at += 7  # loops make every line come up some time
        engine.reset()
        engine.check_integrity()
        assert not engine.has_unfinished() and engine.step() == []
        assert engine.block_pool.num_free() == 9
        add_crowd(engine)
    assert outputs_of_crowd(engine) == WANTED


def test_reset_keeps_what_the_prefix_cache_knows():
    engine = make_engine(num_blocks=8, block_size=2)
    generate(engine, (prompt(7), 2))
    engine.add_request(prompt(5, 50), SamplingParams(max_tokens=3))
    engine.step()
    engine.reset()
    assert not engine.has_unfinished()
    engine.add_request(prompt(7), SamplingParams(max_tokens=2))
    (output,) = run(engine).values()
    assert output.num_cached_tokens == 6


# ── figures of a request ──────────────────────────────────────────────────────────────────────────


def test_times_and_counts_of_a_request():
    engine = crowd()
    outputs = run(engine)
    for output in outputs.values():
        metrics = output.metrics
        assert (metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <=
                metrics.finish_time)
        assert metrics.time_to_first_token >= metrics.queue_time >= 0
        assert metrics.time_per_output_token > 0
        assert metrics.longest_output == max(len(c.token_ids) for c in output.outputs)
    engine.add_request([1], SamplingParams(max_tokens=1))
    (output,) = run(engine).values()
    assert output.metrics.time_per_output_token is None  # there is no second token


def test_a_runner_may_work_one_step_ahead():
    """The tokens are the same; the engine asks for step n only after it has launched step n + 1."""
    calls = []

    class Ahead(RunAheadOracle):

        def launch(self, batch):
            calls.append("launch")
            return super().launch(batch)

        def collect(self, tokens):
            calls.append("collect")
            return super().collect(tokens)

    engine = Engine(EngineConfig(num_blocks=8, block_size=4), Ahead(8, 4))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
    (output,) = run(engine).values()
    assert output.outputs[0].token_ids == truth([1, 2, 3], 4)
    assert calls == [
        "launch", "launch", "collect", "launch", "collect", "launch", "collect", "collect"
    ]


def test_the_oracle_has_a_truth_of_its_own():
    """The fake model depends on the whole prefix: one other token at the front changes what
    comes."""
    changed = sum(truth([a, 2, 3, 4], 6) != truth([9, 2, 3, 4], 6) for a in range(8))
    assert changed == 8
    assert {next_token([a, b]) for a in range(9) for b in range(9)} == {0, 1, 2, 3}


# ── what would fail in a step is refused at the door ──────────────────────────────────────────────


@pytest.mark.parametrize(
    "wrong",
    [dict(salt=5), dict(salt=["a"]),
     dict(request_id=5), dict(request_id=[1])])
def test_names_that_are_no_strings_are_refused(wrong):
    engine = make_engine()
    with pytest.raises(ValueError, match="it must be a string"):
        engine.add_request([1, 2], **wrong)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("tokens", [[2**63], b"abc", {1, 2}, {1: 2}])
def test_what_is_no_list_of_token_ids_is_refused(tokens):
    with pytest.raises(ValueError, match="token ids"):
        make_engine().add_request(tokens, SamplingParams(max_tokens=1))


def test_log_probabilities_are_kept_of_those_who_asked():
    """A runner may give them for all rows."""

    class Runner:

        def execute(self, batch):
            return [RowOutput([7], [{7: -0.5, 8: -1.0}])] * len(batch.request_ids)

    engine = Engine(EngineConfig(num_blocks=8), Runner())
    for logprobs in (None, 1):
        engine.add_request([1], SamplingParams(max_tokens=2, logprobs=logprobs))
    (silent,), (asked,) = (output.outputs for output in run(engine).values())
    assert (silent.logprobs, silent.cumulative_logprob) == (None, None)
    assert asked.logprobs == [{7: -0.5, 8: -1.0}] * 2 and asked.cumulative_logprob == -1.0


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_the_largest_token_id_is_served(prefix_cache):

    class Runner:

        def execute(self, batch):
            return [7] * len(batch.request_ids)

    engine = Engine(EngineConfig(num_blocks=8, block_size=1, prefix_cache=prefix_cache), Runner())
    for cached in (0, 1):
        engine.add_request([2**63 - 1, 0], SamplingParams(max_tokens=1))
        (output,) = engine.step()
        assert output.outputs[0].token_ids == [7] and output.num_cached_tokens == cached


def test_no_batch_shows_a_request_id_twice():
    engine = make_engine(num_blocks=64)
    engine.add_request([1, 2], SamplingParams(n=3, max_tokens=4), request_id="a")
    with pytest.raises(ValueError, match="'a.1' is in use"):  # the name of its second completion
        engine.add_request([1], SamplingParams(max_tokens=1), request_id="a.1")
    engine.add_request([1], SamplingParams(max_tokens=4), request_id="1.2")
    assert engine.add_request([1], SamplingParams(n=3, max_tokens=4)) != "1"
    run(engine)
    assert all(
        len(set(batch.request_ids)) == len(batch.request_ids) for batch in engine.runner.batches)


def test_tokens_of_any_integer_type_stop_a_request():
    import numpy as np

    class Runner:

        def execute(self, batch):
            return np.array([7] * len(batch.request_ids))

    engine = Engine(EngineConfig(**EXAMPLE), runner=Runner(), eos_token_ids=[7])
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=5))
    (output,) = engine.step()
    assert output.finished and type(output.outputs[0].token_ids[0]) is int


def test_the_way_out_names_the_pool_where_it_is_too_small_as_well():
    with pytest.raises(ValueError, match="raise max_model_len and num_blocks"):
        make_engine(num_blocks=2, max_model_len=8).add_request([1] * 9,
                                                               SamplingParams(max_tokens=1))


def test_a_reset_finds_a_damaged_pool_and_begins_anew():
    engine = make_engine()
    engine.add_request([1, 2, 3, 0, 1], SamplingParams(max_tokens=4))
    engine.step()
    pool, first = engine.block_pool, engine.block_pool.free_queue()[0]
    pool._next[first] = first  # the free queue runs in a circle
    engine.reset()
    assert engine.block_pool is not pool
    engine.check_integrity()
    generate(engine, ([1, 2, 3, 0, 1], 4))
