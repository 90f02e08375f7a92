"""The tree is the same with all weights on the device, and with layers on the host or on disk.

Pairs of options meet in tests/engine/test_same_tree.py; here are the formats and kinds of models.
"""

import json
import os
from copy import deepcopy

import pytest
from transformers import AutoConfig

import fakes
from beamwright import Solver
from beamwright.cli import main
from beamwright.config import Settings
from beamwright.errors import InputError, LinkError
from beamwright.kv.link import Wire
from beamwright.solver import weights_home
from beamwright.solver.memory import weights_and_activations
from beamwright.solver.weights_home import make_offloads
from beamwright_lab.models.published_files import FILES
from engines import PROBLEM, assert_nothing_allocated, assert_same, tiny_options
from gguf_files import write_model
from hybrids import EXPERTS, FAMILIES, TINY

KV_BYTES = 8 * 2**20
MIXED = {"*": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K"}
CHECKPOINTS = {  # by name: the family, and options of its config
    "llama": ("llama", {"num_hidden_layers": 5}),
    "moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    "hybrid": ("qwen3_next", FAMILIES["qwen3_next"]),
    "wide": (
        "llama",
        {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 3},
    ),
}
BLOCKS = {"Q8_0": {"*": "Q8_0"}, "mixed blocks": MIXED, "some blocks": {"attn_q": "Q8_0"}}
CASES = {  # by name: the model, the numbers of layers that are offloaded, and options
    "float32": ("llama", [3], {}),
    "bfloat16": ("llama", [4], {"dtype": "bfloat16"}),
    "float64": ("llama", [5], {"dtype": "float64"}),
    "int8": ("llama", [4], {"weights": "int8"}),
    "int4": ("llama", [5], {"weights": "int4"}),
    "modules": ("llama", [4], {"decoder": "transformers"}),
    "moe": ("moe", [4], {}),
    "moe in int8": ("moe", [3], {"weights": "int8"}),
    "hybrid": ("hybrid", [3], {}),
    "hybrid in float64": ("hybrid", [4], {"dtype": "float64"}),
    "blocks": ("Q8_0", [3], {}),
    "blocks of two types": ("mixed blocks", [3], {}),
    "blocks in modules": ("mixed blocks", [3], {"decoder": "transformers"}),
    "blocks beside float32": ("some blocks", [3], {}),
    "bundled": ("bundled", [3], {}),
    "bundled pair": ("bundled", [4, 4], {"verifier": "bundled"}),
    "bundled pair in int8": ("bundled", [4, 4], {"verifier": "bundled", "weights": "int8"}),
    "locality": ("bundled", [4, 4], {"verifier": "bundled", "kv_memory": "600KiB"}),
    "published": ("published", [9], {"n": 2, "max_step_tokens": 4}),
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Writes the model of a name once, and returns its folder or file."""
    written = {"bundled": "bundled", "published": FILES["smollm2"].path}

    def checkpoint(name):
        folder, (family, options) = tmp_path_factory.mktemp(name), CHECKPOINTS[name]
        fakes.write_tokenizer(folder)
        config = AutoConfig.for_model(family, **{**TINY, **options})
        return folder, fakes.write_checkpoint(folder, config)

    def of(name):
        if name not in written:
            folder, model = checkpoint("wide" if name in BLOCKS else name)
            if name in BLOCKS:
                file = folder / f"{name}.gguf"
                folder = write_model(file, folder, deepcopy(model), "llama", BLOCKS[name])
            written[name] = folder
        return written[name]

    return of


@pytest.fixture(scope="module")
def make(model_of):
    """Makes the solver of a case, with other options for some."""

    def of(name, **changes):
        model, _, options = CASES[name]
        short = {"n": 4, "width": 2, "max_rounds": 2, "max_tokens": 24, "host_memory": "8MiB"}
        options = {**short, "kv_memory": KV_BYTES, **options, **changes}
        if model == "bundled":
            return Solver(**{"model": "bundled", "verifier": "logprob", **options})
        return Solver(**tiny_options(model_of(model), **options))

    return of


@pytest.fixture(scope="module")
def resident(make):
    """The solution of a case with all weights on the device, and the memory that offloads."""
    found = {}

    def of(name):
        if name not in found:
            counts = CASES[name][1]
            with make(name) as solver:
                solution = solver.solve(PROBLEM)
                sizes, kv_bytes = solver._machinery.sizes, solver.settings.memory.kv_memory
            moved = [each.with_offloaded(n) for each, n in zip(sizes, counts, strict=True)]
            layer = moved[0].offloaded.home_bytes // counts[0]
            # Half a layer less than one layer less on the host would need.
            found[name] = solution, kv_bytes + sum(each.weights for each in moved) + layer // 2
        return found[name]

    return of


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", CASES)
def test_the_tree_is_the_same_wherever_weights_live(make, resident, name, home):
    if name == "published" and not FILES["smollm2"].is_here:
        pytest.skip("there is no published file")
    expected, memory = resident(name)
    assert expected.weights == {}
    with make(name, memory=memory, weights_home=home) as solver:
        solution = solver.solve(PROBLEM)
    assert_nothing_allocated(solver)
    assert_same(solution, expected)
    model, moved, _ = CASES[name]
    layers = [4] if model in ("moe", "hybrid") else moved  # all experts are at home
    assert [each.layers for each in solution.weights.values()] == layers
    for each in solution.weights.values():
        assert each.moved_bytes > each.home_bytes
    assert solution.kv.h2d_bytes == expected.kv.h2d_bytes, "of KV alone"
    assert (solution.kv.h2d_bytes > 0) is (name == "locality")


def test_memory_alone_divides_into_layers_and_kv(make):
    """What holds weights and activations, and no KV."""
    options = {"verifier": "bundled", "kv_memory": None}
    with make("bundled", **options) as solver:
        expected, sizes = solver.solve(PROBLEM), solver._machinery.sizes
    memory = sum(weights_and_activations(sizes, 4))
    with make("bundled", **options, memory=memory) as solver:
        assert_same(solver.solve(PROBLEM), expected)
        assert solver._machinery.offloads
        plan, sizes = solver._machinery.plan, solver._machinery.sizes
    assert 0 < plan.kv_bytes < memory - sum(weights_and_activations(sizes, 4))


# --- errors ------------------------------------------------------------------------------------


def test_a_damaged_file_ends_a_search_and_a_whole_one_serves_the_next(make, resident):
    expected, memory = resident("bundled")
    with make("bundled", memory=memory, weights_home="disk") as solver:
        handle = solver._machinery.offloads["generator"]._mover.home._handle
        kept = os.pread(handle, 1, 100)
        os.pwrite(handle, bytes([kept[0] ^ 1]), 100)
        for _ in range(2):
            with pytest.raises(LinkError, match="copying weights to the device failed") as caught:
                solver.solve(PROBLEM)
            assert "\n" not in str(caught.value)
            assert_nothing_allocated(solver)
        os.pwrite(handle, kept, 100)
        assert_same(solver.solve(PROBLEM), expected)


def test_a_full_disk_refuses_the_search(make, resident, monkeypatch, capsys):
    full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115 (its owner closes it)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
    words = ["--verifier", "logprob", "--n", "4", "--kv-memory", "8MiB"]
    memory = str(resident("bundled")[1] // 1024)
    assert main(["solve", PROBLEM, *words, "--memory", f"{memory}KiB"]) == 2
    said = capsys.readouterr().err
    assert "--weights-home disk: weights cannot be written" in said
    assert "No space left on device" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_home": "host"}, "--weights-home host: .* do not fit in the 1000 B of host"),
        ({"sparse": "ahead", "select": 24}, "--sparse ahead reads the next layer's weights early"),
        ({"weights_home": "device"}, "--memory too small: --kv-memory is .* and weights take"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(make, resident, monkeypatch, options, message):
    monkeypatch.setattr(weights_home, "host_memory_bytes", lambda: 1000)
    with pytest.raises(InputError, match=message) as caught:
        make("bundled", memory=resident("bundled")[1], **options)
    assert caught.value.exit_code == 2


def test_a_gpu_has_no_weights_on_disk():
    settings = Settings.model_validate(
        {"model": {"device": "cuda"}, "memory": {"weights_home": "disk", "memory": "1GiB"}}
    )
    with pytest.raises(InputError, match="a GPU gets weights from the host; use host"):
        make_offloads(settings, Wire(), 2**30, has_own=False)


# --- output ------------------------------------------------------------------------------------


def test_the_solution_tells_which_weights_moved(resident, capsys):
    memory = str(resident("bundled")[1] // 1024)
    words = ["solve", PROBLEM, "--verifier", "logprob", "--n", "4", "--kv-memory", "8MiB"]
    assert main([*words, "--memory", f"{memory}KiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["memory"]["weights_home"] == "auto"
    (weights,) = found["weights"].values()
    assert weights.keys() == {"layers", "home_bytes", "device_bytes", "moved_bytes"}
    assert weights["layers"] == 3
    assert weights["moved_bytes"] > weights["home_bytes"] > 0
