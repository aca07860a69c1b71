"""Protects the theatre's player: in Chromium, it is used as a reader would."""

import re

import pytest

from paged.lab.theatre import SCENES, all_recordings, page, play, states

RUNS = [(scene.slug, fault) for scene in SCENES.values() for fault in (None, *scene.faults)]


@pytest.fixture(scope="module")
def recordings():
    """Every run without a model, played once, in the order of RUNS."""
    return all_recordings()


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
    shown = opened("#theatre/block-life/33", width=390)
    assert shown.get_attribute(".paged-theatre", "data-layout") == "phone"
    panels = ".panel:visible"
    assert shown.locator(panels).count() == 1 and shown.is_visible(".panel.memory")
    assert excess_width(shown) <= 0
    shown.click(".views >> text=Requests")
    assert shown.is_visible(".panel.requests") and not shown.is_visible(".panel.memory")
    assert excess_width(shown) <= 0
    names = shown.locator(".who > *:visible")
    sides = names.evaluate_all(
        "all => all.map(e => [e.getBoundingClientRect().right, e.closest('.request')"
        ".querySelector('.logicals, .text').getBoundingClientRect().left])")
    assert sides and all(right <= left for right, left in sides), "a name lies over the words"
    left, right = shown.eval_on_selector(
        "[role=tab][aria-selected=true]",
        "tab => [tab.getBoundingClientRect().left, tab.getBoundingClientRect().right]")
    assert 0 <= left < right <= 390, "the scene that is shown is not to be seen among the tabs"
    bottom = shown.evaluate("document.querySelector('.transport').getBoundingClientRect().bottom")
    assert bottom <= 860, "the transport stays in reach"


@pytest.mark.parametrize("width", [390, 700, 1000, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_and_no_scheme_breaks_it(opened, scheme, width):
    shown = opened("#theatre/swap/30", width=width, color_scheme=scheme)
    assert excess_width(shown) <= 0
    color = shown.evaluate("getComputedStyle(document.querySelector('.panel')).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", color)[:3])) < 384) == (scheme == "dark")


EVERY_BEAT = """(every) => {
  const root = document.querySelector(".paged-theatre"), found = {heights: [], wrong: []};
  const note = (what, element) => found.wrong.push(`${what}: .${element.className} in
    ${document.querySelector(".count").textContent}: ${element.textContent.slice(0, 40)}`);
  for (const [number, tab] of document.querySelectorAll(".scenes button").entries()) {
    if (number % every) continue;
    tab.click();
    for (let more = true; more;) {
      found.heights.push(root.offsetHeight);
      for (const element of root.querySelectorAll(".app *")) {
        const words = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!words || element.closest(".hidden") || !element.getClientRects().length) continue;
        const style = getComputedStyle(element);
        if (parseFloat(style.fontSize) < 12) note("small " + style.fontSize, element);
        const cut = style.overflowX !== "visible" && element.scrollWidth > element.clientWidth + 1;
        if (cut && !element.closest("[title]")) note("cut", element);
      }
      more = !document.querySelector("[aria-label^=Next]").disabled;
      root.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
    }
  }
  return found;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("width, every", [(1100, 1), (1280, 4)])  # every scene, or one in four
def test_every_beat_fits_in_one_height_and_can_be_read(opened, width, every):
    """All scenes are as high as each other, at every beat; no word is small, and what
    is cut says the whole when it is pointed at."""
    shown = opened(width=width, reduced_motion="reduce")
    found = shown.evaluate(EVERY_BEAT, every)
    assert len(set(found["heights"])) == 1 and 690 <= found["heights"][0] <= 740
    assert found["wrong"] == []


def test_a_window_that_becomes_narrow_never_scrolls_sideways(opened):
    """Not even before the script has laid out anew: each layout at the width of a phone."""
    shown = opened("#theatre/fork/8", width=390)
    for layout in ("wide", "middle", "phone"):
        wide = shown.evaluate(
            """(layout) => {
          document.querySelector(".paged-theatre").dataset.layout = layout;
          return document.documentElement.scrollWidth - document.documentElement.clientWidth;
        }""", layout)
        assert wide <= 0, layout


def test_the_wires_of_a_table_start_apart(opened):
    """Two requests whose words stand one under the other: each wire can be followed."""
    for address, least in (("fork/24", 4), ("preemption/44", 5)):
        shown = opened(f"#theatre/{address}")
        starts = sorted(
            shown.eval_on_selector_all(
                ".wire", "all => all.map(wire => parseFloat(wire.getAttribute('d').slice(1)))"))
        assert len(starts) >= least
        assert min(b - a for a, b in zip(starts, starts[1:])) > 5, address


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
