"""GGUF files against what `transformers` makes of their blocks, and against the model they hold."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.integrations.gguf.dequant import dequantize

import fakes
import gguf_files
from beamwright.errors import InputError, UnsupportedModelError
from beamwright.io import read_yaml
from beamwright.library import library
from beamwright.models.formats import open_checkpoint
from beamwright.models.formats.gguf import UNPACK_BLOCKS
from beamwright.models.formats.gguf_metadata import gguf_remarks
from beamwright.models.formats.header import BLOCKS, KEPT, read_header
from beamwright.models.formats.key_tables import GGUF, GGUF_FILE
from beamwright.models.formats.plain_files import RowReader
from beamwright.models.grouped import GroupedLinear, JoinedLinear
from beamwright.models.hf_config import read_shape
from beamwright.models.hub import resolve_folder
from beamwright.models.load import inspect_model, load_model
from beamwright.plan.costs import projection_bytes, weight_bytes
from beamwright.sections import ModelSettings
from engines import logprobs, projections
from models.test_linear import tensors_in

WIDE = {**fakes.SMALL, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
OURS = [BLOCKS[kind][0] for kind in UNPACK_BLOCKS if BLOCKS[kind][0] not in ("Q5_0", "Q5_1")]
needs_library = pytest.mark.skipif(library() is None, reason="built without a C compiler")


@pytest.fixture
def write(tmp_path):
    """Write a model as a GGUF file; returns it, its folder and the `transformers` model."""

    def write(kind, types, config=None, **metadata):
        folder = tmp_path / "original"
        folder.mkdir(exist_ok=True)
        fakes.write_tokenizer(folder)
        of = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind]
        model = fakes.write_checkpoint(folder, of(**(config or WIDE)))
        path = tmp_path / "file" / f"tiny-{kind}.gguf"
        path.parent.mkdir(exist_ok=True)
        gguf_files.write_model(path, folder, model, kind, types, **metadata)
        return path, folder, model

    return write


def load(path, **settings):
    return load_model(str(path), ModelSettings(model=str(path), **settings))


@torch.inference_mode()
def differs(path, model, **settings):
    """How far log-probabilities are off those of `transformers`, at most, over 40 tokens."""
    ids = torch.randint(fakes.VOCAB, (40,), generator=torch.Generator().manual_seed(3))
    found = logprobs(load(path, **settings).decoder, ids.tolist())
    expected = model(ids[None]).logits[0].log_softmax(-1)
    return float((found - expected).abs().max())


@pytest.mark.parametrize("name", OURS)
def test_codes_and_scales_are_what_transformers_makes_of_the_blocks(name):
    kind = gguf_files.KINDS[name]
    blocks = gguf_files.draw_blocks(kind, 64 * 256)
    expected = dequantize(blocks.flatten(), kind).view(64, 256)
    parts = UNPACK_BLOCKS[kind](blocks)
    assert (parts.bits, BLOCKS[kind][1] // parts.scale.shape[1]) == KEPT[kind]
    assert torch.equal(parts.dequantise().view(64, 256), expected)
    kept = parts.of_rows(64).to_linear().dequantise(slice(None))
    # Of 8 bits nothing is rounded; of 4 bits scale and low are, to 11 bits, if they had more.
    assert (kept - expected).abs().max() <= (
        2**-10 * expected.abs().max() if parts.bits == 4 else 0
    )
    if name in ("Q4_0", "Q4_1"):
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("name", ["Q5_0", "Q5_1"])
def test_five_bits_are_as_ggml_defines_them(name):
    kind = gguf_files.KINDS[name]
    blocks = gguf_files.draw_blocks(kind, 32)
    row = blocks[0].tolist()
    head = 2 if name == "Q5_0" else 4
    scale, low = (float(blocks[0, at : at + 2].view(torch.float16)) for at in (0, head - 2))
    upper = int.from_bytes(bytes(row[head : head + 4]), "little")
    for at, code in enumerate(UNPACK_BLOCKS[kind](blocks).codes[0].tolist()):
        nibble = row[head + 4 + at % 16] >> (4 if at >= 16 else 0) & 15
        assert code == nibble | (upper >> at & 1) << 4
    parts = UNPACK_BLOCKS[kind](blocks)
    found = [float(parts.scale), float(parts.low)]
    assert found == [scale, -16 * scale if name == "Q5_0" else low]


@pytest.mark.parametrize("named", ["llama", "mistral", "qwen2", "qwen3", "smollm2", "gemma"])
def test_a_config_leaves_nothing_for_transformers_to_fill_in(named, request, write, monkeypatch):
    if named in ("smollm2", "gemma"):
        path = request.getfixturevalue(named)
    else:
        window = {"llama.attention.sliding_window": 8} if named == "mistral" else {}
        path, _, _ = write("llama" if window else named, {}, **window)
    found = read_shape(path, None)
    monkeypatch.setattr("beamwright.models.hf_config._scales_positions", lambda written: True)
    assert found == read_shape(path, None)
    assert found.architecture in (named, "llama", "gemma3_text")


SEVERAL = {"*": "Q4_0", "attn_v": "Q6_K", "ffn_gate": "Q8_0"}
FILES = {  # architecture, types of blocks, and how far log-probabilities may be off
    **{kind: (kind, {}, 0, 2e-5) for kind in ("llama", "qwen2", "qwen3")},
    **{name: ("llama", {"*": name}, 0, 2e-5)
       for name in ("Q8_0", "Q4_0", "Q6_K", "Q5_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")},
    "scales of eleven bits": ("qwen2", {"*": "Q4_K"}, 1e-9, 5e-3),
    "several types": ("qwen2", SEVERAL, 0, 2e-5),
}  # fmt: skip


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_the_model_that_it_was_made_of(write, name):
    """Blocks are kept, or turned back, without a loss; bytes are counted beforehand."""
    kind, types, least, most = FILES[name]
    path, _, model = write(kind, types)
    assert least <= differs(path, model) < most
    weights = load(path).decoder.weights
    stored = sum(tensor.nbytes for tensor in tensors_in(weights).values())
    assert inspect_model(ModelSettings(model=str(path)))["weight_bytes"] == stored
    layer = weights.layers[0]
    assert isinstance(layer.out, GroupedLinear) == (gguf_files.KINDS.get(types.get("*")) in KEPT)
    if types is SEVERAL:
        assert isinstance(layer.qkv, JoinedLinear)
        assert differs(path, model, dtype="bfloat16") < 0.5


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3"])
def test_norms_windows_and_caps_of_gemma_are_read(tmp_path, kind):
    fakes.write_tokenizer(tmp_path)
    fields = {} if kind == "gemma" else {"sliding_window": 16, "query_pre_attn_scalar": 64}
    if kind == "gemma2":
        fields |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    model_type = "gemma3_text" if kind == "gemma3" else kind
    config = AutoConfig.for_model(model_type, **WIDE | fields, head_dim=64, rms_norm_eps=1e-6)
    model, path = fakes.write_checkpoint(tmp_path, config), tmp_path / f"{kind}.gguf"
    fields.pop("query_pre_attn_scalar", None)  # a file says nothing of it
    keys = {"sliding_window": "attention.sliding_window"}
    named = {f"{kind}.{keys.get(name, name)}": value for name, value in fields.items()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(std=0.3)
    gguf_files.write_model(path, tmp_path, model, kind, {"*": "Q8_0"}, **named)
    assert differs(path, model) < 5e-5


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K"])
def test_four_bits_are_multiplied_by_a_kernel_that_rounds_to_bfloat16(write, name):
    path, _, model = write("qwen2", {"*": name})
    assert differs(path, model) < 0.5
    assert differs(path, model.double(), dtype="float64") < 5e-3


@needs_library
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_blocks_are_counted_and_the_embedding_stays_in_its_file(write, tied):
    config = WIDE | {"tie_word_embeddings": tied}
    ends = {"token_embd": "Q8_0", "output": "Q8_0"}
    types = {"*": "Q8_0", "ffn_down": "Q4_K", "attn_v": "Q6_K", **ends}
    path, _, own = write("llama", types, config)
    assert differs(path, own) < 0.1
    model = load(path)
    weights = model.decoder.weights
    linears = (*projections(model.decoder), weights.lm_head)
    tiles = [part[2] for linear in linears for part in linear.parts]
    norms = (2 * len(weights.layers) + 1) * weights.final_norm.weight.nbytes
    stored = sum(each.nbytes for each in tiles) + norms
    assert weight_bytes(read_shape(path, None), 4, model.storage) == stored
    in_layers = [part[2] for linear in projections(model.decoder) for part in linear.parts]
    in_layers_bytes = sum(each.nbytes for each in in_layers)
    assert projection_bytes(read_shape(path, None), 4, model.storage) == in_layers_bytes
    found = inspect_model(ModelSettings(model=str(path)))
    assert (found["weight_bytes"], found["weights"]) == (stored, "blocks")
    assert isinstance(weights.embedding, RowReader)


def test_without_the_library_a_file_is_read_all_the_same_and_said_to_be_slow(write, monkeypatch):
    path, _, model = write("llama", {"*": "Q8_0"})
    assert not any("C compiler" in line for line in load(path).remarks) or library() is None
    monkeypatch.setattr("beamwright.models.native.library", lambda: None)
    assert differs(path, model) < 2e-5
    assert any("C compiler" in line for line in load(path).remarks)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_experts_stay_in_their_files_form(tmp_path, name):
    fakes.write_tokenizer(tmp_path)
    sizes = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**WIDE, **sizes, head_dim=64, norm_topk_prob=True)
    model, path = fakes.write_checkpoint(tmp_path, config), tmp_path / "moe.gguf"
    more = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}
    gguf_files.write_model(
        path, tmp_path, model, "qwen3moe", {"*": name},
        **{f"qwen3moe.{key}": value for key, value in more.items()},
    )  # fmt: skip
    assert differs(path, model) < 2e-5
    experts = load(path).decoder._layers[0].mlp.experts.beamwright_experts
    assert all(isinstance(each, GroupedLinear) for each in (*experts._up, *experts._down))


def test_weights_may_be_rounded_again_if_somebody_asks(write):
    path, _, model = write("llama", {"*": "Q8_0"})
    assert differs(path, model, weights="int8") < 0.2
    assert differs(path, model, weights="int4") < 1.0


def test_tokenizer_template_and_ends_come_from_the_file(write):
    path, folder, _ = write("qwen2", {"*": "Q8_0"})
    of_file, of_folder = load(path).codec, load(folder).codec
    assert of_file.encode("the12ab\u00e9") == of_folder.encode("the12ab\u00e9")
    assert of_file.eos_ids == of_folder.eos_ids == {2}
    assert of_file.render_conversation([{"role": "user", "content": "hi"}]) == "<bos>hi"


def test_a_file_is_known_by_its_content_and_a_folder_by_its_one_file(write, tmp_path):
    path, _, _ = write("qwen2", {"*": "Q8_0"})
    blob = tmp_path / "sha256-0123"
    blob.write_bytes(path.read_bytes())
    for place, file in ((path.parent, path), (blob, blob)):
        assert resolve_folder(str(place), "generator") == file
    (path.parent / "other.gguf").write_bytes(path.read_bytes())
    (tmp_path / "page.gguf").write_text("<html>")
    for place, line in {
        path.parent: "name one GGUF file",
        tmp_path / "page.gguf": "not a GGUF file",
        tmp_path / "nope.gguf": "no such file",
    }.items():
        with pytest.raises(InputError, match=line):
            resolve_folder(str(place), "generator")


def test_of_the_hub_one_file_is_downloaded(write, monkeypatch, tmp_path):
    path, _, _ = write("qwen2", {"*": "Q8_0"})
    wanted = path.rename(path.with_name("Tiny-q4_k_m.gguf"))
    (path.parent / "Tiny-Q8_0.gguf").write_bytes(b"")
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(path.parent)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_folder("hf:some/Tiny-GGUF:Q4_K_M", "generator") == wanted
    assert asked == [("some/Tiny-GGUF", None, ["*Q4_K_M*.gguf", "*q4_k_m*.gguf", "*Q4_K_M*.gguf"])]
    with pytest.raises(InputError, match="no GGUF file"):
        resolve_folder("hf:some/Tiny-GGUF:Q3_K_S", "generator")


@pytest.mark.parametrize("first", [0, 9])
def test_a_model_in_several_files_is_read_from_all_of_them(write, first):
    path, folder, model = write("llama", {}, {**WIDE, "rope_parameters": ROPE3})
    tensors, _ = gguf_files.tensors_of(model, "llama", {})
    parts = [*tensors.items(), ("rope_freqs.weight", (0, (32,), factors(model)))]
    files = [path.with_name(f"m-0000{number}-of-00002.GGUF") for number in (1, 2)]
    said = gguf_files.metadata_of(folder, "llama") | {"split.no": 0, "split.count": 2}
    gguf_files.write_gguf(files[0], said, dict(parts[:first]))
    gguf_files.write_gguf(files[1], {"split.no": 1, "split.count": 2}, dict(parts[first:]))
    assert resolve_folder(str(files[1]), "generator") == files[0]
    assert differs(files[0], model) < 2e-5
    alone = files[0].rename(path.with_name("renamed.gguf"))
    with pytest.raises(UnsupportedModelError, match="must be named NAME-00001-of-00002"):
        read_shape(alone, None)
    with pytest.raises(InputError, match="shard m-00001-of-00002"):
        open_checkpoint(files[1])


ROPE3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def factors(model, scale=1.0):
    """What each of Llama 3's frequencies is divided by, as a file has it."""
    plain = torch.tensor([5e5 ** -(2 * i / 64) for i in range(32)])
    return (plain / model.model.rotary_emb.inv_freq * scale).numpy().tobytes()


def test_other_rope_factors_than_llama_3s_are_refused(write):
    path, folder, model = write("llama", {}, {**WIDE, "rope_parameters": ROPE3})
    tensors, _ = gguf_files.tensors_of(model, "llama", {})
    freqs = {"rope_freqs.weight": (0, (32,), factors(model, 1.1))}
    gguf_files.write_gguf(path, gguf_files.metadata_of(folder, "llama"), tensors | freqs)
    with pytest.raises(UnsupportedModelError, match="rope factors"):
        read_shape(path, None)


@pytest.mark.parametrize("biases", ["attn_q attn_k attn_v", "attn_q attn_k attn_v attn_output ffn"])
def test_biases_of_a_llama_are_those_of_its_file(tmp_path, biases):
    fakes.write_tokenizer(tmp_path)
    every = {"attention_bias": True, "mlp_bias": True}
    config = LlamaConfig(**WIDE, **every) if "ffn" in biases else Qwen2Config(**WIDE)
    model, path = fakes.write_checkpoint(tmp_path, config), tmp_path / "m.gguf"
    gguf_files.write_model(path, tmp_path, model, "llama", {})
    assert differs(path, model) < 2e-5


def test_yarn_scales_by_its_factors(write):
    said = {"type": "yarn", "factor": 4.0, "attn_factor": 1.5, "original_context_length": 64}
    path, _, _ = write("qwen2", {}, **{f"qwen2.rope.scaling.{key}": v for key, v in said.items()})
    assert read_shape(path, None).rope_scale == pytest.approx(1.5 * (1 + 0.1 * math.log(4)))


def test_a_header_that_says_more_than_is_read_is_refused_by_name(write):
    path, folder, model = write("qwen2", {})
    metadata = gguf_files.metadata_of(folder, "qwen2") | {"qwen2.expert_count": 0}
    tensors, _ = gguf_files.tensors_of(model, "qwen2", {})
    for line, said in read_yaml(Path(__file__).with_name("odd_headers.yaml"), "tests").items():
        held = said.pop("tensors", tensors)
        if held is not tensors:  # by type alone
            held = {name: (kind, (4,), b"1234") for name, kind in held.items()}
        gguf_files.write_gguf(path, metadata | said, held)
        with pytest.raises(UnsupportedModelError, match=f"^model {path}: .*{line}"):
            read_shape(path, None)


def test_a_tensor_that_the_model_does_not_have_is_refused(write):
    path, folder, model = write("llama", {})
    tensors, _ = gguf_files.tensors_of(model, "llama", {})
    for name in ("attn_q_norm.weight", "attn_what.weight", "attn_q.bias"):
        more = {f"blk.0.{name}": (0, (64,), bytes(256))}
        gguf_files.write_gguf(path, gguf_files.metadata_of(folder, "llama"), tensors | more)
        with pytest.raises(InputError, match=r"weight (blk|model\.layers)\.0.* (does|is) "):
            load(path)


def test_every_key_of_published_files_is_in_the_table(smollm2, gemma):
    """DeepSeek's is listed alone: its file is too large to fetch."""
    listed = json.loads(Path(__file__).with_name("gguf_headers.json").read_text())
    for path in (smollm2, gemma):
        assert [*read_header(path).metadata] == listed[path.name]
        assert gguf_remarks(path) == ()
    for keys in listed.values():
        kind = next(iter(GGUF.keys() & {key.partition(".")[0] for key in keys}))
        own = [key for key in keys if key.startswith(f"{kind}.")]
        assert GGUF[kind].check(own, "") == GGUF_FILE.check({*keys} - {*own}, "") == ()
    assert GGUF_FILE.check(["general.mood", "clip.x"], "m") == (
        "m: GGUF header has 'general.mood', which is ignored",
        "m: GGUF header has 'clip.x', which is ignored",
    )
