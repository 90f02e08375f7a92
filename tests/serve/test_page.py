"""The live page in a real browser: it asks, draws, lets read, and takes no text for markup."""

import json
from contextlib import ExitStack
from xml.etree import ElementTree

import pytest

import feeding
from beamwright import Solver
from beamwright.page.runs import read_runs, write_tree_page
from beamwright.serve.feed import Feed
from beamwright_lab.serve.browser import chromium, chromium_path, serve_app
from served import Served
from tables import beside

HOSTILE = (
    "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>"
    "<svg onload='window.pwned=1'><a href='javascript:window.pwned=1'>x</a> \u2028 \ud800"
)


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright.sync_api")
    if chromium_path() is None:
        pytest.skip("there is no Chromium")
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser):
    """Opens an application's page; afterwards nothing may have been thrown, blocked or logged."""
    opened, said = [], []

    def open_page(address, ignored=(), **options):
        context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "console",
            lambda message: (
                said.append(message.text)
                if message.type in ("error", "warning")
                and not any(word in message.text for word in ignored)
                else None
            ),
        )
        page.goto(address)
        opened.append(context)
        return page

    yield open_page
    for context in opened:
        context.close()
    assert said == []


@pytest.fixture(scope="module")
def live():
    """The address of a page whose server searches with the bundled models."""
    options = {"search": "beam", "n": 8, "width": 4}
    with Solver(model="bundled", verifier="bundled", **options) as solver, Served(solver) as server:
        yield server.url


def a_run(problem="What is 1+1?", **changed):
    """Three rounds; a step changes where it is given by lineage: `{"0.1": {"text": "other"}}`."""
    run = beside(__file__)["run"]
    run[0]["problem"] = problem
    for event in run:
        for step in event.get("nodes", ()):
            step.update(changed.get(step["lineage"], {}))
    return run


@pytest.fixture
def serve_runs():
    """Serves runs; returns the address."""
    with ExitStack() as stack:

        def serve(*runs, **app):
            feed = Feed(most_bytes=1e9)
            for run in runs:
                feed.add(run)
            return stack.enter_context(serve_app(feeding.make_app(feed, **app)))

        yield serve


def until(page, expression):
    """Waits for an expression to hold; Playwright's own way needs a policy that allows `eval`."""
    for _ in range(400):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {expression}")


def drawn_tree(page):
    """What the page knows: it is drawn on a canvas, so the module that draws is asked."""
    return page.evaluate(
        "() => { const { nodes } = window.beamwright.pane.panel.tree;"
        " return { steps: nodes.length, chosen: nodes.filter((n) => n.chosen).length }; }"
    )


# --- a live search ---------------------------------------------------------------------------


def test_a_problem_is_typed_and_its_tree_grows_to_an_answer(visit, live):
    page = visit(live)
    page.wait_for_selector("#ask-problem")
    page.keyboard.press("/")
    page.keyboard.type("Tom has 12 apples and buys 7 more. How many apples does Tom have?")
    page.fill("[data-option=n]", "8")
    page.click("#ask-go")
    until(page, "window.beamwright.pane.tree.over === 'done'")
    page.wait_for_selector("#votes li")
    tree = drawn_tree(page)
    assert tree["steps"] > 8
    assert tree["chosen"] > 1
    assert "Tom has 12 apples" in page.inner_text("#problem")
    assert page.inner_text("#answer")
    assert "\\boxed" in page.inner_text("#details")
    assert page.is_hidden("#stop")


def test_a_stream_that_breaks_is_taken_up_where_it_broke(serve_runs, visit):
    page = visit("about:blank", ignored=["ERR_FAILED"])
    tries = []

    def broken(route):
        tries.append(route.request.url.split("from=")[1])
        body = "".join(json.dumps(event) + "\n" for event in a_run()[:2]) + '{"event": "rou'
        if len(tries) == 1:
            route.fulfill(status=200, body=body)
        elif len(tries) == 2:
            route.abort()
        else:
            route.continue_()

    page.route("**/feed/searches/saved*", broken)
    page.goto(serve_runs(a_run()))
    until(page, "window.beamwright.pane.tree.over === 'done'")
    assert tries == ["0", "2", "2"]
    assert drawn_tree(page)["steps"] == 9


# --- safety ----------------------------------------------------------------------------------


def test_text_of_a_model_is_never_markup(serve_runs, visit):
    hostile = a_run(
        problem=HOSTILE,
        **{
            "0.0": {"text": HOSTILE, "answer": HOSTILE, "vote": HOSTILE, "notes": {"a": HOSTILE}},
            "0": dict.fromkeys(("text", "state", "stop"), HOSTILE),
        },
    )  # fmt: skip
    hostile[-1].update(answer=HOSTILE, reason_fewer=HOSTILE)
    page = visit(serve_runs(hostile))
    page.wait_for_selector("#votes li")
    box = page.locator("#tree").bounding_box()
    for x in range(20, int(box["width"]), 60):  # tips
        page.mouse.move(box["x"] + x, box["y"] + box["height"] / 2)
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.querySelectorAll('img, svg, a, script:not([src])').length") == 0
    for id in ("problem", "answer", "details", "votes"):
        assert "<img src=x" in page.inner_text(f"#{id}")


def test_the_key_is_asked_for_and_kept_for_this_tab_only(serve_runs, visit):
    page = visit(serve_runs(a_run(), key="secret"), ignored=["401"])
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#key-note').textContent.includes('not accepted')")
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    until(page, "window.beamwright.pane.tree.over === 'done'")
    assert page.is_hidden("#key-form")
    kept = page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie, location.href]")
    assert kept[0] == {"beamwright-key": "secret"}
    assert kept[1:3] == [{}, ""]
    assert "secret" not in kept[3]
    page.reload()
    until(page, "window.beamwright.pane.tree.over === 'done'")


# --- reading a tree --------------------------------------------------------------------------


def test_the_saved_tree_page_draws_without_a_word_on_the_console(visit, tmp_path, searched):
    tree, chosen = searched
    write_tree_page(tree, chosen, tmp_path / "page.html", "A search")
    page = visit((tmp_path / "page.html").as_uri())
    assert page.inner_text("#details h3") == "0.0"
    assert page.is_hidden("#ask")
    assert page.is_hidden("#runs")
    page.focus("#tree")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#details h3") == "0"
    page.fill("#round", "1")
    until(page, "window.beamwright.pane.tree.rounds === 1")
    page.check("[name=pruned][value=hide]", force=True)


def test_answers_that_a_prompt_was_written_from_are_selected_by_a_click(serve_runs, visit):
    page = visit(serve_runs(a_run(**{"1": {"text": "Which is right?", "sources": ["0.0", "9"]}})))
    until(page, "window.beamwright.pane.tree.over === 'done'")
    page.focus("#tree")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#details h3") == "1"
    assert page.locator("#details dd button").all_inner_texts() == ["0.0", "9"]
    assert page.is_disabled("#details dd button >> nth=1")
    page.click("#details dd button >> nth=0")
    assert page.inner_text("#details h3") == "0.0"
    assert page.locator("#details dd button").count() == 0


# --- two runs, replay, export ----------------------------------------------------------------


def test_what_is_exported_can_be_opened_again(serve_runs, visit, tmp_path):
    run = a_run(**{"0.0": {"text": HOSTILE}})
    page = visit(serve_runs(run))
    page.wait_for_selector("#votes li")
    with page.expect_download() as json_file:
        page.click("#export-json")
    json_file.value.save_as(tmp_path / "run.json")
    assert read_runs(tmp_path / "run.json") == [run]
    with page.expect_download() as svg_file:
        page.click("#export-svg")
    svg_file.value.save_as(tmp_path / "tree.svg")
    root = ElementTree.parse(tmp_path / "tree.svg").getroot()
    tags = {each.tag.split("}")[1] for each in root.iter()}
    assert tags == {"svg", "path", "rect", "text"}
    assert any("</script>" in (each.text or "") for each in root.iter())
