"""Searches with models whose layers see windows: same trees on every schedule, in less memory."""

import shutil

import pytest
from transformers import MistralConfig, Qwen3Config

import fakes
from beamwright.errors import InputError
from engines import PROBLEM, assert_nothing_allocated, exact_dtype, grow, tiny_solver

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    **{"vocab_size": fakes.VOCAB, "hidden_size": 32, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
QWEN = {**SIZES, "head_dim": 8, "use_sliding_window": True}
KINDS = {
    "every layer, 16": (MistralConfig, {"num_hidden_layers": 2, "sliding_window": 16}),
    "1:1, 16": (Qwen3Config, {"layer_types": [SLIDING, FULL] * 2, "sliding_window": 16}),
    "1:1, 64": (Qwen3Config, {"layer_types": [FULL, SLIDING], "sliding_window": 64}),
    "5:1, 16": (Qwen3Config, {"layer_types": [*[SLIDING] * 5, FULL], "sliding_window": 16}),
}
LONG = {
    **{
        "search": "dvts",
        "n": 12,
        "width": 2,
        "max_rounds": 8,
        "max_step_tokens": 20,
        "max_tokens": 120,
    },
    **{"ignore_eos": True, "delimiter": "e"},
}
"""Paths of about 140 tokens, behind two windows of 64."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A checkpoint with layers of this kind; windows: False for the same without."""
    written = {}

    def write(kind, *, windows=True):
        if (kind, windows) not in written:
            folder = written[kind, windows] = tmp_path_factory.mktemp("windows")
            make, options = KINDS[kind]
            if make is Qwen3Config:
                options = {**QWEN, "num_hidden_layers": len(options["layer_types"]), **options}
            options = {**SIZES, **options}
            if not windows:
                options = {**options, "sliding_window": None, "use_sliding_window": False}
                options.pop("layer_types", None)
            fakes.write_tokenizer(folder)
            fakes.write_checkpoint(folder, make(**options))
        return written[kind, windows]

    return write


def peak_blocks(solver):
    store = solver.generator.store
    return store.device_peak_bytes // store.device.bytes_per_block


SAME = [(kind, dtype) for kind, dtype in zip(KINDS, ["float32", "float64"] * 2, strict=True)]
SAME += [pytest.param("1:1, 16", "float32", marks=pytest.mark.nightly)]


@pytest.mark.parametrize(("kind", "dtype"), SAME)
def test_trees_are_the_same_on_every_schedule(folder_of, kind, dtype):
    if dtype == "float32" and exact_dtype() != "float32":
        pytest.skip("this machine's float32 products follow the batch")
    options = {**LONG, "dtype": dtype}
    solver = tiny_solver(folder_of(kind), schedule="in-gpu", **options)
    expected, tree = grow(solver)
    assert max(node.end for node in tree.nodes()) > 128
    need = solver.generator.store.device_peak_bytes
    others = [{"max_batch": 3}, {"attention": "dense"}]
    for changes in ({}, *(others if (kind, dtype) == ("1:1, 16", "float64") else [])):
        scarce = {"kv_memory": need // 4, "host_memory": "8MiB", **changes}
        some = tiny_solver(folder_of(kind), schedule="locality", **options, **scarce)
        found, _ = grow(some)
        assert found.tree_hash == expected.tree_hash
        assert found.kv.h2d_bytes > 0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["1:1, 16", "every layer, 16"])
def test_recomputed_and_resumed_trees_are_the_same(folder_of, kind, tmp_path):
    options = {**LONG, "dtype": "float64"}
    solver = tiny_solver(folder_of(kind), schedule="in-gpu", **options)
    file, files = tmp_path / "search.json", []
    expected = solver.solve(
        PROBLEM,
        on_round=lambda report: files.append(shutil.copy(file, tmp_path / f"{report.round}.json")),
        checkpoint=file,
    )
    for saved in (files[1], files[len(files) // 2]):
        again = solver.resume(saved)
        assert again.tree_hash == expected.tree_hash
        assert_nothing_allocated(solver)
    need = solver.generator.store.device_peak_bytes
    for share in (3, 4):  # what is computed again must not make way for what else is
        scarce = {"kv_memory": need // share, "evict": "recompute"}
        again = tiny_solver(folder_of(kind), schedule="locality", **options, **scarce)
        assert grow(again)[0].tree_hash == expected.tree_hash
        assert again.generator.store.counts.recomputed_tokens > 0


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("1:1, 16", "5:1, 16")),
        "every layer, 16",
    ],
)
def test_windows_save_memory(folder_of, kind):
    """Without, the same model holds all of every path in all layers."""
    peaks = {}
    for windows in (True, False):
        options = {**LONG, "max_rounds": 12, "max_tokens": 180}
        solver = tiny_solver(folder_of(kind, windows=windows), schedule="in-gpu", **options)
        grow(solver)
        peaks[windows] = solver.generator.store.device_peak_bytes
    assert (
        peaks[True]
        < {"1:1, 16": 0.75, "5:1, 16": 0.5, "every layer, 16": 0.45}[kind] * (peaks[False])
    )


@pytest.mark.parametrize("changes", [{"schedule": "layerwise"}, {"sparse": "quest"}])
def test_what_does_not_know_windows_says_so(folder_of, changes):
    with pytest.raises(InputError, match="windows"):
        tiny_solver(folder_of("1:1, 16"), host_memory="8MiB", **changes)
