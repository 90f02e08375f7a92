"""The page of a search: self-contained, safe, complete."""

import json
import re
from html.parser import HTMLParser

import pytest

from beamwright.engine.timeline import NullTimeline, Timeline
from beamwright.errors import InputError
from beamwright.evaluate.tree_page import ShownTree, write_tree_page
from beamwright.tree import StopReason
from fakes import add_step, grow, new_tree

HOSTILE = '</script><b onclick="alert(1)">bold</b><!-- <script>{{title}}{{data}}&amp; \u2028 \ud800'


class Page(HTMLParser):
    """A page as a browser reads it: elements with their attributes, text by element id."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_bytes().decode("ascii")
        self.elements = []
        self.text = {}
        self._open_id = None
        self.feed(self.source)
        self.close()
        self.data = json.loads(self.text["data"], parse_constant=pytest.fail)

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
    def write(*shown, timeline=None, title="A search"):
        path = tmp_path / "page.html"
        write_tree_page(
            [ShownTree(*each) for each in shown], timeline or NullTimeline(), path, title
        )
        return Page(path)

    return write


def clocked():
    """A timeline, and the list whose last item is its time."""
    times = [50.0]
    return Timeline(lambda: times[-1]), times


# --- the page as a document ------------------------------------------------------------------


def test_nothing_is_loaded_from_anywhere(write_page, searched):
    page = write_page(searched)
    assert not re.search(r"https?://|//cdn|@import|url\(|\bfetch\(|XMLHttpRequest", page.source)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    for _, attributes in page.elements:
        assert not {"src", "href", "action", "srcset"} & set(attributes)
    (policy,) = [a["content"] for _, a in page.elements if "http-equiv" in a]
    assert policy.startswith("default-src 'none';")


def test_the_scripts_find_every_element_that_they_ask_for(write_page, searched):
    page = write_page(searched)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    asked = set(re.findall(r'\belement\("([\w-]+)"\)', page.source))
    assert asked
    assert asked <= set(ids)
    assert "{{" not in re.sub(r'<script type="application/json".*?</script>', "", page.source)


def test_scripts_set_text_and_never_markup(write_page, searched):
    page = write_page(searched)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", page.source)


def test_problem_answer_and_title_stand_in_the_page_itself(write_page, searched):
    page = write_page(searched, title="n = 4 < 8")
    assert page.text["problem"] == "What is 1+1?"
    assert page.text["answer"] == "2"
    assert page.text["title"] == "n = 4 < 8"


def test_hostile_text_stays_text(write_page):
    tree = new_tree("p</script>", text=HOSTILE)
    (node,) = grow(tree, tree.root, [f"{HOSTILE} The answer is <i>4</i>"], StopReason.EOS)
    tree.finish(node)
    timeline, _ = clocked()
    timeline.residence(HOSTILE, "host")
    timeline.add(HOSTILE, "h2d", 50.0, 51.0, kind=HOSTILE)
    plain = write_page((new_tree(), None))
    page = write_page((tree, node), timeline=timeline, title=HOSTILE)
    assert page.tags == plain.tags
    assert page.data["title"] == HOSTILE
    assert page.data["trees"][0]["nodes"][1]["text"].startswith(HOSTILE)
    assert page.data["trees"][0]["answer"] == "<i>4</i>"
    assert page.data["timeline"]["spans"][0][1] == HOSTILE
    assert "<" not in page.source.split('id="data">')[1].split("</script>")[0]


def test_a_page_that_cannot_be_written_is_an_input_error(tmp_path, searched):
    with pytest.raises(InputError, match="cannot be written"):
        write_tree_page(
            [ShownTree(*searched)], NullTimeline(), tmp_path / "missing" / "page.html", "title"
        )


def test_a_page_without_a_tree_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no tree"):
        write_tree_page([], NullTimeline(), tmp_path / "page.html", "title")


# --- the tree --------------------------------------------------------------------------------


def test_every_node_is_there_with_its_facts(write_page, searched):
    tree, chosen = searched
    (data,) = write_page(searched).data["trees"]
    nodes = list(tree.nodes())
    assert [node["lineage"] for node in data["nodes"]] == [
        ".".join(map(str, node.lineage)) for node in nodes
    ]
    for node, shown in zip(nodes, data["nodes"], strict=True):
        assert shown["text"] == node.step_text
        assert shown["tokens"] == len(node.token_ids)
        assert shown["start"] == node.start
        assert shown["state"] == node.state
        assert shown["stop"] == node.stop
        assert (nodes[shown["parent"]] if node.parent else None) is node.parent
    assert nodes[data["chosen"]] is chosen
    assert (data["problem"], data["answer"], data["rounds"]) == ("What is 1+1?", "2", 2)


def test_scores_are_numbers_or_null(write_page, searched):
    (data,) = write_page(searched).data["trees"]
    scores = {node["lineage"]: (node["score"], node["step_score"]) for node in data["nodes"]}
    assert scores == {
        "0": (None, None),
        "0.0": (0.9, 0.9),
        "0.0.0": (0.75, 0.5),
        "0.0.1": (None, None),  # minus infinity is no number that JSON knows
        "0.0.2": (None, None),
        "0.1": (0.25, 0.25),
        "0.2": (None, None),
    }


def test_a_search_without_a_chosen_candidate_is_shown(write_page):
    tree = new_tree()
    tree.reason_fewer = "nothing to extend"
    (data,) = write_page((tree, None)).data["trees"]
    assert (data["chosen"], data["answer"]) == (None, None)
    assert data["reason_fewer"] == "nothing to extend"
    assert len(data["nodes"]) == 1


def test_a_step_is_labelled_with_its_round_and_not_its_depth(write_page):
    """As `mcts` goes on where it is best: the second round opens a step beside the first one's."""
    tree = new_tree()
    (first,) = grow(tree, tree.root, ["a"])
    tree.keep(first)
    tree.rounds = 1
    (beside,) = grow(tree, tree.root, ["b"])
    tree.keep(beside)
    tree.rounds = 2
    grow(tree, first, ["c"])
    page = write_page((tree, None))
    (data,) = page.data["trees"]
    assert {n["lineage"]: n["round"] for n in data["nodes"]} == {
        "0": 0, "0.0": 1, "0.0.0": 3, "0.1": 2,
    }  # fmt: skip
    assert not re.search(r"round \$\{[\w.]*depth\}", page.source)


def test_several_trees_are_all_there(write_page, searched):
    page = write_page(searched, (new_tree("other", text="And 2+2?"), None))
    assert [tree["problem"] for tree in page.data["trees"]] == ["What is 1+1?", "And 2+2?"]
    assert page.text["problem"] == "What is 1+1?"


def test_deep_and_wide_trees_are_written_whole(write_page):
    tree = new_tree()
    node = tree.root
    for _ in range(1500):  # deeper than Python's recursion limit
        node, *others = tree.expand(node, 3)
        for each in (node, *others):
            add_step(tree, each, ".")
        tree.keep(node)
    (data,) = write_page((tree, None)).data["trees"]
    assert len(data["nodes"]) == 4501


# --- the timeline ----------------------------------------------------------------------------


def test_residences_become_stays_in_seconds_from_the_first_event(write_page, searched):
    timeline, times = clocked()
    for time_s, segment, change in [
        (51.0, "0", "device"),
        (52.0, "0.0", "device"),
        (53.0, "0", "both"),
        (54.0, "0", "both"),
        (55.0, "0", "host"),
        (56.0, "0.0", "none"),
    ]:
        times.append(time_s)
        timeline.residence(segment, change)
    timeline.add("group 0", "compute", 51.0, 58.0, group=0, share=0.5)
    found = write_page(searched, timeline=timeline).data["timeline"]
    assert found["end"] == 7.0
    assert found["residences"] == {
        "0": [[0.0, 2.0, "device"], [2.0, 4.0, "both"], [4.0, 7.0, "host"]],
        "0.0": [[1.0, 5.0, "device"], [5.0, 7.0, "none"]],
    }
    assert found["spans"] == [["compute", "group 0", 0.0, 7.0, {"group": 0, "share": "0.5"}]]


def test_without_a_timeline_the_page_claims_nothing_about_kv(write_page, searched):
    page = write_page(searched)
    assert page.data["timeline"] == {"end": 0.0, "spans": [], "residences": {}}
    assert "nor where the KV was have been recorded" in page.source
