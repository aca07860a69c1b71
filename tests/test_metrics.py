"""The figures of a run: what a STEP event counts, the summary, the lines for the terminal, the
saved file."""

import json

import pytest

from paged import Engine, EngineConfig, SamplingParams, Trace
from paged.lab.oracle import OracleRunner
from paged.metrics import request_summary, save, step_table, steps, summary, summary_text, timeline
from paged.request import CompletionOutput, RequestMetrics, RequestOutput
from tests.engines import run


def crowd(**config):
    """Two requests with a common prompt and one that must wait, traced; returns trace and
    outputs."""
    trace = Trace()
    engine = Engine(EngineConfig(num_blocks=6, block_size=2, max_num_seqs=2, **config),
                    OracleRunner(6, 2, 6), trace=trace)
    for prompt, max_tokens in (([1, 2, 3, 4, 5], 4), ([1, 2, 3, 4, 6], 4), ([9], 1)):
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens))
    return trace, list(run(engine).values())


def test_each_step_says_what_it_did():
    trace, outputs = crowd()
    first = steps(trace)[0]
    assert (first["prefill"], first["decode"], first["cached"]) == (5 + 1, 0, 4)
    assert (first["running"], first["waiting"], first["swapped"], first["preempted"]) == (2, 1, 0,
                                                                                          0)
    assert (first["used"], first["references"], first["blocks"]) == (4, 6, 6)
    assert all(row["seconds"] > 0 for row in steps(trace))
    decoded = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    assert sum(row["decode"] for row in steps(trace)) == decoded
    assert [row["step"] for row in steps(trace)] == list(range(1, len(steps(trace)) + 1))


def test_preempted_and_swapped_requests_show():
    for preemption in ("recompute", "swap"):
        trace = Trace()
        config = EngineConfig(num_blocks=4, block_size=2, preemption=preemption)
        engine = Engine(config, OracleRunner(4, 2, 4), trace=trace)
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
        engine.add_request([4, 5, 6, 7], SamplingParams(max_tokens=4))
        outputs = run(engine).values()
        (row,) = [row for row in steps(trace) if row["preempted"]]
        assert (row["swapped"], row["waiting"]) == ((1, 0) if preemption == "swap" else (0, 1))
        assert summary(trace, outputs)["preemptions"] == 1
        assert "preempted 1 times" in "\n".join(map(request_summary, outputs))


def test_timeline_covers_every_computed_token():
    trace, outputs = crowd()
    rows = timeline(trace)
    assert rows[0] == {"step": 1, "request": "0", "phase": "prefill", "tokens": 5}
    assert sum(row["tokens"] for row in rows) == sum(
        row["prefill"] + row["decode"] for row in steps(trace))


def test_summary():
    trace, outputs = crowd()
    total = summary(trace, outputs)
    assert total["requests"] == 3 and total["output_tokens"] == 9
    assert total["prefix_hit_rate"] == 4 / (5 + 5 + 1)
    assert 0 < total["memory_saved_by_sharing"] < 0.5
    assert 0 < total["pool_occupancy_mean"] <= total["pool_occupancy_peak"] <= 1
    assert total["waiting_peak"] == 1 and total["preemptions"] == 0
    assert total["time_to_first_token"]["median"] <= total["time_to_first_token"]["max"]


def test_a_summary_by_hand():
    trace = Trace()
    row = dict(seconds=0.5, prefill=6, decode=0, cached=2, running=1, waiting=1, swapped=0, used=4,
               references=6, blocks=8, preempted=0)
    for changed in (dict(), dict(prefill=0, decode=2, cached=0, waiting=1, swapped=2, preempted=1),
                    dict(prefill=0, cached=0, waiting=0, used=1, references=3)):
        trace.emit("STEP", **row | changed)
    total = summary(trace)
    assert (total["steps"], total["seconds"], total["preemptions"]) == (3, 1.5, 1)
    assert total["prefix_hit_rate"] == 2 / 8 and total["waiting_peak"] == 3
    assert (total["pool_occupancy_mean"], total["pool_occupancy_peak"]) == (3 / 8, 1 / 2)
    assert total["memory_saved_by_sharing"] == pytest.approx(1 - 9 / 15)


def test_times_of_many_requests():
    """Request i waits i seconds for its first of i tokens, of which each then takes a second."""
    outputs = [
        RequestOutput(str(i), [1], [CompletionOutput(0)],
                      RequestMetrics(10.0, 10.0, 10.0 + i, 9.0 + 2 * i, i, i))
        for i in range(1, 201)
    ]
    total = summary(Trace(), outputs)
    assert total["time_to_first_token"] == {"median": 100.5, "p99": 198, "max": 200}
    assert total["time_per_output_token"] == {"median": 1, "p99": 1, "max": 1}
    assert outputs[0].metrics.time_per_output_token is None  # there is no second token
    assert outputs[1].metrics.time_per_output_token == 1
    assert total["output_tokens"] == 200 * 201 / 2


def test_a_trace_keeps_what_it_has_room_for_and_counts_the_rest():
    trace = Trace(limit=2)
    for number in range(5):
        trace.emit("NUMBER", number=number)
    assert [event["number"] for event in trace.events] == [0, 1] and trace.dropped == 3


def test_nothing_at_all_is_no_error():
    total = summary(Trace())
    assert total["steps"] == 0 and total["prefix_hit_rate"] is None and total[
        "time_to_first_token"] is None
    assert summary_text(Trace()) and step_table(Trace())


def test_what_is_printed_and_saved(tmp_path):
    trace, outputs = crowd()
    lines = step_table(trace).splitlines()
    assert lines[0].split() == [
        "step", "ms", "prefill", "decode", "cached", "running", "waiting", "swapped", "used",
        "preempted"
    ]
    assert len(lines) == 1 + len(steps(trace)) and len({len(line) for line in lines}) == 1
    assert "5 prompt tokens (4 cached), 4 generated" in request_summary(outputs[1])
    assert "prefix hit rate 36.4%" in summary_text(trace, outputs)
    save(tmp_path / "run.json", trace, iter(outputs))
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["steps"] == steps(trace) and saved["summary"] == summary(trace, outputs)
    assert [request["cached_tokens"] for request in saved["requests"]] == [0, 4, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_an_untraced_engine_reports_nothing():
    engine = Engine(EngineConfig(num_blocks=6), OracleRunner(6, 16))
    engine.add_request([1], SamplingParams(max_tokens=2))
    (output,) = run(engine).values()
    assert engine.trace.events == []
    assert "1 prompt tokens (0 cached), 2 generated; first token after" in request_summary(output)
