"""Tokenizers of GGUF files, by files that hold nothing else: ids as llama.cpp gives them."""

from pathlib import Path

import pytest

import fakes
import gguf_files
from beamwright.errors import InputError
from beamwright.io import read_yaml
from beamwright.models.tokenizer import TextCodec
from fakes import LETTERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
BARS = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in ("begin\u2581of\u2581sentence", "User", "end\u2581of\u2581sentence")
)
ASKED = "{% for m in messages %}<\uff5cUser\uff5c>{{ m['content'] }}{% endfor %}"
AT = "tokenizer.ggml."
CASES = read_yaml(Path(__file__).with_suffix(".yaml"), "tests")


@pytest.fixture
def codec(tmp_path):
    """The codec of a file with these tokens: texts, and types where they are not normal ones."""

    def codec(tokens, types=(), scores=(), template=ASKED, **more):
        kinds = [dict(types).get(token, NORMAL) for token in tokens]
        said = {
            f"{AT}model": "llama" if scores else "gpt2",
            f"{AT}pre": "qwen2",
            f"{AT}tokens": list(tokens),
            f"{AT}token_type": kinds,
            f"{AT}merges": ["a b"],
            **({f"{AT}scores": [*map(float, scores)]} if scores else {}),
            **{f"{AT}{key}": value for key, value in more.items()},
            "tokenizer.chat_template": template,
        }
        gguf_files.write_gguf(tmp_path / "m.gguf", said, {})
        return TextCodec.load(tmp_path / "m.gguf")

    return codec


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
@pytest.mark.parametrize("template", [ASKED, "{{ bos_token }}" + ASKED])
def test_tokens_that_are_no_text_keep_their_ids_and_a_prompt_has_one_bos(codec, kind, template):
    first, user, last = range(len(LETTERS), len(LETTERS) + 3)
    tokens = [*LETTERS, *BARS, "ab"]
    types = {BARS[0]: CONTROL, BARS[1]: kind, BARS[2]: CONTROL}
    ids = {"bos_token_id": first, "eos_token_id": 5}
    made = codec(tokens, types, template=template, **ids, add_bos_token=True, add_eos_token=True)
    assert made.encode_problem("ab") == [first, user, tokens.index("ab")]
    assert made.decode_raw([first, user]) == BARS[0] + BARS[1]
    assert made.decode([user]) == ("" if kind == CONTROL else BARS[1])
    assert made.eos_ids == {5, last}
    assert made.vocab_size == len(tokens)
    assert codec(tokens, types, **ids).encode_problem("ab") == [user, tokens.index("ab")]


@pytest.mark.parametrize("text", CASES["ends"])
def test_a_reply_ends_at_the_end_of_its_turn_whatever_the_file_calls_its_end(codec, text):
    tokens = [*LETTERS, text, "</s>", "ab"]
    made = codec(tokens, eos_token_id=3, eom_token_id=4)
    assert made.eos_ids == {3, 4, tokens.index(text)}
    assert made.decode([tokens.index(text)]) == ""


@pytest.mark.parametrize(
    ("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)]
)
def test_a_word_of_the_vocabulary_is_one_token_where_merges_come_second(codec, pre, whole):
    made = codec([*LETTERS, "cd", "abcd", "ab"], pre=pre)
    found = [made.decode_raw([index]) for index in made.encode("abcd")]
    assert found == (["abcd"] if whole else ["ab", "c", "d"])


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ("<unk>", "<s>", "</s>", *BYTES, *"\u2581[I", "\u2581[", "\u2581\u2581")


@pytest.mark.parametrize(("text", "pieces"), CASES["sentencepiece"].items())
def test_sentencepiece_puts_a_blank_before_every_text(codec, text, pieces):
    types = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    scores = [0.0] * 262 + [-2.0, -1.0]
    made = codec(PIECES, types, scores=scores, template="{{ messages[0]['content'] }}")
    assert [PIECES[index] for index in made.encode(text)] == pieces
    assert made.encode_problem("[") == [1, PIECES.index("\u2581[")]
    bare = codec(PIECES, types, scores=scores, add_space_prefix=False, add_bos_token=False)
    assert bare.encode("<s>[I") == [1, PIECES.index("["), PIECES.index("I")]


def test_a_neighbours_tokenizer_is_not_taken(codec, tmp_path):
    fakes.write_tokenizer(tmp_path)
    assert codec([*LETTERS, "ab"]).vocab_size == len(LETTERS) + 1


@pytest.mark.parametrize("line", CASES["refused"])
def test_what_makes_no_tokenizer_is_refused_by_its_key(codec, line):
    said = CASES["refused"][line]
    with pytest.raises(InputError, match=rf"m\.gguf: tokenizer\.ggml\.{line}"):
        codec([*LETTERS, "ab", *said.pop("tokens", ())], **said)


def test_a_file_of_before_rules_of_cutting_is_remarked(codec):
    assert "pre is missing" in codec([*LETTERS, "ab"], pre="").remarks[0]
