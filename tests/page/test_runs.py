"""Runs in files: the page of a search is self-contained, safe and complete, and all are read."""

import json
import re
from html.parser import HTMLParser

import pytest
from pydantic import TypeAdapter

from beamwright.engine.decisions import store_answers
from beamwright.errors import InputError
from beamwright.page.runs import (
    Event,
    begin_event,
    dotted_lineage,
    end_event,
    read_runs,
    with_unique_ids,
    write_tree_page,
)
from beamwright.search.answers import Mathematics
from beamwright.tree import StopReason, Turn
from fakes import add_step, grow, new_tree

HOSTILE = '</script><b onclick="alert(1)">bold</b><!-- <script>{{title}}{{data}}&amp; \u2028 \ud800'
ABOUT = dict.fromkeys(("model", "method", "n", "width", "seed"))


class Page(HTMLParser):
    """A page as a browser reads it: elements with their attributes, text by element id."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_bytes().decode("ascii")
        self.elements, self.text, self._open_id = [], {}, None
        self.feed(self.source)
        self.close()
        self.data = json.loads(self.text["data"], parse_constant=pytest.fail)
        (self.run,) = read_runs(path)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open_id = dict(attrs).get("id", tag)

    def handle_endtag(self, tag):
        self._open_id = None

    def handle_data(self, data):
        if self._open_id is not None:
            self.text[self._open_id] = self.text.get(self._open_id, "") + data

    @property
    def tags(self):
        return [tag for tag, _ in self.elements]


@pytest.fixture
def write_page(tmp_path):
    def write(tree, chosen=None, title="A search"):
        path = tmp_path / "trees" / "0007.html"
        path.parent.mkdir(exist_ok=True)
        write_tree_page(tree, chosen, path, title)
        return Page(path)

    return write


def steps(run, kinds=("begin", "round", "round", "end")):
    found = {step["lineage"]: step for event in run for step in event.get("nodes", ())}
    TypeAdapter(list[Event]).validate_python(run)
    assert [event["event"] for event in run] == list(kinds)
    return found


# --- the page as a document ------------------------------------------------------------------


def test_it_loads_nothing_and_its_scripts_find_every_element_and_set_text_alone(
    write_page, searched
):
    page = write_page(*searched)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn|@import|url\(", page.source)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|^import ", page.source, re.MULTILINE)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    for _, attributes in page.elements:
        assert not {"src", "href", "action", "srcset"} & set(attributes)
    (policy,) = [a["content"] for _, a in page.elements if "http-equiv" in a]
    assert policy.startswith("default-src 'none';")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    asked = set(re.findall(r'\belement\("([\w-]+)"\)', page.source))
    assert asked <= set(ids)
    assert "{{" not in re.sub(r'<script type="application/json".*?</script>', "", page.source)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", page.source)


def test_hostile_text_stays_text(write_page):
    tree = new_tree("p</script>", text=HOSTILE)
    (node,) = grow(tree, tree.root, [f"{HOSTILE} The answer is <s>4</s>"], StopReason.EOS)
    store_answers(Mathematics(), [node])
    tree.finish(node)
    plain = write_page(new_tree())
    page = write_page(tree, node, HOSTILE)
    assert page.tags == plain.tags
    assert steps(page.data["events"], ("begin", "round", "end"))["0"]["text"].startswith(HOSTILE)
    assert page.data["events"][-1]["answer"] == "<s>4</s>"
    assert "<" not in page.source.split('id="data">')[1].split("</script>")[0]


# --- the tree --------------------------------------------------------------------------------


def test_every_node_is_there_with_its_facts(write_page, searched):
    tree, chosen = searched
    run = write_page(*searched).run
    found, nodes = steps(run), list(tree.nodes())
    assert sorted(found) == sorted(".".join(map(str, node.lineage[1:])) for node in nodes)
    for node in nodes:
        shown = found[".".join(map(str, node.lineage[1:]))]
        assert shown["text"] == node.step_text
        assert shown["tokens"] == len(node.token_ids)
        assert (shown["state"], shown["stop"]) == (node.state, node.stop)
    assert (run[0]["id"], run[0]["problem"]) == ("0007", "What is 1+1?")
    assert run[-1]["chosen"] == ".".join(map(str, chosen.lineage[1:])) == "0.0"
    assert (run[-1]["state"], run[-1]["answer"], found["0.0"]["vote"]) == ("saved", "2", "2")
    assert [found["0.0"]["step_score"], *(found[name]["score"] for name in ("0.0", "0.1"))] == [
        0.5, 0.75, None  # minus infinity is no number that JSON knows
    ]  # fmt: skip


def test_a_prompt_of_an_aggregation_names_the_answers_that_it_contains(write_page, searched):
    tree, chosen = searched
    prompt = Turn("Which is right?", answers=True, alone=True, sources=((0, 0), (0, 1)))
    asked = tree.ask(tree.root, prompt, (7, 8))
    found = steps(write_page(tree, chosen).run, ("begin", *["round"] * 3, "end"))
    assert found[dotted_lineage(asked)]["sources"] == ["0.0", "0.1"]
    assert not any("sources" in step for name, step in found.items() if name != "3")


def test_deep_and_wide_trees_are_written_whole(write_page):
    tree = new_tree()
    node = tree.root
    for _ in range(1500):  # deeper than Python's recursion limit
        node, *others = tree.expand(node, 3)
        for each in (node, *others):
            add_step(tree, each, ".")
        tree.keep(node)
    assert sum(len(event.get("nodes", ())) for event in write_page(tree).run) == 4501


# --- what is read ----------------------------------------------------------------------------


def test_a_checkpoint(tmp_path, make_solver):
    file = tmp_path / "saved.json"
    with make_solver(n=4, width=2, max_rounds=3, seed=5) as solver:
        solution = solver.solve("1+1", checkpoint=file)
        assert solver.resume(file).tree_hash == solution.tree_hash
    (run,) = read_runs(file)
    assert (run[0]["problem"], run[0]["n"], run[0]["seed"]) == ("1+1", 4, 5)
    chosen = ".".join(map(str, solution.lineage[1:]))
    assert (run[-1]["chosen"], run[-1]["answer"]) == (chosen, solution.answer)
    assert run[-1]["reason_fewer"] == solution.reason_fewer
    saved = {step["lineage"]: step for event in run for step in event.get("nodes", ())}
    for node in solution.tree.nodes():
        assert saved[".".join(map(str, node.lineage[1:]))]["text"] == node.step_text


def test_a_checkpoint_of_a_search_that_was_stopped_has_no_answer(tmp_path, make_solver):
    stopped = {"checkpoint": tmp_path / "saved.json", "on_round": lambda report: 1 // 0}
    with make_solver(n=4, width=2, seed=5) as solver, pytest.raises(ZeroDivisionError):
        solver.solve("1+1", **stopped)
    (run,) = read_runs(stopped["checkpoint"])
    assert (run[-1]["chosen"], run[-1]["answer"]) == (None, None)


def exported(*events, version=1):
    return json.dumps({"format": "beamwright run", "version": version, "events": list(events)})


def test_what_the_page_exported_while_it_grew_has_an_end(tmp_path):
    first = begin_event("a", {"problem": "p", **ABOUT})
    (tmp_path / "run.json").write_text(exported(first))
    assert read_runs(tmp_path / "run.json") == [[first, end_event("saved")]]


DATA = '<script type="application/json" id="data">'


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "neither"),
        ("[1]", "neither"),
        ('{"version": 1}', "neither"),
        ("[" * 10_000, "neither"),
        (f"{DATA}{{}}</script>", "damaged"),
        (f'{DATA}{{"trees": [{{"nodes": []}}]}}</script>', "older"),
        (f"{DATA}{exported({'event': 'begin'})}</script>", "damaged run"),
        (exported(version=2), "version 2"),
        (exported(), "'begin'"),
        (exported(end_event("saved")), "'begin'"),
        (exported({"event": "begin", "id": 5}), "damaged run"),
        ('{"prompt_tokens": 3}', "neither"),
        ('{"format": "beamwright checkpoint"}', "version"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, content, why):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError, match=why) as refused:
        read_runs(tmp_path / "run.json")
    assert "run.json" in str(refused.value)


def test_files_and_folders_that_are_not_there_are_named(write_page, searched, tmp_path):
    for path, why in ((tmp_path, "holds no trees"), (tmp_path / "none.json", "cannot be read")):
        with pytest.raises(InputError, match=why):
            read_runs(path)
    with pytest.raises(InputError, match="cannot be written"):
        write_tree_page(*searched, tmp_path / "missing" / "page.html", "title")
    write_page(*searched)
    assert [run[0]["id"] for run in read_runs(tmp_path)] == ["0007"], "trees of an evaluation"


def test_ids_are_told_apart_and_stand_in_an_address():
    def run(name):
        return [begin_event(name, {"problem": "p", **ABOUT}), end_event("saved")]

    runs = with_unique_ids([run("a"), run("a"), run("a-2"), run("../b c/d"), run("..")])
    assert [each[0]["id"] for each in runs] == ["a", "a-2", "a-2-2", "-b-c-d", "run"]
