"""A chat template is a program of the model's folder: it ends soon, and gives something."""

import json
import re
from pathlib import Path

import pytest

import fakes
from beamwright.errors import InputError
from beamwright.io import read_yaml
from beamwright.models import template
from beamwright.models.template import check_template, render_with_limits
from beamwright.models.tokenizer import TextCodec

CASES = read_yaml(Path(__file__).with_suffix(".yaml"), "tests")


@pytest.fixture
def codec(generator_folder):
    return lambda text: TextCodec.load(generator_folder, text)


def test_a_template_that_does_not_end_is_stopped(codec, monkeypatch):
    monkeypatch.setattr(template, "RENDER_S", 0.3)
    with pytest.raises(InputError, match="chat template: rendering took more than"):
        codec(CASES["endless"]).encode_problem("1+1?")


LARGE = [  # and what is said of them
    ("{{ 1" + "+1" * 5_000 + " }}", "nested too deeply"),
    ("{% if 1 %}" * 3_000 + "x" + "{% endif %}" * 3_000, "nested too deeply"),
    ("{{ " + "9" * 5_000 + " }}", "ValueError"),
    ("x" * (1 << 20) + "{{ 1 }}", "1,048,583 characters"),
]


@pytest.mark.parametrize(("text", "why"), [*CASES["refused"].items(), *LARGE])
def test_what_would_take_all_memory_or_cannot_be_compiled_is_refused(generator_folder, text, why):
    for given in (text, {"default": "{{ 1 }}", "tool": text}):
        with pytest.raises(InputError, match="^here: chat template: .*" + re.escape(why)):
            check_template(given, "here")
    with pytest.raises(InputError, match=re.escape(why)):
        TextCodec.load(generator_folder, text)


@pytest.mark.parametrize("text", CASES["usual"])
def test_what_templates_do_is_let_through(text):
    check_template(text, "here")


@pytest.mark.parametrize("text", CASES["failing"])
def test_a_template_that_fails_is_one_line(codec, text):
    with pytest.raises(InputError, match=r"chat template: ."):
        codec(text).encode_problem("1+1?")


def test_more_text_than_any_prompt_is_refused(monkeypatch):
    monkeypatch.setattr(template, "MOST_CHARACTERS", 10)
    with pytest.raises(InputError, match="mine: chat template: its text of 11 characters"):
        render_with_limits(lambda: "x" * 11, "mine: ")
    assert render_with_limits(lambda: "x" * 10, "") == "x" * 10


PROBLEM = "What is 2 + 3?\n  Think, then say it: a  number of eggs that Tim has at the end of May."


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("parts", f"user: {PROBLEM}"),
        ("in capitals", PROBLEM.upper()),
        ("JSON", json.dumps([{"role": "user", "content": PROBLEM}])),
    ],
)
def test_a_prompt_holds_the_problem(codec, name, shown):
    asked = [{"role": "user", "content": PROBLEM}]
    assert codec(CASES["prompts"][name]).render_conversation(asked) == shown


@pytest.mark.parametrize("text", CASES["without the problem"])
def test_a_prompt_without_the_problem_is_refused(codec, text):
    with pytest.raises(InputError, match=r"omits the problem: .*--chat-template"):
        codec(text).render_conversation([{"role": "user", "content": PROBLEM}])


def test_a_processors_template_is_used_where_there_is_no_other(tmp_path):
    fakes.write_tokenizer(tmp_path)
    assert "no chat template" in TextCodec.load(tmp_path).remarks[-1]
    (tmp_path / "chat_template.json").write_text(
        json.dumps({"chat_template": "<{{ messages[0].content }}>"})
    )
    assert TextCodec.load(tmp_path).apply_chat_template([{"role": "user", "content": "a"}]) == "<a>"


def test_the_time_in_a_template_is_an_argument(codec):
    at = codec("{{ strftime_now('%d %b %Y %H:%M') }}: {{ messages[0].content }}")
    assert at.reads_time
    assert not codec("{{ messages[0].content }}").reads_time
    asked = [{"role": "user", "content": "a"}]
    assert (
        at.apply_chat_template(asked, given={"now": "2026-11-28T14:30"}) == "28 Nov 2026 14:30: a"
    )
    assert at.apply_chat_template(asked) == "01 Jan 1970 00:00: a", "never the clock"
