"""A chat template is a program of the model's folder: it ends soon, and gives something."""

import pytest

from beamwright.errors import InputError
from beamwright.models import template
from beamwright.models.template import check_template, render
from beamwright.models.tokenizer import TextCodec

ENDLESS = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% set c = a * b %}"
    "{% endfor %}{% endfor %}"
)


@pytest.fixture
def codec(generator_folder):
    return lambda text: TextCodec.load(generator_folder, text)


def test_a_template_that_does_not_end_is_stopped(codec, monkeypatch):
    monkeypatch.setattr(template, "RENDER_S", 0.3)
    with pytest.raises(InputError, match="chat template: not rendered after"):
        codec(ENDLESS).render("1+1?")


@pytest.mark.parametrize(
    "text", ["{{ 10**(10**10) }}", "{% set a = 9 ** messages|length %}{{ a }}"]
)
def test_powers_are_refused_before_they_are_computed(codec, text):
    with pytest.raises(InputError, match=r"powers \(\*\*\) are not allowed"):
        codec(text)


def test_two_stars_in_text_are_no_power(codec):
    check_template({"default": "**{{ 'a**b' }}** {{ f(**k) }}", "tool": None}, "here")
    assert codec("**{{ messages[0].content }}**").render("x")


@pytest.mark.parametrize(
    "text", ["{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% if %}", "{{ a.b.c }}"]
)
def test_a_template_that_fails_is_one_line(codec, text):
    with pytest.raises(InputError, match=r"chat template: ."):
        codec(text).render("1+1?")


def test_more_text_than_any_prompt_is_refused(monkeypatch):
    monkeypatch.setattr(template, "MOST_CHARACTERS", 10)
    with pytest.raises(InputError, match="mine: chat template: renders 11 characters"):
        render(lambda: "x" * 11, "mine: ")
    assert render(lambda: "x" * 10, "") == "x" * 10
