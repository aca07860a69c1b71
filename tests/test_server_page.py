"""The page at /, in a browser: it chats, by keyboard alone, on a phone and in the dark; it stops an
answer, asks for a key, and asks nobody outside for anything."""

import time

import pytest

from tests.servers import serving

pytestmark = pytest.mark.book


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.fixture
def page(browser):
    """A page that notes what goes wrong in it."""
    context = browser.new_context(viewport={"width": 390, "height": 700}, color_scheme="dark")
    page = context.new_page()
    page.problems, page.asked = [], []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda line: page.problems.append(line.text)
            if line.type == "error" else None)
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    context.close()


def answers(page, number: int) -> list[str]:
    """The answers, once there are so many and the last is complete."""
    page.wait_for_function(
        "number => document.querySelectorAll('.assistant').length === number "
        "&& document.getElementById('stop').hidden", arg=number)
    return page.locator(".assistant").all_inner_texts()


def test_a_conversation_by_keyboard_on_a_phone_in_the_dark(page, server):
    page.goto(server.url)
    page.wait_for_function("() => document.getElementById('model').textContent === 'tiny'")
    page.keyboard.type("one <b>")  # the field has the focus
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line")
    page.keyboard.press("Enter")
    first = answers(page, 1)
    assert page.locator(".user").inner_text() == "one <b>\nline"
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    both = answers(page, 2)
    assert both[0] == first[0] and page.locator(".error").count() == 0
    # Nothing sticks out, and the sides of the field are on the screen.
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator("#send").bounding_box()
    assert box["x"] + box["width"] <= 390 and box["height"] >= 40
    red, green, blue = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert max(red, green, blue) < 60
    assert page.problems == [] and all(url.startswith((server.url, "data:"))
                                       for url in page.asked), page.asked
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#log > div").count() == 0


@pytest.mark.parametrize("how", ["Escape", "Stop"])
def test_an_answer_is_stopped(page, server, how):
    launch = server.llm.engine.launch

    def slow(batch):
        time.sleep(0.05)
        return launch(batch)

    server.llm.engine.launch = slow
    try:
        page.goto(server.url)
        page.wait_for_function("() => document.getElementById('model').textContent === 'tiny'")
        page.keyboard.type("go on")
        page.keyboard.press("Enter")
        page.wait_for_selector("#stop:visible")
        page.wait_for_function("() => document.querySelector('.assistant').textContent.length > 0")
        if how == "Stop":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        page.wait_for_selector("text=Stopped.")
        assert page.locator("#send").is_visible() and page.locator(".error").count() == 0
        server.wait_until_empty(5)
    finally:
        server.llm.engine.launch = launch


def test_a_key_is_asked_for_and_a_failure_is_shown(page):
    with serving(keys=["open sesame"]) as server:
        page.goto(server.url)
        page.wait_for_selector("#key:visible")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=no valid API key")
        page.locator("#key").fill("open sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#text:visible")
        page.locator("#text").fill("x" * 600)
        page.keyboard.press("Enter")
        page.wait_for_selector("text=max_model_len is 512")
        server.server.door.closing = True
        page.locator("#text").fill("hello")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=the server is about to end")
