"""What is read without `transformers` is what `transformers` reads; the rest is left to it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

import beamwright
import fakes
from beamwright.errors import InputError
from beamwright.models.config import _plain_config as plain_config
from beamwright.models.config import read_shape
from beamwright.models.template import is_simple
from beamwright.models.tokenizer import _ROLES, TextCodec, _byte_level_table, _plain

BUNDLED = Path(beamwright.__file__).parent / "bundled"
CONFIG = json.loads((BUNDLED / "generator/config.json").read_text())
TEXTS = ["", "the cake: 12 eggs,\n\n", " naïve 🎂 日本\tend", "<bos>a<eos>", "<|bos|>12<|eos|>x"]
CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What is 2 + 2?\n"},
    {"role": "assistant", "content": "<|eos|> 4"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]


@pytest.fixture
def by_transformers(monkeypatch):
    """From when it is called, nothing is read without it."""

    def install():
        monkeypatch.setattr("beamwright.models.config._plain_config", lambda written: None)
        monkeypatch.setattr("beamwright.models.tokenizer._plain", lambda *given: None)

    return install


# --- configs ---------------------------------------------------------------------------------

LLAMA = {key: CONFIG[key] for key in CONFIG if key not in ("architectures", "torch_dtype")}
ROPE = {"rope_type": "default", "rope_theta": 500000.0}
QWEN = {k: v for k, v in LLAMA.items() if k not in ("mlp_bias", "attention_bias")}


@pytest.mark.parametrize(
    "written",
    [
        CONFIG,
        {**LLAMA, "rope_theta": 1_000_000, "rope_scaling": None},
        {**{k: v for k, v in LLAMA.items() if k != "rope_theta"}, "rope_parameters": ROPE},
        {**LLAMA, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
        {**LLAMA, "tie_word_embeddings": False, "use_cache": True, "pretraining_tp": 1},
        {**QWEN, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 128},
        {**QWEN, "model_type": "qwen2", "max_window_layers": 2, "eos_token_id": [2, 3]},
        {**QWEN, "model_type": "qwen3", "head_dim": 64, "attention_bias": True},
        {**QWEN, "model_type": "qwen3", "layer_types": ["full_attention"] * 4},
    ],
)
def test_a_plain_config_has_the_shape_that_transformers_reads(tmp_path, by_transformers, written):
    assert plain_config(written) is not None
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = read_shape(tmp_path, None)
    by_transformers()
    assert found == read_shape(tmp_path, None)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_what_transformers_writes_is_read_alike(tmp_path, by_transformers, kind):
    kind(**fakes.SMALL, num_key_value_heads=2).save_pretrained(tmp_path)
    found = read_shape(tmp_path, None)
    by_transformers()
    assert found == read_shape(tmp_path, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},
        {"model_type": ["llama"]},
        {"auto_map": {"AutoConfig": "evil.Evil"}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": ROPE},
        {"never_heard_of": 1},
        {"hidden_size": 130},
        {"tie_word_embeddings": 1},
        {"num_key_value_heads": None},
        {"rope_theta": "1e4"},
    ],
)
def test_a_config_that_takes_more_is_left_to_transformers(changes):
    assert plain_config({**CONFIG, **changes}) is None
    for key in ("num_key_value_heads", "rms_norm_eps", "rope_theta", "model_type"):  # no defaults
        assert plain_config({name: CONFIG[name] for name in CONFIG if name != key}) is None


# --- tokenizers ------------------------------------------------------------------------------


def folder_of(tmp_path, model_type="llama", **options):
    fakes.write_tokenizer(tmp_path, **options)
    size = {"vocab_size": fakes.VOCAB, "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(size))
    return tmp_path


@pytest.fixture(params=["bundled", "llama", "qwen3"])
def plain_folder(request, tmp_path):
    if request.param == "bundled":
        return BUNDLED / "generator"
    options = {} if request.param == "llama" else {"chat_template": TEMPLATES[1]}
    return folder_of(tmp_path, request.param, **options)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content | trim }}{% endfor %}",
    "{% set all = messages %}{% for m in all %}\n  {% if loop.index0 == 0 %}{{ bos_token }}\n"
    "  {% elif not m['role'] == 'user' %}{% set x = '#' + m['content'] %}{{ x }}{% else %}"
    "{{ pad_token ~ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}",
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no system') }}{% endif %}x",
    "{{ unk_token }}{{ messages[-1].missing }}{{ messages[1:][0]['content'] }}",
]


def outcome(codec):
    """All that is asked of a tokenizer, and what a template that fails says."""
    ids = [codec.encode(text) for text in TEXTS]
    found = [ids, codec.encode_with_offsets(TEXTS), codec.vocab_size, codec.eos_ids]
    found += [codec.token_bytes(), codec.takes_instructions, codec.has_system_role]
    found += [[codec.decode(each), codec.decode_raw(each)] for each in ids]
    added = codec.tokenizer.get_added_tokens_decoder()
    found += [codec.bos_id, codec.special_ids, {i: str(t) for i, t in added.items()}]
    calls = [lambda: codec.render(TEXTS[1]), lambda: codec.render(TEXTS[4], "Be brief.")]
    calls.append(lambda: codec.render_turn("again"))
    if codec.chat_template is not None:
        calls.append(lambda: codec.chat(CHAT))
        calls.append(lambda: codec.chat(CHAT, add_generation_prompt=True))
    for call in calls:
        try:
            found.append(call())
        except InputError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_a_plain_tokenizer_says_what_transformers_says(plain_folder, by_transformers, template):
    assert _plain(plain_folder, template) is not None
    assert type(AutoTokenizer.from_pretrained(plain_folder)).__name__ == "TokenizersBackend"
    found = outcome(TextCodec.load(plain_folder, template))
    by_transformers()
    assert found == outcome(TextCodec.load(plain_folder, template))


def change(file, **keys):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **keys}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: change(folder / "tokenizer_config.json", add_bos_token=True),
        lambda folder: change(folder / "tokenizer_config.json", bos_token="<not there>"),
        lambda folder: change(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer"),
        lambda folder: change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": "a.B"}),
        lambda folder: change(folder / "tokenizer_config.json", chat_template="{{ range(9) }}"),
        lambda folder: change(folder / "tokenizer.json", truncation={"max_length": 4}),
        lambda folder: change(folder / "config.json", model_type="qwen2"),
        lambda folder: change(folder / "config.json", vocab_size=128_000),
        lambda folder: change(folder / "added_tokens.json", a=9),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ strftime_now('%d') }}"),
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: (folder / "tokenizer_config.json").unlink(),
        lambda folder: (folder / "config.json").unlink(),
    ],
)
def test_a_tokenizer_that_takes_more_is_left_to_transformers(tmp_path, spoil):
    folder = shutil.copytree(BUNDLED / "generator", tmp_path / "model")
    assert _plain(folder, None) is not None
    spoil(folder)
    assert _plain(folder, None) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}",
        "{{ namespace(a=1) }}",
        "{{ dict(a=1) }}",
        "{% generation %}x{% endgeneration %}",
        "{% for m in messages %}{% break %}{% endfor %}",
        "{{ messages[0].__class__ }}",
        "{{ messages[0]['content'].strip() }}",
        "{% if tools is defined %}x{% endif %}",
        "{{ tools }}",
        "{% for m in messages %}",
    ],
)
def test_a_template_that_does_more_is_not_simple(template):
    assert not is_simple(template, frozenset(_ROLES))


def test_the_alphabet_of_bytes_is_gpt2s():
    assert _byte_level_table() == {char: byte for byte, char in bytes_to_unicode().items()}


def test_the_bundled_pair_loads_without_transformers():
    code = (
        "import sys; from beamwright import Solver; "
        "s = Solver(n=2, width=2, max_rounds=1); s.solve('2+2?'); s.close(); "
        "sys.exit(any(m in sys.modules for m in ('transformers', 'huggingface_hub', 'sympy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
