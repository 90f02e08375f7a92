import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel

import fakes
from beamwright.errors import InputError
from beamwright.io import read_yaml
from beamwright.models.hub import BUNDLED
from beamwright.models.template import template_writer
from beamwright.models.thinking import FAMILIES
from beamwright.models.tokenizer import TextCodec

TEXT = "the cake: 12 eggs,\n\n  naïve 🎂 日本\tend.\n\n"
CASES = read_yaml(Path(__file__).with_suffix(".yaml"), "tests")
TEMPLATES = CASES["templates"]


def byte_level_codec():
    letters = sorted(ByteLevel.alphabet())
    return fakes.codec_of(fakes.wrap(fakes.byte_level_bpe(letters=letters)))


def sentencepiece_like_codec():
    """Metaspace with byte fallback, as Llama-2 and Mistral have it."""
    letters = [chr(code) for code in range(33, 127)] + ["\u2581"]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("1", "2")]
    pieces = [*fakes.SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += [left + right for left, right in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    bare = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    bare.normalizer = normalizers.Replace(" ", "\u2581")
    bare.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fakes.codec_of(fakes.wrap(bare))


@pytest.mark.parametrize("make", [byte_level_codec, sentencepiece_like_codec])
def test_token_bytes_concatenate_to_the_text(make):
    codec = make()
    ids = codec.encode(TEXT)
    pieces = codec.token_bytes
    assert len(pieces) == codec.vocab_size
    assert b"".join(pieces[i] for i in ids) == TEXT.encode()
    assert codec.decode(ids) == TEXT
    assert any(len(pieces[i]) > 1 for i in ids), "the merges are in use"


def test_special_tokens_add_nothing_and_added_text_adds_itself():
    tokenizer = fakes.wrap(fakes.byte_level_bpe())
    tokenizer.add_tokens(["[step]"])
    pieces = fakes.codec_of(tokenizer).token_bytes
    assert [pieces[i] for i in range(3)] == [b"", b"", b""]
    assert pieces[-1] == b"[step]"


def test_a_reply_grows_by_what_it_would_say_as_a_whole():
    codec, numbers, grown = byte_level_codec(), random.Random(0), 0
    for _ in range(2000):
        ids = [numbers.randrange(codec.vocab_size) for _ in range(24)]
        cuts = sorted(numbers.choices(range(25), k=4))
        for begin, end in pairwise(cuts):
            said = codec.extend_reply(codec.reply_text(ids[:begin]), ids[begin:end])
            assert said is None or said == codec.reply_text(ids[:end])
            grown += said is not None
    assert 2000 < grown < 6000, "most do, and not all"
    assert sentencepiece_like_codec().extend_reply("", [5]) is None, "a text begins with a blank"


# --- rendering -------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path):
    def call(chat_template=None, own_template=None):
        options = {} if own_template is None else {"chat_template": own_template}
        fakes.write_tokenizer(tmp_path, **options)
        return TextCodec.load(tmp_path, chat_template)

    return call


@pytest.mark.parametrize("name", CASES["prompts"])
def test_a_prompt_holds_problem_and_system_prompt(load, name):
    codec, case = load(own_template=TEMPLATES.get(name)), CASES["prompts"][name]
    assert codec.decode_raw(codec.encode_problem("Add 1.")) == case["alone"]
    assert codec.decode_raw(codec.encode_problem("Add 1.", "Be brief.")) == case["told"]
    assert codec.takes_instructions == case["takes_instructions"]
    if name == "plain":
        assert codec.encode_problem("a")[0] == 1, "special tokens are ids, not text"


def test_arguments_reach_the_template(load):
    codec = load(TEMPLATES["thinks"])
    asked = ({"role": "user", "content": "a"},)
    assert codec.render_conversation(asked) == "a"
    assert codec.render_conversation(asked, template_args={"think": False}) == "a<think></think>"
    codec.template_args = {"think": False}
    assert codec.decode_raw(codec.encode_problem("a")) == "a<think></think>"
    assert codec.render_conversation(asked, template_args={"think": True}) == "a"
    assert codec.unread_args({"think": 1, "name": 2, "messages": 3}) == ["name"]
    assert codec.render_conversation(asked, template_args={"name": "x"}) == "a<think></think>"


def test_a_template_for_tools_reads_arguments_too(load):
    codec = load(own_template={"default": TEMPLATES["thinks"], "tool_use": TEMPLATES["tools"]})
    asked = ({"role": "user", "content": "a"},)
    assert (
        codec.render_conversation(asked, tools=[{"name": "f"}], template_args={"style": "!"})
        == "fa!"
    )
    assert codec.unread_args({"think": 1, "style": 2, "other": 3}) == ["other"]


def test_the_bundled_template_is_rendered_with_arguments():
    bundled = TextCodec.load(BUNDLED / "generator")
    write = template_writer("{{ messages[0] }}{{ bos_token }}{{ a }}", {"bos_token": "<s>"})
    assert write(["x"], a=1, bos_token="<b>") == "x<b>1"
    assert bundled.unread_args({"bos_token": "", "think": True})[-1] == "think"


def test_the_template_can_be_overridden_by_text_or_file(load, tmp_path):
    (tmp_path / "own.jinja").write_text(override := "Q: {{ messages[0]['content'] }}")
    for given in (override, str(tmp_path / "own.jinja")):
        assert (codec := load(given, TEMPLATES["plain"])).decode_raw(
            codec.encode_problem("a")
        ) == "Q: a"
    with pytest.raises(InputError, match=r"--chat-template 'missing\.jinja'"):
        load("missing.jinja")


def test_every_configured_eos_ends_a_path(load, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 9}')
    assert load().eos_ids == {2, 9}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load().eos_ids == {2, 5, 6}


# --- what a folder's files say ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "GPT2Tokenizer", "MistralCommonBackend"])
def test_ids_are_those_of_tokenizer_json_whatever_class_is_named(tmp_path, kind):
    tokenizer = fakes.byte_level_bpe(letters=sorted(ByteLevel.alphabet()))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tekken.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "bos_token_id": 1}')
    written = {
        "tokenizer_class": kind,
        "eos_token": {"content": "<eos>"},
        "chat_template": "{{ 1 }}",
    }
    first = tokenizer.get_vocab_size()
    further = {first: {"content": "[B]"}, first + 1: {"content": "[A]", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**written, "added_tokens_decoder": further, "surprise": 1})
    )
    codec = TextCodec.load(tmp_path)
    assert codec.encode(TEXT) == tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert codec.encode("[B]12[A]")[::2] == [first, first + 1]
    assert (codec.bos_id, codec.eos_ids) == (1, {2})
    assert codec.decode(codec.encode("[B]12[A]")) == "[B]12", "[A] is special"
    (remark,) = codec.remarks
    assert "tokenizer_config.json has 'surprise'" in remark


@pytest.mark.parametrize("why", CASES["spoilt"])
def test_a_tokenizer_that_does_not_give_texts_back_is_refused(load, tmp_path, why):
    load()
    for file, keys in CASES["spoilt"][why].items():
        fakes.change_json(tmp_path / f"{file}.json", **keys)
    with pytest.raises(InputError, match=re.escape(why)) as caught:
        TextCodec.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_changes_texts_is_remarked_on(load, tmp_path):
    load(own_template=TEMPLATES["plain"])
    fakes.change_json(tmp_path / "tokenizer.json", normalizer=CASES["remarked"]["nothing"])
    TextCodec.load(tmp_path)
    fakes.change_json(tmp_path / "tokenizer.json", normalizer=CASES["remarked"]["lower"])
    (remark,) = TextCodec.load(tmp_path).remarks
    assert "into 'jack has 70 eggs" in remark


@pytest.mark.parametrize("fixed", [False, True])
def test_mistrals_rule_is_taken_where_the_folder_says_so(tmp_path, monkeypatch, fixed):
    monkeypatch.setattr("beamwright.models.token_files._LARGE", 10)
    fakes.write_tokenizer(tmp_path, chat_template=TEMPLATES["plain"])
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    fakes.change_json(tmp_path / "tokenizer_config.json", fix_mistral_regex=fixed)
    codec = TextCodec.load(tmp_path)
    assert len(codec.encode("12")) == (2 if fixed else 1)
    assert any("fix_mistral_regex" in remark for remark in codec.remarks) is not fixed


# --- thoughts by token ids --------------------------------------------------------------------


def codec_with(*tokens, special=False):
    """The bundled tokenizer, and these tokens."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "generator" / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    return TextCodec(tokenizer)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_a_family_is_known_by_its_tokens(name):
    family = next(family for family in FAMILIES if family.name == name)
    tokens = family.tokens or (family.start, family.end)
    marks = codec_with(*tokens).thoughts
    assert marks.family is family
    assert codec_with(*tokens[:-1]).thoughts is None
    assert codec_with().thoughts is None


def test_a_start_of_several_tokens_is_open_until_the_last_of_them():
    codec = codec_with("<|channel|>", "<|message|>", "<|end|>", "<|start|>", special=True)
    marks = codec.thoughts
    ids = codec.encode("<|channel|>analysis<|message|>Ada")
    assert [marks.begins_with_start(ids[:count]) for count in range(1, 3)] == [None, None]
    assert marks.begins_with_start(ids) is True
    assert marks.begins_with_start(codec.encode("Ada")) is False


def test_marks_are_no_text_of_a_reply():
    harmony = codec_with("<|channel|>", "<|message|>", "<|end|>", "<|start|>", special=True)
    reply = harmony.encode(
        "<|channel|>analysis<|message|>Ada has 3.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>So it is 3."
    )
    assert harmony.reply_text(reply) == "Ada has 3.So it is 3."
    assert codec_with().reply_text([]) == ""


def test_an_end_that_is_spelt_out_is_none():
    codec = codec_with("<think>", "</think>")
    marks, spelt = codec.thoughts, [id for piece in "</think>" for id in codec.encode(piece)]
    assert len(spelt) > 1
    assert codec.decode(spelt) == "</think>"
    assert marks.without_marks(spelt) == spelt
