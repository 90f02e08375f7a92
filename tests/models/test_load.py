from dataclasses import replace

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig

import fakes
from beamwright.attention import make_attention
from beamwright.errors import InputError, UnavailableError, UnsupportedModelError
from beamwright.io import read_toml_beside
from beamwright.models import load
from beamwright.models.hub import resolve_folder
from beamwright.models.load import load_model, make_free_memory_reader, resolve_dtype
from beamwright.models.named import NAMED_SHAPES, named_shape, shape_from_text
from beamwright.models.survey import shape_of, survey_model
from beamwright.sections import ModelSettings

INLINE = "llama,layers=2,hidden=16,heads=4,kv_heads=2,intermediate=24,vocab=40,context=64"
CASES = read_toml_beside(__file__)


@pytest.mark.parametrize(("spec", "meant"), CASES["folders"].items())
def test_a_missing_folder_names_the_option_and_what_was_meant(spec, meant):
    with pytest.raises(InputError, match=f"--model {spec}: no such folder{meant}"):
        resolve_folder(spec, "generator")
    if "hf:" not in meant:  # verifiers run here
        with pytest.raises(InputError, match=rf"--verifier {spec}: no such folder$"):
            resolve_folder(spec, "verifier")


def test_vllms_engine_is_named_by_its_server():
    way = "vllm: start `vllm serve a/b`, then pass --model openai:http://127.0.0.1:8000/v1#a/b"
    with pytest.raises(InputError, match=f"^{way}$"):
        resolve_folder("vllm:hf:a/b?dtype=float32", "generator")


def test_an_empty_gguf_file_is_named(tmp_path):
    file = tmp_path / "x.gguf"
    file.touch()
    for spec in (file, tmp_path):
        with pytest.raises(InputError, match=r"x.gguf: not a GGUF file"):
            load_model(str(spec), ModelSettings())


def test_without_a_network_the_hub_is_unavailable(monkeypatch):
    def no_network(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(UnavailableError, match="hf:org/name: cannot be downloaded") as caught:
        load_model("hf:org/name", ModelSettings())
    assert "local folder" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_downloaded_folder_is_read(monkeypatch, llama_folder):
    asked = downloads(monkeypatch, llama_folder)
    assert load_model("hf:org/name", ModelSettings()).folder == llama_folder
    assert {each[:2] for each in asked} == {("org/name", None)}
    asked.clear()
    load_model("hf:org/name@v1.2/a", ModelSettings())
    assert {each[:2] for each in asked} == {("org/name", "v1.2/a")}


def test_a_model_of_the_hub_that_cannot_run_is_not_downloaded(monkeypatch, llama_folder):
    fakes.change_json(llama_folder / "config.json", model_type="mamba")
    asked = downloads(monkeypatch, llama_folder)
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported"):
        load_model("hf:org/name", ModelSettings())
    assert asked
    assert not any("*.safetensors" in patterns for *_, patterns in asked)


def downloads(monkeypatch, folder):
    """What is asked of the hub, which has this folder: names, revisions, patterns of files."""
    asked = []

    def download(name, revision=None, allow_patterns=()):
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize(("device", "complaint"), CASES["devices"].items())
def test_a_device_that_is_not_there_is_an_input_error(llama_folder, device, complaint):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(InputError, match=complaint):
        load_model(str(llama_folder), ModelSettings(device=device))


# --- random shapes ---------------------------------------------------------------------------


def test_a_card_without_a_number_says_what_is_free(monkeypatch):
    """torch insists on one where it is asked for a process's share."""
    said = {"memory_reserved": 300, "memory_allocated": 100, "get_per_process_memory_fraction": 0.5}
    for name, value in {**said, "mem_get_info": (4000, 8000)}.items():
        monkeypatch.setattr(torch.cuda, name, {1: value}.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in ("cuda", "cuda:1"):
        assert make_free_memory_reader(torch.device(device))() == 3900


def test_an_inline_shape_is_what_it_says():
    loaded = load_model(f"random:{INLINE}", ModelSettings(context=32))
    shape = loaded.decoder.shape
    assert (loaded.codec, loaded.folder) == (None, None)
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (2, 16, 4, 2)
    assert (shape.head_dim, shape.vocab, shape.context) == (4, 40, 32)


def test_named_shapes_have_their_published_sizes_and_names():
    for name, (billions, kv_bytes) in CASES["published"].items():
        shape = NAMED_SHAPES[name]
        assert shape.num_parameters / 1e9 == pytest.approx(billions, abs=0.006), name
        assert shape.kv_bytes_per_token(2) == kv_bytes, name
    for text, name in CASES["hub"].items():
        assert named_shape(text) is NAMED_SHAPES[name], text


def test_a_named_hybrid_is_the_model_that_transformers_builds():
    found = survey_model(AutoConfig.for_model("qwen3_5_text"))  # whose default is the smaller one
    built, shape = shape_of(found, None), NAMED_SHAPES["qwen3.5-9b"]
    assert sorted(built.built.matrices) == sorted(shape.matrices)
    alike = {name: getattr(shape, name) for name in ("context", "full_context", "built")}
    assert replace(built, **alike) == shape
    assert built.num_parameters == shape.num_parameters
    assert shape.state_bytes(2) == 49.5 * 2**20
    assert NAMED_SHAPES["qwen3.5-27b"].state_bytes(2) == 147.75 * 2**20


def test_a_named_hybrid_has_no_random_weights():
    with pytest.raises(InputError, match=r"random:qwen3.5-9b: transformers builds this model"):
        load_model("random:qwen3.5-9b", ModelSettings())


@pytest.mark.parametrize(("changed", "complaint"), CASES["shapes"])
def test_a_bad_shape_says_what_is_wrong(changed, complaint):
    with pytest.raises(InputError, match=complaint):
        shape_from_text(INLINE.replace(*changed.split("->")))
    with pytest.raises(InputError, match=r"no such shape; known: opt-2.7b"):
        shape_from_text("gpt-5")


# --- what `--dtype auto` means ----------------------------------------------------------------

SMALL = shape_from_text(
    "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=96,vocab=99,context=128"
)
LARGE = replace(SMALL, vocab=2_000_000, stored_bfloat16=True)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("invariant", [True, False])
def test_a_large_checkpoint_in_bfloat16_stays_in_it_where_that_is_fast_and_exact(
    monkeypatch, fast, invariant
):
    monkeypatch.setattr(load, "has_bfloat16", lambda: fast)
    monkeypatch.setattr(load, "products_are_invariant", lambda *_: invariant)
    expected = torch.bfloat16 if fast and invariant else torch.float32
    assert resolve_dtype("auto", "cpu", LARGE) == expected
    assert resolve_dtype("auto", "cpu", replace(LARGE, stored_bfloat16=False)) == torch.float32
    assert resolve_dtype("auto", "cpu", replace(SMALL, stored_bfloat16=True)) == torch.float32


def test_what_is_asked_for_is_taken_and_a_card_computes_in_bfloat16():
    for name in ("float32", "float64", "float16", "bfloat16"):
        assert resolve_dtype(name, "cpu", LARGE) == getattr(torch, name)
    assert resolve_dtype("auto", "cuda", SMALL) == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "dtype", "backend"),
    [((7, 5), torch.float16, "tree"), ((8, 0), torch.bfloat16, "triton-tree")],
)
def test_a_card_without_matrix_units_for_bfloat16_computes_in_float16_without_kernels(
    monkeypatch, capability, dtype, backend
):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = resolve_dtype("auto", "cuda", SMALL)
    assert found == dtype
    assert make_attention("auto", torch.device("cuda"), found).name == backend


@pytest.mark.parametrize(("known", "fast"), [({"amx_bf16": True}, True), ({"avx2": True}, False)])
def test_a_cpu_that_reports_bfloat16_instructions_is_fast_in_it(monkeypatch, known, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert load.has_bfloat16.__wrapped__() is fast
