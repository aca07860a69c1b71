"""Protects the theatre: a recording says what the engine did, and the page shows the recording.

Every scene, with its planted faults, is recorded and replayed: its states must be those that the
engine had when it stopped to be looked at. The player is used in Chromium as a reader would.
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
from paged.lab.theatre import SCENES, Recorder, all_recordings, page, play, states
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
        "first-prompt": {"WRITE", "READ", "SAMPLE"}, "growth": {
            "KV_BLOCK_ALLOCATE", "PREFIX_REGISTER"
        }, "shared-prefix": {"KV_BLOCK_REUSE",
                             "REFERENCE_DROP"}, "fork": {"KV_BLOCK_COPY", "MOVE", "KV_BLOCK_REUSE"},
        "preemption": {"ADMISSION_REFUSED",
                       "PREFIX_FORGET"}, "swap": {"SWAP_OUT", "SWAP_IN", "MOVE"}, "eviction": {
                           "KV_BLOCK_REACTIVATE", "PREFIX_FORGET"
                       }, "chunked-prefill": {"SCHEDULE_PREFILL", "SCHEDULE_DECODE"},
        "beam-search": {"KV_BLOCK_REUSE", "REFERENCE_DROP"}
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
    assert all(file != "engine.py" for file in lines.values()), "the line is the runner's own"


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


# ── the player
# ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def html(recordings, tmp_path_factory):
    file = tmp_path_factory.mktemp("theatre") / "theatre.html"
    file.write_text(page(recordings, "Theatre"), encoding="utf-8")
    return file


@pytest.fixture
def opened(browser, html):
    """opened(address, **context options): a page, closed at the end, without errors by then."""
    contexts, wrong = [], []

    def open_(address: str = "", width: int = 1280, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 860}, **options))
        shown = contexts[-1].new_page()
        shown.on("pageerror", lambda error: wrong.append(f"script error: {error}"))
        shown.on("console", lambda line: line.type == "error" and wrong.append(line.text))
        shown.on(
            "request", lambda sent: sent.url.startswith(
                ("file:", "data:")) or wrong.append(f"outside: {sent.url}"))
        shown.goto(html.as_uri() + address)
        return shown

    yield open_
    for context in contexts:
        context.close()
    assert not wrong


def count(shown) -> str:
    return shown.inner_text(".count")


def excess_width(shown) -> int:
    return shown.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_keys_step_by_beat_and_by_step(opened, recordings):
    shown = opened()
    beats = recordings[0]["beats"]
    shown.focus(".paged-theatre")
    assert count(shown) == f"step 0 · 1/{len(beats)}"
    shown.keyboard.press("ArrowRight")
    assert count(shown) == f"step 1 · 2/{len(beats)}"
    assert shown.inner_text(".say") == beats[1]["say"]
    shown.keyboard.press("Shift+ArrowRight")
    second = next(i for i, beat in enumerate(beats) if beat["step"] == 2)
    assert count(shown) == f"step 2 · {second + 1}/{len(beats)}"
    shown.keyboard.press("Shift+ArrowLeft")
    assert count(shown) == f"step 1 · 2/{len(beats)}"
    shown.keyboard.press("End")
    assert shown.inner_text(".say") == beats[-1]["say"] and shown.is_disabled("[aria-label^=Next]")
    shown.keyboard.press("Home")
    assert count(shown).endswith(f"1/{len(beats)}")
    shown.keyboard.press("Space")
    assert shown.get_attribute(".say", "aria-live") == "off", "silent while it plays"
    shown.wait_for_function("document.querySelector('.count').textContent.includes('2/')",
                            timeout=600 + 55 * len(beats[0]["say"]) + 5000)
    shown.keyboard.press("Space")
    assert shown.get_attribute(".say", "aria-live") == "polite"


STEP_THROUGH = """total => Array.from({length: total}, () => {
  const blocks = [...document.querySelectorAll(".stage .block")];
  const counts = blocks.map(block => block.querySelectorAll(".held .badge").length);
  const press = new KeyboardEvent("keydown", {key: "ArrowRight"});
  document.querySelector(".paged-theatre").dispatchEvent(press);
  return counts;
})"""


def test_all_states_replay_in_the_browser(opened, recordings):
    """Every beat of every run draws without an error, and shows the counts of its state."""
    shown = opened()
    for recording in recordings:
        fault = recording.get("fault", {}).get("name")
        address = recording["slug"] + (f"+{re.sub('[^a-z0-9]+', '-', fault)}" if fault else "")
        shown.evaluate(f"location.hash = '#theatre/{address}/1'")
        total = len(recording["beats"])
        shown.wait_for_function(
            f"document.querySelector('.count').textContent.endsWith('/{total}')")
        held = shown.evaluate(STEP_THROUGH, total)
        assert held == [state["ref"] for state in states(recording)], address


def test_an_address_opens_its_beat_and_follows_the_reader(opened, recordings):
    shown = opened("#theatre/preemption/20")
    assert "20/" in count(shown)
    assert shown.inner_text("[role=tab][aria-selected=true]") == SCENES["preemption"].title
    shown.focus(".paged-theatre")
    shown.keyboard.press("ArrowLeft")
    assert shown.url.endswith("#theatre/preemption/19")
    shown.click("text=Eviction")
    assert shown.url.endswith("#theatre/eviction/1")
    assert "/" in count(opened("#theatre/eviction/9999")), "a beat that is no more: the last one"


def test_pointing_lights_up_counterparts_with_the_sum(opened, recordings):
    recording = recordings[[slug for slug, _ in RUNS].index("growth")]
    beat, state = next((i, state) for i, state in enumerate(states(recording))
                       if len(state["requests"]["A"]["table"]) == 2)
    shown = opened(f"#theatre/growth/{beat + 1}")
    token = shown.locator("[data-key='t:A:4']")
    token.hover()
    block = state["requests"]["A"]["table"][1]
    assert shown.inner_text(".sum").endswith(f"= {block} · 4 + 0 = {block * 4}")
    assert "table[4 // 4] · 4 + 4 % 4" in shown.inner_text(".sum")
    lit = set(shown.eval_on_selector_all(".lit", "all => all.map(e => e.dataset.key)"))
    assert lit >= {"t:A:4", "c:A:1", f"b:{block}", f"s:{block * 4}"} and f"b:{1 - block}" not in lit
    shown.focus(".paged-theatre")
    shown.keyboard.press("ArrowDown")
    assert shown.evaluate("document.activeElement.dataset.key"), "the keyboard reaches them, too"
    assert shown.locator(".lit").count() > 1


def test_prediction_asks_first_and_says_what_was_right(opened, recordings):
    recording = recordings[[slug for slug, _ in RUNS].index("preemption")]
    asked = next(i for i, beat in enumerate(recording["beats"])
                 if beat.get("ask", {}).get("question", "").endswith("Who gives way?"))
    question = recording["beats"][asked]["ask"]
    shown = opened(f"#theatre/preemption/{asked}")
    shown.click("text=Predict")
    shown.keyboard.press("ArrowRight")
    assert question["question"] in shown.inner_text(".ask") and f"{asked}/" in count(shown)
    assert not shown.is_visible(".say"), "the answer is not given away"
    missed = (question["answer"] + 1) % len(question["options"])
    shown.keyboard.press(str(missed + 1))
    assert shown.inner_text(".say").startswith(f"No: {question['options'][question['answer']]}.")
    shown.keyboard.press("ArrowRight")
    assert f"{asked + 1}/" in count(shown) and not shown.is_visible(".ask")


def test_a_planted_fault_is_red(opened, recordings):
    shown = opened("#theatre/fork/1")
    shown.select_option("select", label="missing copy-on-write")
    assert shown.is_visible(".fault") and "Planted" in shown.inner_text(".fault")
    assert shown.locator(".slot.wrong").count() >= 1, "it opens at the failing read"
    assert shown.inner_text(".phase") == "wrong" and "+missing-copy-on-write/" in shown.url
    shown.select_option("select", index=0)
    assert not shown.is_visible(".fault") and shown.locator(".slot.wrong").count() == 0


def test_on_a_phone_there_is_one_panel_at_a_time(opened):
    shown = opened("#theatre/fork/8", width=390)
    assert shown.get_attribute(".paged-theatre", "data-layout") == "phone"
    panels = ".panel:visible"
    assert shown.locator(panels).count() == 1 and shown.is_visible(".panel.memory")
    assert excess_width(shown) <= 0
    shown.click(".views >> text=Requests")
    assert shown.is_visible(".panel.requests") and not shown.is_visible(".panel.memory")
    assert excess_width(shown) <= 0
    bottom = shown.evaluate("document.querySelector('.transport').getBoundingClientRect().bottom")
    assert bottom <= 860, "the transport stays in reach"


@pytest.mark.parametrize("width", [390, 700, 1000, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_and_no_scheme_breaks_it(opened, scheme, width):
    shown = opened("#theatre/swap/30", width=width, color_scheme=scheme)
    assert excess_width(shown) <= 0
    color = shown.evaluate("getComputedStyle(document.querySelector('.panel')).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", color)[:3])) < 384) == (scheme == "dark")


def test_reduced_motion_jumps(opened):
    for motion, moves in (("reduce", False), ("no-preference", True)):
        shown = opened("#theatre/fork/1", reduced_motion=motion)
        index = next(
            i for i, beat in enumerate(play(SCENES["fork"])["beats"]) if beat["event"] == "MOVE")
        shown.evaluate(f"location.hash = '#theatre/fork/{index + 1}'")
        shown.wait_for_selector(".copy", state="attached")
        name = shown.evaluate("getComputedStyle(document.querySelector('.copy')).animationName")
        assert (name != "none") == moves


def test_a_screen_reader_gets_tables_and_a_list(opened, recordings):
    shown = opened("#theatre/first-prompt/6")
    captions = shown.eval_on_selector_all(".app caption", "all => all.map(c => c.textContent)")
    assert any("blocks" in caption for caption in captions) and len(captions) >= 3
    assert shown.locator(".beats li").count() == len(recordings[0]["beats"])
    assert shown.get_attribute("[aria-label=Beat]", "aria-valuetext").startswith("step 1, beat 6")
    unnamed = shown.eval_on_selector_all(
        ".app button, .app select, .app input",
        "all => all.filter(e => !(e.textContent.trim() || e.getAttribute('aria-label'))).length")
    assert unnamed == 0


def test_without_javascript_and_on_paper_key_beats_are_pictures(opened, recordings):
    shown = opened(java_script_enabled=False)
    key = sum(beat.get("key", False) for r in recordings if "fault" not in r for beat in r["beats"])
    assert shown.locator(".static figure .pool").count() == key
    assert shown.locator(".static figcaption").first.is_visible()
    printed = opened()
    printed.emulate_media(media="print")
    assert printed.locator(".static figure").first.is_visible()
    assert not printed.locator(".transport").is_visible()
