"""One self-contained page that shows a search: its tree, its scores, where its KV was and when.

Knows nodes and a timeline; how they are drawn is in `page/`. The page loads nothing from
anywhere, and text of a model reaches it as data only, never as markup.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamwright.evaluate.page_file import page_script, write_page
from beamwright.finite import finite
from beamwright.search.answers import extract_answer
from beamwright.tree import Node, SearchTree

if TYPE_CHECKING:
    from beamwright.engine.timeline import Timeline

_SCRIPTS = (
    "common.js", "layout.js", "tree.js", "details.js", "rounds.js", "timeline.js", "page.js",
)  # fmt: skip


@dataclass(frozen=True)
class ShownTree:
    """A tree to show. chosen: the final candidate that was chosen, if any."""

    tree: SearchTree
    chosen: Node | None


def write_tree_page(trees: Sequence[ShownTree], timeline: Timeline, path: Path, title: str) -> None:
    """Write the page; with several trees it shows one at a time, the first at first.

    Raises:
        InputError: if the file cannot be written.
        ValueError: if there is no tree to show.
    """
    if not trees:
        raise ValueError("no tree to show")
    data: dict[str, Any] = {
        "title": title,
        "trees": [_tree_data(shown) for shown in trees],
        "timeline": _timeline_data(timeline),
    }
    first = data["trees"][0]
    parts = {
        "title": html.escape(title),
        "problem": html.escape(first["problem"]),
        "answer": html.escape(first["answer"] or ""),
        "script": page_script(_SCRIPTS),
        "data": _embedded(data),
    }
    write_page(path, "tree_page", parts)


def _embedded(data: Any) -> str:
    """JSON that is safe inside a script element: no `<`, so neither `</script>` nor `<!--`."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


# --- the tree --------------------------------------------------------------------------------


def _tree_data(shown: ShownTree) -> dict[str, Any]:
    nodes = list(shown.tree.nodes())
    number = {node: i for i, node in enumerate(nodes)}
    chosen = shown.chosen
    return {
        "problem": shown.tree.root.problem_text,
        "answer": None if chosen is None else extract_answer(chosen.text),
        "chosen": None if chosen is None else number[chosen],
        "rounds": shown.tree.rounds,
        "reason_fewer": shown.tree.reason_fewer,
        "nodes": [
            {
                "lineage": _dotted(node),
                "parent": None if node.parent is None else number[node.parent],
                "round": node.round,
                "text": node.step_text if node.turn is None else node.turn.text,
                "notes": node.notes,
                "start": node.start,
                "tokens": len(node.token_ids),
                "score": finite(node.score),
                "step_score": finite(node.step_score),
                "state": str(node.state),
                "stop": None if node.stop is None else str(node.stop),
            }
            for node in nodes
        ],
    }


def _dotted(node: Node) -> str:
    return ".".join(map(str, node.lineage))


# --- the timeline ----------------------------------------------------------------------------


def _timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Seconds from the first thing that happened; loading the models went before it.

    residences: per segment, `[from, to, place]` of every stay, in the order of time.
    """
    spans, residences = timeline.spans, timeline.residences
    times = [*(span.start_s for span in spans), *(r.time_s for r in residences)]
    origin_s = min(times, default=timeline.started_s)
    end_s = max([*times, *(span.end_s for span in spans)], default=origin_s)
    stays: dict[str, list[tuple[float, str]]] = {}
    for residence in residences:
        stays.setdefault(residence.segment, []).append(
            (residence.time_s - origin_s, residence.change)
        )
    return {
        "end": end_s - origin_s,
        "spans": [
            [
                span.track,
                span.name,
                span.start_s - origin_s,
                span.end_s - origin_s,
                {name: _shown(value) for name, value in span.args.items()},
            ]
            for span in sorted(spans, key=lambda span: span.start_s)
        ],
        "residences": {
            segment: list(_intervals(changes, end_s - origin_s))
            for segment, changes in stays.items()
        },
    }


def _intervals(
    changes: Sequence[tuple[float, str]], end_s: float
) -> Iterator[tuple[float, float, str]]:
    """Stays of one segment; the last lasts to the end, and equal neighbours become one."""
    start_s, place = changes[0]
    for time_s, new_place in [*changes[1:], (end_s, "")]:
        if new_place != place:
            yield (start_s, time_s, place)
            start_s, place = time_s, new_place


def _shown(value: Any) -> Any:
    """An arg as JSON can hold it: whole numbers stay numbers, the rest becomes text."""
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)
