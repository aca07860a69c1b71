"""What a person wants to know about a run: each step, each request, and all of it together.

The engine reports a STEP event a step to its trace, and keeps the times of a request in its
RequestOutput. Everything here reads those two, and nothing here is needed to run.

    prefill, decode   tokens computed: of prompts (after a preemption, of answers too), of answers
    cached            prompt tokens that the prefix cache saved this step from computing
    running, waiting, swapped     requests after the step was scheduled
    used              blocks in use; with `references`, what requests would hold without sharing
    preempted         requests that had to give up their blocks
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paged.request import RequestOutput, Status
from paged.trace import Trace, write_whole

if TYPE_CHECKING:
    from paged.batch import Batch
    from paged.scheduler import Scheduler

COLUMNS = ("step", "ms", "prefill", "decode", "cached", "running", "waiting", "swapped", "used",
           "preempted")


def step_figures(scheduler: Scheduler, batch: Batch, preemptions_before: int) -> dict:
    """The fields of a STEP event, but for its seconds."""
    decode = sum(request.decodes(new) for request, new in scheduler.scheduled.items())
    pool, waiting = scheduler.pool, scheduler.waiting
    swapped = sum(request.status is Status.SWAPPED for request in waiting)
    return {
        "prefill": len(batch.input_ids) - decode, "decode": decode,
        "cached": scheduler.num_cached_tokens, "running": len(
            scheduler.running), "waiting": len(waiting) - swapped, "swapped": swapped,
        "used": pool.num_blocks - pool.num_free(), "references": sum(pool.ref_cnt),
        "blocks": pool.num_blocks, "preempted": scheduler.num_preemptions - preemptions_before
    }


def steps(trace: Trace) -> list[dict]:
    """One dict a step: the fields of its STEP event."""
    return trace.select("STEP")


def timeline(trace: Trace) -> list[dict]:
    """Who computed what in which step: {"step", "request", "phase": "prefill" or "decode",
    "tokens"}."""
    return [{
        "step": event["step"], "request": request,
        "phase": event["event"][len("SCHEDULE_"):].lower(), "tokens": tokens
    } for event in trace.select("SCHEDULE_PREFILL", "SCHEDULE_DECODE")
            for request, tokens in zip(event["requests"], event["tokens"])]


def summary(trace: Trace, outputs: Iterable[RequestOutput] = ()) -> dict:
    """All steps and requests in a few numbers; times in seconds, shares from 0 to 1, None for
    nothing."""
    rows, outputs = steps(trace), list(outputs)
    occupancy = [row["used"] / row["blocks"] for row in rows]
    prefill, cached = (sum(row[name] for row in rows) for name in ("prefill", "cached"))
    references = sum(row["references"] for row in rows)
    return {
        "steps": len(rows), "seconds": sum(
            row["seconds"] for row in rows), "requests": len(outputs), "output_tokens": sum(
                o.metrics.num_output_tokens for o in outputs), "prefix_hit_rate": cached /
        (cached + prefill) if cached + prefill else None,
        "pool_occupancy_mean": statistics.fmean(occupancy) if rows else None,
        "pool_occupancy_peak": max(occupancy, default=None),
        "memory_saved_by_sharing": 1 - sum(row["used"]
                                           for row in rows) / references if references else None,
        "waiting_peak": max((row["waiting"] + row["swapped"] for row in rows), default=0),
        "preemptions": sum(row["preempted"] for row in rows), "time_to_first_token": _spread(
            o.metrics.time_to_first_token for o in outputs), "time_per_output_token": _spread(
                o.metrics.time_per_output_token for o in outputs)
    }


def _spread(values: Iterable[float | None]) -> dict | None:
    """Median, 99th percentile and largest of the values there are; None if there is none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return {
        "median": statistics.median(ordered), "p99": ordered[-(-99 * len(ordered) // 100) - 1],
        "max": ordered[-1]
    }


# ── for the terminal ──────────────────────────────────────────────────────────────────────────────


def step_table(trace: Trace) -> str:
    """One line a step, under a heading."""
    lines = [list(COLUMNS)]
    for row in steps(trace):
        line = {
            **row, "ms": f"{1e3 * row['seconds']:.2f}", "used": f"{row['used']}/{row['blocks']}"
        }
        lines.append([str(line[name]) for name in COLUMNS])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def request_summary(output: RequestOutput) -> str:
    """A request's figures in a line."""
    metrics = output.metrics
    lengths = " + ".join(str(len(completion.token_ids)) for completion in output.outputs)
    parts = [
        f"request {output.request_id}: {len(output.prompt_token_ids)} prompt tokens "
        f"({output.num_cached_tokens} cached), {lengths} generated"
    ]
    first, waited = metrics.time_to_first_token, metrics.queue_time
    if first is not None and waited is not None:
        parts.append(f"first token after {_ms(first)} (waited {_ms(waited)})")
    if metrics.time_per_output_token is not None:
        parts.append(f"then {_ms(metrics.time_per_output_token)} a token")
    if metrics.num_preemptions:
        parts.append(f"preempted {metrics.num_preemptions} times")
    return "; ".join(parts)


def summary_text(trace: Trace, outputs: Iterable[RequestOutput] = ()) -> str:
    """The summary in sentences."""
    total = summary(trace, outputs)
    lines = [
        f"{total['steps']} steps in {_ms(total['seconds'])}, {total['output_tokens']} tokens "
        f"generated for {total['requests']} requests"
    ]
    if total["prefix_hit_rate"] is not None:
        lines.append(
            f"prefix hit rate {total['prefix_hit_rate']:.1%}; pool occupancy "
            f"{total['pool_occupancy_mean']:.1%} on average, {total['pool_occupancy_peak']:.1%} "
            f"at its peak; {total['memory_saved_by_sharing']:.1%} of the blocks saved by sharing")
    lines.append(
        f"{total['waiting_peak']} requests waited at most; {total['preemptions']} preemptions")
    for name, label in (("time_to_first_token", "time to first token"), ("time_per_output_token",
                                                                         "time per output token")):
        if total[name] is not None:
            lines.append(f"{label}: median {_ms(total[name]['median'])}, "
                         f"99 % within {_ms(total[name]['p99'])}")
    return "\n".join(lines)


def save(path: str | os.PathLike, trace: Trace, outputs: Iterable[RequestOutput] = ()) -> None:
    """Write steps, requests and summary as one JSON file; it appears whole or not at all."""
    outputs = list(outputs)
    requests = [{
        "request": o.request_id, "prompt_tokens": len(
            o.prompt_token_ids), "cached_tokens": o.num_cached_tokens, "output_tokens": [
                len(c.token_ids) for c in o.outputs
            ], "finish_reasons": [c.finish_reason for c in o.outputs],
        "queue_time": o.metrics.queue_time, "time_to_first_token": o.metrics.time_to_first_token,
        "time_per_output_token": o.metrics.time_per_output_token,
        "preemptions": o.metrics.num_preemptions
    } for o in outputs]
    everything = {"summary": summary(trace, outputs), "requests": requests, "steps": steps(trace)}
    write_whole(path, json.dumps(everything, indent=1) + "\n")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
