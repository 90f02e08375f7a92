"""A page from its parts in `page/`: one file that loads nothing from anywhere. Knows no content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from beamwright.files import write_whole

_PARTS = Path(__file__).parent / "page"
_MODULE_WORDS = re.compile(r"^(?:import .*\n|export )", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def page_part(name: str) -> str:
    """The text of a file in `page/`."""
    return (_PARTS / name).read_text(encoding="ascii")


def page_script(names: Sequence[str]) -> str:
    """Modules of `page/` as one script: each may name what those before it in `names` export."""
    return "\n".join(_MODULE_WORDS.sub("", page_part(name)) for name in names)


def write_page(path: Path, name: str, parts: Mapping[str, str], styles: str = "") -> None:
    """Write the page `name` with its placeholders filled in.

    parts: markup, so text of a user is escaped already; a page may run scripts if it has a
    `script`. styles: rules before the page's own.

    Raises:
        InputError: if the file cannot be written.
    """
    style = page_part("base.css") + styles + page_part(f"{name}.css")
    scripts = "; script-src 'unsafe-inline'" if "script" in parts else ""
    head = _fill("head.html", {"title": parts["title"], "style": style, "scripts": scripts})
    page = _fill(f"{name}.html", {**parts, "head": head})
    # ASCII throughout: a model's text may hold what UTF-8 cannot.
    write_whole(path, page.encode("ascii", "xmlcharrefreplace").decode("ascii"))


def _fill(name: str, parts: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], page_part(name))
