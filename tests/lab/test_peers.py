"""The peers benchmark's own sides, on small models; the peers themselves are not installed here."""

from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from beamwright.models.shape import ModelShape, shape_from_text
from beamwright_lab.common import decode_flops
from beamwright_lab.peers import large, models
from beamwright_lab.peers.adapters.gguf_file import gguf_name
from beamwright_lab.peers.adapters.own_worker import own_worker
from beamwright_lab.peers.models import model_folder
from beamwright_lab.peers.paths import PathSides
from beamwright_lab.peers.run import parts


def test_beamwright_writes_n_paths_of_one_length_from_the_prompt_that_the_others_get():
    args = Namespace(tokens=4, temperature=0.8, prompt_tokens=16)
    sides = PathSides(args, model_folder("bundled"), 2)
    assert sides.kv_bytes["beamwright"] > 0
    assert len(sides.prompt) == args.prompt_tokens


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `qwen2.5-0.5b` is, with fewer and smaller layers and fewer words."""
    folder = tmp_path_factory.mktemp("qwen")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_LARGE_SIZES", sizes)
        models._write_large(folder)
    return folder


def test_random_tokens_turn_into_text_and_back(small_folder):
    tokenizer = AutoTokenizer.from_pretrained(small_folder)
    ids = list(range(3 + 26 + 1, 1000))
    text = tokenizer.decode(ids)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    message = [{"role": "user", "content": text.removeprefix(" ")}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == text
    file = str(small_folder / "tokenizer.json")
    assert Tokenizer.from_file(file).get_vocab_size() == 1000


def test_both_own_workers_write_the_same_greedy_path(small_folder, tmp_path):
    prompt, first = list(range(100, 120)), {}
    options = {"dtype": "float32", "n": 2, "threads": 1}
    for side in ("beamwright", "transformers"):
        with own_worker(side, small_folder, tmp_path / "log", **options) as worker:
            reply = worker.ask(op="paths", prompt=prompt, n=2, num_new=6, temperature=0.0)
        assert reply["tokens"] == 12
        assert reply["kv_bytes"] > 0
        assert reply["peak_rss"] > 0
        first[side] = reply["first"]
    assert first["beamwright"] == first["transformers"]


def test_sides_that_are_not_set_up_are_left_out(monkeypatch):
    started = []

    def start(side: str, *_: object, **options: object) -> ExitStack:
        started.append((side, options["dtype"]))
        stack = ExitStack()
        stack.facts = {}  # type: ignore[attr-defined]
        return stack

    monkeypatch.setattr(large, "own_worker", start)
    monkeypatch.setattr(large, "model_folder", Path)
    args = Namespace(threads=1, skip=["vllm", "llama.cpp"])
    for dtype, sides in (("float32", 2), ("bfloat16", 2), ("int8", 1)):
        with ExitStack() as stack:
            assert len(large.start_sides(stack, args, dtype, 2)) == sides
    assert started[-1] == ("beamwright", "bfloat16")


def test_flops_of_one_prompt_and_its_paths():
    shape: ModelShape = shape_from_text("qwen2.5-0.5b")
    whole = large.path_flops(shape, n=4, num_prompt=1, num_new=3)
    # The prompt's one token has logits, too, so every forwarded token costs the same.
    assert whole == decode_flops(shape, 1 + 4 * 2, 1 + 4 * (2 + 3))


def test_every_tensor_of_a_layer_has_a_name_in_gguf():
    assert gguf_name("model.layers.23.mlp.down_proj.weight") == "blk.23.ffn_down.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"


def test_each_part_has_its_own_defaults_unless_they_are_given():
    given = Namespace(mode="all", models=["bundled", "qwen2.5-0.5b"], dtypes=["int8"])
    nothing = dict.fromkeys(("n", "rounds", "tokens", "max_rounds", "max_step_tokens"))
    found = parts(Namespace(**vars(given), **nothing))
    assert list(found) == ["paths", "paths-large", "search", "search-large"]
    (large_args,) = found["paths-large"].args
    assert (large_args.n, large_args.tokens) == ([1, 16, 64], 64)
    (asked,) = parts(Namespace(**vars(given), **{**nothing, "n": [2]}))["paths-large"].args
    assert asked.n == [2]
