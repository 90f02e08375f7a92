"""The decoder over `transformers`' modules, against `transformers` and against the own one."""

import shutil
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import fakes
from beamwright.attention import make_attention
from beamwright.engine.selftest import batches_are_exact
from beamwright.errors import UnsupportedModelError
from beamwright.models import adapter, survey
from beamwright.models.adapter import AdaptedDecoder
from beamwright.models.hf_config import read_shape
from beamwright.models.load import inspect_model, load_model, read_reference
from beamwright.sections import ModelSettings
from engines import exact_dtype, logprobs, prefilled

TINY = {
    **{"vocab_size": fakes.VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    **{"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED = {**ROUTED, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8},
}
SCALES = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
FAMILIES = {
    "qwen3_moe": MOE,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "smollm3": {},
    "granite": {**SCALES, "attention_multiplier": 0.2},
    "olmo2": {},
    "glm4": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "deepseek_v3": {**LATENT, **GROUPED, "first_k_dense_replace": 1},
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
# Windows in some layers, soft caps, sinks, layers that read another's KV.
IN_GROUPS = {
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 16, "num_hidden_layers": 6},
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {
        **{"num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 16},
        **{"vocab_size_per_layer_input": fakes.VOCAB, "hidden_size_per_layer_input": 8},
        **{"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6},
        **{"layer_types": ["sliding_attention", "full_attention"] * 3},
    },
}
FAMILIES.update(IN_GROUPS)
OWN = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4},
}


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A tiny checkpoint of a family; written once."""

    @cache
    def call(family):
        folder, options = tmp_path_factory.mktemp(family), {**TINY, **{**FAMILIES, **OWN}[family]}
        fakes.write_tokenizer(folder)
        fakes.write_checkpoint(folder, AutoConfig.for_model(family, **options))
        return folder

    return call


def load(folder, **settings):
    settings = {"decoder": "transformers", "dtype": "float32", **settings}
    return load_model(str(folder), ModelSettings(model=str(folder), **settings))


def tokens(count=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, fakes.VOCAB, (count,), generator=generator).tolist()


@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probabilities_are_those_of_transformers(write, kind):
    folder, ids = write(kind), tokens()
    reference = read_reference(folder, torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    decoder = load(folder, decoder="auto").decoder
    assert isinstance(decoder, AdaptedDecoder)
    for attention in ("reference", "tree"):
        torch.testing.assert_close(logprobs(decoder, ids, attention), expected, atol=1e-5, rtol=0)
    assert decoder.shape.num_parameters == sum(p.numel() for p in reference.parameters())
    assert decoder.shape.working_bytes_per_row(4) > 4 * fakes.VOCAB


@pytest.mark.parametrize("kind", OWN)
def test_both_decoders_say_the_same(write, kind):
    folder, ids = write(kind), tokens()
    own, adapted = (load(folder, decoder=name).decoder for name in ("auto", "transformers"))
    assert (type(own).__name__, type(adapted).__name__) == ("DenseDecoder", "AdaptedDecoder")
    torch.testing.assert_close(logprobs(own, ids), logprobs(adapted, ids), atol=1e-5, rtol=0)
    same = ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocab", "context", "tied")
    for name in (*same, "num_parameters", "active_parameters", "stored_bfloat16"):
        assert getattr(own.shape, name) == getattr(adapted.shape, name), name
    chosen = torch.tensor([3, 5])
    assert torch.equal(own.embedded(chosen), adapted.embedded(chosen))


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "granite"])
def test_rows_do_not_depend_on_the_batch(write, kind):
    decoder = load(write(kind), dtype=exact_dtype()).decoder
    assert batches_are_exact(decoder, make_attention("tree"))
    # A layer without experts, and one with them.
    assert decoder.first_layers().shape.layers == (2 if kind == "deepseek_v3" else 1)


def test_experts_that_tie_are_chosen_by_the_row_alone(write, tmp_path):
    """Every router gives all of its experts the same score: whom it takes must not depend on the
    other rows, nor the order that they are added up in."""

    def change(tensors):
        routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
        assert len(routers) == TINY["num_hidden_layers"]
        return {**tensors, **{name: tensors[name] * 0 for name in routers}}

    shutil.copytree(write("qwen3_moe"), tmp_path, dirs_exist_ok=True)
    fakes.change_tensors(tmp_path, change)
    assert batches_are_exact(load(tmp_path, dtype=exact_dtype()).decoder, make_attention("tree"))


@pytest.mark.parametrize("tokens_and_taken", [(16, 2), (1, 2), (40, 3)])
def test_one_kernel_for_all_experts_says_what_one_by_one_do(monkeypatch, tokens_and_taken):
    num_tokens, taken = tokens_and_taken
    config = AutoConfig.for_model("qwen3_moe", **{**TINY, **MOE, "num_experts_per_tok": taken})
    generator, both = torch.Generator().manual_seed(0), []
    hidden = torch.randn(num_tokens, 64, generator=generator)
    scores = torch.randn(num_tokens, 8, generator=generator).softmax(-1)
    weights, chosen = scores.topk(taken)
    for grouped in (False, True):
        monkeypatch.setattr(adapter, "multiplies_groups", lambda weight, value=grouped: value)
        module = Qwen3MoeExperts(config)
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.data.copy_(drawn)
        made = adapter.Experts(module, None, lambda *which: None, None)
        both.append(made(hidden, chosen, weights).detach())
        assert all(parameter.is_meta for parameter in module.parameters())
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "olmo2"])
def test_weights_shrink_as_the_plan_says(write, kind, weights):
    folder, ids = write(kind), tokens()
    plain, small = load(folder).decoder, load(folder, weights=weights).decoder
    difference = (logprobs(plain, ids) - logprobs(small, ids)).abs()
    assert 0 < difference.mean() < (0.05 if weights == "int8" else 0.5)
    sizes = [
        inspect_model(ModelSettings(model=str(folder), dtype="float32", weights=each))
        for each in ("auto", weights)
    ]
    assert sizes[1]["weight_bytes"] < sizes[0]["weight_bytes"]


def test_a_token_is_multiplied_with_the_experts_that_it_takes(write):
    shape = read_shape(write("qwen3_moe"), None)
    idle = 2 * (8 - 2) * 3 * 64 * 32
    assert shape.active_parameters == shape.num_parameters - idle
    assert dict(((r, c), n) for r, c, n in shape.matrices)[64, 32] == 2 * 8


@pytest.mark.parametrize(
    ("kind", "options", "complaint"),
    [
        ("mamba", {}, "'mamba' is not supported: its layers take no positions, or attend to none"),
        ("recurrent_gemma", {}, r"layer 0 brings tokens together \(\w+\) on its own"),
        ("minimax", {}, "has no attribute 'get_linear_cache'"),
        ("bloom", {}, "'bloom' is not supported: its layers take no positions"),
        ("t5", {}, "an encoder and a decoder"),
        ("falcon", {"head_dim": None}, "'falcon' is not supported: attention of its own"),
    ],
)
def test_what_cannot_run_says_which_layers_stop_it(tmp_path, kind, options, complaint):
    given = {name: value for name, value in {**TINY, **options}.items() if value is not None}
    AutoConfig.for_model(kind, **given).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=complaint) as caught:
        read_shape(tmp_path, None)
    assert "--model openai:URL#NAME" in str(caught.value)


def test_an_older_transformers_is_told_which_one_is_wanted(write, monkeypatch):
    folder = write("qwen3_moe")
    monkeypatch.setattr(survey, "version", lambda name: "5.17.1")
    with pytest.raises(UnsupportedModelError, match=r"needs transformers 5.23, this is 5.17.1"):
        read_shape(folder, None)
    assert read_shape(write("qwen3"), None).built is None


def test_a_backbone_with_another_head_is_loaded_without_logits(tmp_path):
    """As reward models are saved: the head's own rows are read by whoever scores with them."""
    config = AutoConfig.for_model("qwen3_moe", **{**TINY, **MOE, "num_labels": 1})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    fakes.write_tokenizer(tmp_path)
    settings = ModelSettings(model=str(tmp_path), dtype="float32")
    loaded = load_model(str(tmp_path), settings, role="verifier", reads_logits=False)
    ids = tokens(32)
    decoder = loaded.decoder
    with torch.inference_mode():
        expected = model.model(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(prefilled(decoder, ids, "tree"), expected, atol=1e-5, rtol=0)
    assert decoder.shape.num_parameters == sum(p.numel() for p in model.model.parameters())


def test_what_a_token_sees_is_read_from_the_mask():
    causal = lambda b, h, q, k: k <= q  # noqa: E731
    window = lambda b, h, q, k: (k <= q) & (q - k < 16)  # noqa: E731
    chunks = lambda b, h, q, k: (k <= q) & (k // 16 == q // 16)  # noqa: E731
    assert survey.window_of(None, 100) is None
    assert survey.window_of(causal, 100) is None
    assert survey.window_of(window, 100) == 16
    assert survey.window_of(window, 16) is None
    assert survey.window_of(chunks, 16) is None
    with pytest.raises(UnsupportedModelError, match="chunked"):
        survey.window_of(chunks, 100)
    with pytest.raises(UnsupportedModelError, match="neither causal"):
        survey.window_of(lambda b, h, q, k: k >= q, 100)


def test_layers_that_share_kv_are_seen_though_the_model_cuts_its_masks():
    kinds = ["sliding_attention", "full_attention"] * 2
    options = {"layer_types": kinds, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    sizes = {"sliding_window": 16, "hidden_size_per_layer_input": 8, "global_head_dim": 32}
    config = AutoConfig.for_model("gemma4_text", **{**TINY, **options, **sizes})
    calls = survey.survey(config).calls
    shared, groups = survey._groups(calls, 128, None)
    assert shared == ((2, 0), (3, 1))
    assert [(each.layers, each.head_dim, each.window) for each in groups] == [
        ((0,), 16, 16),
        ((1,), 32, None),
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gemma3n_text"])
def test_windows_sizes_and_shared_kv_in_8_bits(write, make_solver, kind, kv_dtype):
    """Close to full precision, and the same tree with half of the room."""
    folder, ids = write(kind), tokens()
    full, kept = (load(folder, kv_dtype=each).decoder for each in ("auto", kv_dtype))
    assert (logprobs(full, ids) - logprobs(kept, ids)).abs().mean() < 0.05
    options = {"model": str(folder), "decoder": "transformers", "dtype": "float64"}
    solved = make_solver(**options, kv_dtype=kv_dtype).solve("a b c")
    budget = solved.kv.device_peak_bytes // 2
    tight = make_solver(**options, kv_dtype=kv_dtype, schedule="locality", kv_memory=budget)
    found = tight.solve("a b c")
    assert found.tree_hash == solved.tree_hash
    assert found.kv.d2h_bytes
