"""Protects the theatre: a recording says what the engine did, and the page shows the recording.

Every scene, with its planted faults, is recorded and replayed: its states must be those that the
engine had when it stopped to be looked at.
"""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paged.block_pool import BlockPool
from paged.engine import Engine, EngineConfig
from paged.lab.faults import faults
from paged.lab.oracle import OracleRunner, RunAheadOracle
from paged.lab.theatre import SCENES, Recorder, all_recordings, play, states
from paged.lab.theatre.deltas import apply, delta
from paged.lab.theatre.scenes import Words
from paged.models.loader.default_model import FILE, cache_directory
from paged.sampling import SamplingParams
from paged.trace import Trace

RUNS = [(scene.slug, fault) for scene in SCENES.values() for fault in (None, *scene.faults)]


@pytest.fixture(scope="module")
def recordings():
    """Every run without a model, played once, in the order of RUNS."""
    return all_recordings()


@pytest.fixture(scope="module")
def model():
    if not (cache_directory() / FILE).exists():
        pytest.skip("the default model is not in the cache")
    from paged.models.loader import load
    return load("default", "cpu", "float32", False)


# ── deltas
# ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("old, new", [
    ({}, {"a": [1, 2], "b": None}),
    ({"a": 1, "b": 2}, {"b": 3}),
    ({"a": [0] * 8}, {"a": [0] * 7 + [1]}),
    ({"a": [1, 2, 3]}, {"a": [1, 2, 3, 4, 5]}),
    ({"a": [1, 2, 3]}, {"a": []}),
    ({"a": [1, 2, 3, 4, 5]}, {"a": [2, 3, 4, 5]}),
    ({"a": [1, 2, 3, 4, 5, 6]}, {"a": [1, 2, 9, 5, 6]}),
    ({"a": [1, 1, 1, 1, 1]}, {"a": [1, 1, 1]}),
    ({"a": [1, 1, 1]}, {"a": [1, 1, 2, 1, 1, 1]}),
    ({"a": [[1, "x"], None, None]}, {"a": [[1, "x"], None, [2, None]]}),
    ({"a": 0}, {"a": None}),
])
def test_a_delta_leads_from_old_to_new(old, new):
    before = json.dumps(old)
    change = json.loads(json.dumps(delta(old, new)))
    assert json.dumps(apply(old, change)) == json.dumps(new)
    assert json.dumps(old) == before, "applying a delta changes nothing"
    assert delta(new, new) is None


# ── recordings
# ───────────────────────────────────────────────────────────────────────────────────────


def seen_directly(engine) -> dict:
    """What a state must say, read off the engine without the recorder."""
    pool, scheduler = engine.block_pool, engine.scheduler
    return {
        "ref": list(pool.ref_cnt), "queue": pool.free_queue(),
        "waiting": [r.request_id for r in scheduler.waiting],
        "running": [r.request_id for r in scheduler.running], "requests": {
            r.request_id: (list(r.token_ids), r.num_computed_tokens, list(r.block_table))
            for r in scheduler.waiting + scheduler.running
        }, "known": 0 if engine.prefix_cache is None else len(engine.prefix_cache)
    }


def as_recorded(state: dict) -> dict:
    """The same out of a recorded state."""
    queued = state["waiting"] + state["running"]
    return {
        "ref": state["ref"], "queue": state["queue"], "waiting": state["waiting"],
        "running": state["running"], "requests": {
            name: (request["tokens"], request["computed"], request["table"])
            for name, request in state["requests"].items() if name in queued
        }, "known": len(state["names"])
    }


@contextmanager
def watched(monkeypatch):
    """Collects (beats so far, what the engine is then) after each step of any engine."""
    seen, step = [], Engine.step

    def checked(engine):
        outputs = step(engine)
        engine.check_integrity()
        seen.append((len(engine.trace.beats), seen_directly(engine)))
        return outputs

    with monkeypatch.context() as patches:
        patches.setattr(Engine, "step", checked)
        yield seen


@pytest.mark.parametrize("slug", SCENES)
def test_replayed_states_are_the_engines(slug, monkeypatch):
    with watched(monkeypatch) as seen:
        recording = json.loads(json.dumps(play(SCENES[slug])))
    replayed = list(states(recording))
    assert len(seen) == recording["beats"][-1]["step"] >= 3
    for num_beats, state in seen:
        assert as_recorded(replayed[num_beats - 1]) == state


@pytest.mark.parametrize("slug", ["shared-prefix", "eviction", "preemption"])
def test_the_radix_tree_is_followed_as_the_hashes_are(slug, monkeypatch):
    scene = SCENES[slug]
    with watched(monkeypatch) as seen:
        recording = play(replace(scene, sizes=scene.sizes | {"prefix_cache": "radix"}))
    replayed = list(states(recording))
    assert max(state["known"] for _, state in seen) > 1
    for num_beats, state in seen:
        assert as_recorded(replayed[num_beats - 1]) == state


def test_a_big_pool_shows_the_blocks_that_matter():
    """A recording of a pool of thousands stays small, for its changes are."""
    scene = replace(SCENES["growth"], sizes=SCENES["growth"].sizes | {"num_blocks": 2000})
    recording = play(scene)
    assert all(len(json.dumps(beat["set"])) < 2_000 for beat in recording["beats"][1:])


def test_every_beat_has_a_sentence_a_phase_and_a_line_of_the_package(recordings):
    for recording in recordings:
        for beat in recording["beats"]:
            assert beat["say"] and beat["say"] != beat["event"], beat
            assert not re.search(r"None|\b1 blocks\b|[{}]", beat["say"]), beat["say"]
            assert beat["phase"] in ("schedule", "move", "write", "read", "sample", "release")
            for number in beat["at"]:
                file, function, line, source = recording["frames"][number]
                first = int(source.rpartition(":")[2])
                listing = recording["sources"][source]
                assert f"def {function}" in "".join(listing[:4]), source
                assert first <= line < first + len(listing), (source, line)
        assert 3 <= sum(beat.get("key", False) for beat in recording["beats"]) <= 6


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "+".join(filter(None, run)))
def test_what_each_scene_is_about_happens(recordings, run):
    recording = recordings[RUNS.index(run)]
    slug, fault = run
    events = {beat["event"] for beat in recording["beats"]}
    moves = {(beat["fields"].get("before"), beat["fields"].get("after"))
             for beat in recording["beats"]}
    wrong = any(beat["fields"].get("wrong") for beat in recording["beats"])
    if fault is not None:
        told = recording["fault"]
        assert fault in faults() and told["why"]
        assert wrong or told["error"] or told["verdict"].startswith("check_integrity"), told
        return
    assert not wrong
    wanted = {
        "first-prompt": {"WRITE", "READ",
                         "SAMPLE"}, "growth": {"KV_BLOCK_ALLOCATE", "PREFIX_REGISTER"},
        "block-life": {"KV_BLOCK_COPY", "KV_BLOCK_REUSE", "REFERENCE_DROP",
                       "KV_BLOCK_RELEASE"}, "shared-prefix": {"KV_BLOCK_REUSE", "REFERENCE_DROP"},
        "fork": {"KV_BLOCK_COPY", "MOVE",
                 "KV_BLOCK_REUSE"}, "preemption": {"ADMISSION_REFUSED", "PREFIX_FORGET"}, "swap": {
                     "SWAP_OUT", "SWAP_IN", "MOVE"
                 }, "eviction": {"KV_BLOCK_REACTIVATE", "PREFIX_FORGET"}, "chunked-prefill": {
                     "SCHEDULE_PREFILL", "SCHEDULE_DECODE"
                 }, "beam-search": {"KV_BLOCK_REUSE", "REFERENCE_DROP"}
    }[slug]
    assert wanted <= events
    if slug in ("preemption", "swap"):
        assert ("running", "waiting" if slug == "preemption" else "swapped") in moves


def test_questions_have_right_answers(recordings):
    asked = 0
    for recording in recordings:
        before = {}
        for beat, state in zip(recording["beats"], states(recording)):
            question = beat.get("ask")
            if question:
                asked += 1
                right = question["options"][question["answer"]]
                if question["question"].startswith("A block is needed. Which"):
                    assert right == f"block {before['queue'][0]}", "the head of the queue"
                elif question["question"].endswith("Who gives way?"):
                    gone = next(b for b in recording["beats"][recording["beats"].index(beat):]
                                if b["event"] == "STATE_TRANSITION")
                    assert right == gone["fields"]["request"]
            before = state
    assert asked > 20


def test_the_memory_is_shown_as_it_is():
    """The cells of the fork: the copy holds what its source holds, and then its own token."""
    recording = play(SCENES["fork"])
    replayed = list(states(recording))
    move = next(i for i, beat in enumerate(recording["beats"]) if beat["event"] == "MOVE")
    (source, copy), = recording["beats"][move]["fields"]["copies"]
    slots, size = replayed[move]["slots"], recording["sizes"]["block_size"]
    held = [slots[source * size + i] for i in range(size)]
    copied = [slots[copy * size + i] for i in range(size)]
    assert copied[:2] == held[:2] and held[0] is not None
    write = recording["beats"][move + 1]
    assert write["event"] == "WRITE"
    written = [replayed[move + 1]["slots"][slot] for slot in write["fields"]["slots"]]
    requests = replayed[move + 1]["requests"]
    assert [token for token, _ in written] == [
        requests[name]["tokens"][requests[name]["computed"]] for name in write["fields"]["requests"]
    ]


def test_a_recording_is_reproducible(recordings):

    def steady(recording):  # STEP has seconds
        for beat in recording["beats"]:
            beat["fields"].pop("seconds", None)
        return recording

    again = all_recordings()
    assert [steady(r) for r in json.loads(json.dumps(recordings))] == [
        steady(r) for r in json.loads(json.dumps(again))
    ]


@pytest.mark.parametrize("runner", [OracleRunner, RunAheadOracle])
def test_watching_changes_no_output(runner):
    """With and without a recorder the same tokens come, whichever way the engine runs."""

    def run(make):
        outputs = {}
        config = EngineConfig(num_blocks=6, block_size=2, max_num_seqs=3, max_num_batched_tokens=7,
                              preemption="swap")
        engine = make(config, runner(6, 2, 6))
        for prompt in ([1, 2, 3, 0], [1, 2, 3, 0, 1], [2, 2]):
            engine.add_request(prompt, SamplingParams(max_tokens=6))
        while engine.has_unfinished():
            for output in engine.step():
                outputs[output.request_id] = output.outputs[0].token_ids
        return outputs

    recorder = Recorder()
    assert run(recorder.engine) == run(Engine)
    recording = recorder.recording("tokens")
    assert not any(beat["fields"].get("wrong") for beat in recording["beats"])
    sampled = {}
    for beat in recording["beats"]:
        for name, token in beat["fields"].get("tokens", ()) if beat["event"] == "SAMPLE" else ():
            sampled.setdefault(name, []).append(token)
    assert {name: tokens[:6] for name, tokens in sampled.items()} == run(Engine)


@pytest.mark.parametrize("runner", [OracleRunner, RunAheadOracle])
def test_after_a_failed_step_the_picture_starts_over_as_the_engine_does(runner):

    class FailsOnce(runner):
        steps = 0

        def execute(self, batch):
            self.steps += 1
            if self.steps == 4:
                raise RuntimeError("the fourth step fails")
            return super().execute(batch)

    recorder = Recorder()
    engine = recorder.engine(EngineConfig(num_blocks=9, block_size=2, max_num_seqs=2),
                             FailsOnce(9, 2))
    for prompt in ([1, 2, 3, 0], [1, 2, 3, 1, 1], [3, 3]):
        engine.add_request(prompt, SamplingParams(max_tokens=6))
    seen, failed = [], 0
    while engine.has_unfinished():
        try:
            engine.step()
        except RuntimeError:
            failed = len(recorder.beats)
        engine.check_integrity()
        seen.append((len(recorder.beats), seen_directly(engine)))
    recording = recorder.recording("fails once")
    beats, replayed = recording["beats"], list(states(recording))
    for num_beats, state in seen:
        assert as_recorded(replayed[num_beats - 1]) == state
    events = [beat["event"] for beat in beats[:failed]]
    assert events[-4:] == ["FAILED"] + ["STATE_TRANSITION"] * 3, "it fails, then all wait again"
    assert "fourth step" in beats[failed - 4]["say"] and "waits still" in beats[failed - 1]["say"]
    assert replayed[failed - 4]["names"] and not replayed[failed - 1]["names"]
    assert not any(beat["fields"].get("wrong") for beat in beats)


def test_a_recorder_that_is_off_keeps_nothing():
    recorder = Recorder(limit=0)
    engine = recorder.engine(EngineConfig(num_blocks=4, block_size=2), OracleRunner(4, 2))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
    while engine.has_unfinished():
        engine.step()
    assert recorder.events == [] and recorder.beats == []


def test_new_events_cost_nothing_when_nobody_listens():

    class Loud(Trace):

        def emit(self, event, **fields):
            if not event.startswith("KV_BLOCK"):
                raise AssertionError(f"{event} is emitted into a trace that keeps nothing")

    pool = BlockPool(4, Loud(limit=0))
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.free(blocks)
    pool.free(blocks)


# ── the real model
# ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.default_model
@pytest.mark.parametrize("slug", ["fork", "swap"])
def test_replayed_states_are_the_engines_with_the_model(model, slug, monkeypatch):
    with watched(monkeypatch) as seen:
        recording = json.loads(json.dumps(play(SCENES[slug], model)))
    replayed = list(states(recording))
    for num_beats, state in seen:
        assert as_recorded(replayed[num_beats - 1]) == state
    bars = [cell[1] for cell in replayed[-1]["slots"] if cell is not None]
    assert len(bars) > 8 and all(re.fullmatch(r"\d{12}", digits) for digits in bars)
    assert len(set(bars)) > len(bars) // 2, "tokens differ in K"
    lines = {
        beat["event"]: recording["frames"][beat["at"][-1]][0]
        for beat in recording["beats"] if beat["event"] in ("WRITE", "READ", "SAMPLE")
    }
    assert lines == dict.fromkeys(("WRITE", "READ", "SAMPLE"), "runner.py")
    moved = [beat for beat in recording["beats"] if beat["event"] == "MOVE"]
    assert moved
    for beat in moved:
        assert recording["frames"][beat["at"][-1]][:2] == ["runner.py", "launch"]


@pytest.mark.default_model
def test_a_copy_has_the_bars_of_its_source(model):
    recording = play(SCENES["fork"], model)
    move = next(i for i, beat in enumerate(recording["beats"]) if beat["event"] == "MOVE")
    state = list(states(recording))[move]
    (source, copy), = recording["beats"][move]["fields"]["copies"]
    size = recording["sizes"]["block_size"]
    assert state["slots"][copy * size] == state["slots"][source * size] != None  # noqa: E711


@pytest.mark.default_model
def test_the_fault_is_seen_by_the_oracle_and_by_the_user(model):
    recording = play(SCENES["fork"], model, "copy without contents")
    told = recording["fault"]
    assert "nobody has written it" in told["verdict"] and told["error"] is None
    assert any(right != got for _, right, got in told["rows"])


# ── the command
# ───────────────────────────────────────────────────────────────────────────────────────


class FakeLLM:
    """Takes the arguments of LLM; its model is none."""

    def __init__(self, model, **arguments):
        from paged.lab.theatre.scenes import WordModel
        sizes = {
            key: value
            for key, value in arguments.items() if key not in ("device", "enforce_eager")
        }
        self.tokenizer, self.runner = Words(), WordModel()
        config = EngineConfig(max_model_len=sizes["num_blocks"] * sizes["block_size"], **sizes)
        self.engine = SimpleNamespace(config=config, eos_token_ids=frozenset(), vocab_size=None)


def command(monkeypatch, *arguments) -> int:
    from paged import llm
    from paged.__main__ import main
    monkeypatch.setattr(llm, "LLM", FakeLLM)
    return main(["theatre", *arguments])


def outside(html: str) -> list[str]:
    """Addresses outside the file, but for the one that names SVG."""
    return [
        url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<)]*", html)
        if url.startswith("http") and not url.startswith("http://www.w3.org/2000/svg")
    ]


def test_the_command_writes_a_file_that_needs_nothing_else(monkeypatch, tmp_path, capsys):
    file = tmp_path / "run.html"
    assert command(monkeypatch, "one two three four five", "one two three four six", "-o",
                   str(file), "--num-blocks", "9", "--every", "2") == 0
    html = file.read_text(encoding="utf-8")
    assert outside(html) == [] and "src=" not in html and "@import" not in html
    assert "begins like A" in html, "the second prompt shares the first one's block"
    assert capsys.readouterr().out.startswith("one two three four five")


@pytest.mark.parametrize("arguments, says", [
    (["a", "-n", "2", "--beam-width", "2"], "leave -n"),
    (["a", "-o", "nowhere/run.html"], "cannot be written"),
    (["a", "--every", "-1"], "0 or more"),
    (["a b c d e f g h", "--num-blocks", "1"], "raise max_model_len and num_blocks"),
    (["a", "--max-tokens", "9999", "--num-blocks", "9999"], "stay below"),
    (["a", "--preemption", "swap", "--block-size", "0"], "block_size"),
])
def test_the_command_refuses_in_a_sentence(monkeypatch, tmp_path, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
    assert not list(tmp_path.iterdir()), "nothing is written"
