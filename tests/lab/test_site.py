"""Generated pages: of what is declared, of pairs that fit, and of all figures of the papers."""

import json
import re

import pytest

from beamwright.config import option_sections
from beamwright_lab import pairs, papers, publish, site


@pytest.fixture(scope="module")
def cli():
    return site.cli_page()


def test_every_command_has_its_options(cli):
    commands = re.findall(r"^## (\w+)$", cli, re.MULTILINE)
    assert {"solve", "eval", "serve", "plan", "doctor", "view", "report"} <= set(commands)
    assert "simulate" not in commands  # the lab's
    solve = cli.partition("## solve")[2].partition("\n## ")[0]
    assert "`--n`" in solve
    assert "`--plugin` `FILE.py`" in solve
    assert "[dim]" not in cli


def test_every_setting_is_there_once_or_under_its_owners():
    page = site.settings_page()
    for name in option_sections():
        assert f"| `{name}` |" in page, name


def test_json_has_keys_of_a_real_search():
    page = site.json_page()
    assert '| `answer` | `"60"` |' in page
    for key in ("tree_hash", "tokens.kept", "kv.device_budget_bytes", "candidates[].answer"):
        assert f"`{key}`" in page


def test_http_has_every_route_with_its_fields():
    page = site.http_page()
    for route in ("POST /v1/chat/completions", "GET /v1/models", "GET /health", "GET /metrics"):
        assert f"## {route}" in page
    assert "| `messages` | list of `Message` |" in page
    assert "`frequency_penalty`" in page.partition("Accepted if their value changes nothing")[2]


def test_links_lead_to_pages_and_else_to_the_repository():
    text = "[a](docs/glossary.md#words) [b](Makefile) [c](https://x.y) [d](README.md) `[e](f.md)`"
    assert site.move_links(text, "CONTRIBUTING.md", "develop/contributing.md") == (
        f"[a](../glossary.md#words) [b]({site.REPOSITORY}/blob/main/Makefile) [c](https://x.y) "
        "[d](../index.md) `[e](f.md)`"
    )


def test_plan_still_says_what_the_file_says():
    said = publish.read("pairs")
    assert json.loads(json.dumps(pairs.rows())) == said["rows"]
    assert pairs.sample() == said["sample"]


def test_every_pair_fits():
    assert all(row["fits"] for row in publish.read("pairs")["rows"])


def test_a_figure_is_another_by_more_than_two_in_a_hundred():
    before = {"a: b": ("1.43x of 1,024", "partly")}
    for now in ("1.43x of 1,024", "1.45x of 1,024"):
        assert not list(papers.find_changes(before, {"a: b": (now, "partly")}))
    for now in ("1.50x of 1,024", "1.43x"):
        assert list(papers.find_changes(before, {"a: b": (now, "partly")}))
    verdict = {"a: b": ("1.43x of 1,024", "reproduced")}
    assert list(papers.find_changes(before, verdict)), "the verdict is another"
