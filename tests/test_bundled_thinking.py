"""The bundled model that thinks: its files, its template, and the shape of what it says."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import beamwright
from beamwright.config import Settings
from beamwright.models.hub import resolve_folder
from beamwright.models.tokenizer import TextCodec
from beamwright.search.defaults import with_strategy_and_verifier

BUNDLED = Path(beamwright.__file__).parent / "bundled"
FOLDER = BUNDLED / "thinking"
EMPTY = "<think>\n\n</think>\n\n"
ASKED = [{"role": "user", "content": "How many?"}]


@pytest.fixture(scope="module")
def codec():
    return TextCodec.load(FOLDER)


def test_it_goes_by_its_name_and_has_no_verifier_by_default():
    assert resolve_folder("bundled:thinking", "generator") == FOLDER
    found = with_strategy_and_verifier(Settings.build(model="bundled:thinking"))
    assert (found.search.search, found.model.verifier) == ("majority", "none")


def test_a_start_and_an_end_are_one_token_each_and_no_special_ones(codec):
    tokens = {codec.decode([i]): i for i in codec.tokenizer.get_added_tokens_decoder()}
    assert codec.encode("<think></think>") == [tokens["<think>"], tokens["</think>"]]
    assert not {tokens["<think>"], tokens["</think>"]} & codec.special_ids
    whole = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    older = Tokenizer.from_file(str(BUNDLED / "generator" / "tokenizer.json"))
    assert older.get_vocab().items() <= whole.get_vocab().items()


def test_the_template_writes_an_empty_thought_where_none_is_wanted(codec):
    def prompt(**given):
        return codec.apply_chat_template(ASKED, add_generation_prompt=True, given=given)

    assert prompt() == prompt(enable_thinking=True) == "<|bos|>How many?\n\n"
    assert prompt(enable_thinking=False) == "<|bos|>How many?\n\n" + EMPTY
    assert (
        codec.apply_chat_template(ASKED, given={"enable_thinking": False}) == "<|bos|>How many?\n\n"
    )


def test_the_template_drops_thoughts_of_earlier_turns(codec):
    said = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFive."}
    text = codec.apply_chat_template([*ASKED, said, *ASKED], add_generation_prompt=True)
    assert text == "<|bos|>How many?\n\nFive.<|eos|>How many?\n\n"


def test_our_template_and_transformers_agree(codec):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(FOLDER)
    for given in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        said = theirs.apply_chat_template(
            ASKED, tokenize=False, add_generation_prompt=True, **given
        )
        assert said == codec.apply_chat_template(ASKED, add_generation_prompt=True, given=given)
