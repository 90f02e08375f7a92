"""Thoughts by token ids: which families a tokenizer has, and what of a reply is in one."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer

from beamwright.models.hub import BUNDLED
from beamwright.models.thinking import FAMILIES, ThoughtMarks
from beamwright.models.tokenizer import TextCodec


def codec_with(*tokens: str, special: bool = False) -> TextCodec:
    """The bundled tokenizer, and these tokens."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "generator" / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    return TextCodec(tokenizer)


def marks_of(codec: TextCodec) -> ThoughtMarks:
    marks = codec.thoughts
    assert marks is not None
    return marks


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_a_family_is_known_by_its_tokens(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    tokens = family.tokens or (family.start, family.end)
    marks = marks_of(codec_with(*tokens))
    assert marks.family is family
    assert codec_with(*tokens[:-1]).thoughts is None


def test_the_bundled_models_mark_no_thoughts() -> None:
    assert codec_with().thoughts is None


def test_a_start_that_the_template_wrote_is_seen_and_one_in_a_question_is_not() -> None:
    codec = codec_with("<think>", "</think>")
    marks = marks_of(codec)
    for text, opened in {
        "<think>": True,
        "Ada has 3 apples.<think>\n": True,
        "<think>\n\n</think>\n\n": False,
        "What is <think> for?": False,
        "": False,
    }.items():
        assert marks.opened(codec.encode(text)) is opened, text


def test_a_start_of_several_tokens_is_open_until_the_last_of_them() -> None:
    codec = codec_with("<|channel|>", "<|message|>", "<|end|>", "<|start|>", special=True)
    marks = marks_of(codec)
    ids = codec.encode("<|channel|>analysis<|message|>Ada")
    assert [marks.begins(ids[:count]) for count in range(1, 3)] == [None, None]
    assert marks.begins(ids) is True
    assert marks.begins(codec.encode("Ada")) is False


def test_marks_are_no_text_of_a_reply() -> None:
    codec = codec_with("<think>", "</think>")
    reply = codec.encode("<think>\nAda has 3.\n</think>\n\nSo it is 3.")
    assert codec.reply_text(reply) == "\nAda has 3.\n\n\nSo it is 3."
    harmony = codec_with("<|channel|>", "<|message|>", "<|end|>", "<|start|>", special=True)
    reply = harmony.encode(
        "<|channel|>analysis<|message|>Ada has 3.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>So it is 3."
    )
    assert harmony.reply_text(reply) == "Ada has 3.So it is 3."
    assert codec_with().reply_text(reply[:0]) == ""


def test_an_end_that_is_spelt_out_is_none() -> None:
    codec = codec_with("<think>", "</think>")
    marks, spelt = marks_of(codec), [id for piece in "</think>" for id in codec.encode(piece)]
    assert len(spelt) > 1
    assert codec.decode(spelt) == "</think>"
    assert marks.shown(spelt) == spelt
