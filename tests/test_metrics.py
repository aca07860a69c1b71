"""The figures of a run: what a STEP event counts, the summary, the lines for the terminal, the
saved file."""

import json

from paged import Engine, EngineConfig, SamplingParams, Trace
from paged.lab.oracle import OracleRunner
from paged.metrics import request_summary, save, step_table, steps, summary, summary_text, timeline
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
    save(tmp_path / "run.json", trace, outputs)
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
