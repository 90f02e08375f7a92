"""The decoder over `transformers`' modules, against `transformers` and against the own one."""

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import fakes
from beamwright.attention import make_attention
from beamwright.engine.selftest import batches_are_exact
from beamwright.errors import UnsupportedModelError
from beamwright.io import read_yaml
from beamwright.models import adapter, survey
from beamwright.models.adapter import AdaptedDecoder
from beamwright.models.hf_config import read_shape
from beamwright.models.load import inspect_model, load_model, load_reference_model
from beamwright.sections import ModelSettings
from engines import exact_dtype, logprobs, prefilled

CASES = read_yaml(Path(__file__).with_suffix(".yaml"), "tests")
TINY = {"vocab_size": fakes.VOCAB, **CASES["every"]}
FAMILIES, OWN = CASES["adapted"], CASES["own"]
MOE = FAMILIES["qwen3_moe"]


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
    reference = load_reference_model(folder, torch.float32).eval()
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
    assert torch.equal(own.embed_tokens(chosen), adapted.embed_tokens(chosen))


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


@pytest.mark.parametrize(("num_tokens", "taken"), [(16, 2), (1, 2), (40, 3)])
def test_one_kernel_for_all_experts_says_what_one_by_one_do(monkeypatch, num_tokens, taken):
    config = AutoConfig.for_model("qwen3_moe", **{**TINY, **MOE, "num_experts_per_tok": taken})
    generator, both = torch.Generator().manual_seed(0), []
    hidden = torch.randn(num_tokens, 64, generator=generator)
    scores = torch.randn(num_tokens, 8, generator=generator).softmax(-1)
    weights, chosen = scores.topk(taken)
    for grouped in (False, True):
        monkeypatch.setattr(adapter, "can_multiply_groups", lambda weight, value=grouped: value)
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


@pytest.mark.parametrize(("kind", "complaint"), CASES["refused"].items())
def test_what_cannot_run_says_which_layers_stop_it(tmp_path, kind, complaint):
    given = {name: value for name, value in TINY.items() if (kind, name) != ("falcon", "head_dim")}
    AutoConfig.for_model(kind, **given).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=complaint) as caught:
        read_shape(tmp_path, None)
    assert "--model openai:URL#NAME" in str(caught.value)


def test_an_older_transformers_is_told_which_one_is_wanted(write, monkeypatch):
    folder = write("qwen3_moe")
    monkeypatch.setattr(survey, "version", lambda name: "5.17.1")
    with pytest.raises(UnsupportedModelError, match=r"needs transformers 5.23, not 5.17.1"):
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
    """Causal ones and windows: those of the families above."""
    chunks = lambda b, h, q, k: (k <= q) & (k // 16 == q // 16)  # noqa: E731
    assert survey.window_of(None, 100) is survey.window_of(chunks, 16) is None
    with pytest.raises(UnsupportedModelError, match="chunked"):
        survey.window_of(chunks, 100)
    with pytest.raises(UnsupportedModelError, match="must be causal"):
        survey.window_of(lambda b, h, q, k: k >= q, 100)


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
