"""What is read of the bundled pair without `transformers` is what `transformers` reads."""

import shutil
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import fakes
from beamwright.models.hf_config import read_shape
from beamwright.models.hub import BUNDLED
from beamwright.models.tokenizer import TextCodec, _to_latin1

TEXTS = ["", "the cake: 12 eggs,\n\n", " naïve 🎂 日本\tend", "<|bos|>12<|eos|>x"]
CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What is 2 + 2?\n"},
    {"role": "assistant", "content": "<|eos|> 4"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]


@pytest.fixture(params=["generator", "verifier"])
def pair(request, tmp_path):
    """A bundled folder, and a copy, which is read as any other."""
    folder = BUNDLED / request.param
    return folder, shutil.copytree(folder, tmp_path / "model")


def test_the_bundled_config_has_the_shape_that_transformers_reads(pair):
    assert read_shape(pair[0], None) == read_shape(pair[1], None)


def outcome(codec):
    """All that is asked of a tokenizer."""
    ids = [codec.encode(text) for text in TEXTS]
    found = [ids, codec.encode_with_offsets(TEXTS), codec.vocab_size, codec.eos_ids]
    found += [codec.token_bytes, codec.takes_instructions, codec.has_system_role]
    found += [[codec.decode(path), codec.decode_raw(path)] for path in ids]
    found += [
        codec.bos_id,
        codec.special_ids,
        codec.encode_problem(TEXTS[1]),
        codec.encode_problem("a", "Be."),
    ]
    found += [
        codec.apply_chat_template(CHAT),
        codec.apply_chat_template(CHAT, add_generation_prompt=True),
    ]
    return [*found, codec.render_turn("again")]


def test_the_bundled_tokenizer_says_what_transformers_says(pair):
    assert not TextCodec.load(pair[0]).remarks
    theirs = PreTrainedTokenizerFast.from_pretrained(pair[1])
    assert outcome(codec := TextCodec.load(pair[0])) == outcome(fakes.codec_of(theirs))
    assert codec.apply_chat_template(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False)


def test_the_alphabet_of_bytes_is_gpt2s():
    table = _to_latin1()
    for byte, char in bytes_to_unicode().items():
        assert char.translate(table).encode("latin-1", "ignore") == bytes([byte])
    assert " \n\x80\xad\u65e5".translate(table).encode("latin-1", "ignore") == b""


@pytest.mark.parametrize("named", ["bundled", "smollm2"])
def test_the_bundled_pair_and_files_load_without_transformers(named, request):
    options = "n=2, width=2, max_rounds=1"
    if named == "smollm2":
        place = request.getfixturevalue(named)
        options = f"model='{place}', verifier='none', search='majority', n=2, max_tokens=2"
    code = (
        "import sys; from beamwright import Solver; "
        f"s = Solver({options}); s.solve('2+2?'); s.close(); "
        "sys.exit(any(m in sys.modules for m in ('transformers', 'huggingface_hub', 'sympy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
