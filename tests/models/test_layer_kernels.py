"""A layer's elementwise work in Triton against torch's: on a GPU if there is one, else interpreted.

`DenseDecoder` takes the kernels on a card; on a CPU a test puts them in.
"""

import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from beamwright.attention.protocols import AttentionView
from beamwright.models import dense, layer_kernels, linear, streaming
from beamwright.models.dense import Norm, fused_kernels
from beamwright.models.linear import make_packer, prepack_linear
from beamwright.models.load import load_model
from beamwright.models.streaming import KernelLinear
from beamwright.models.trials import KernelChooser
from beamwright.plan.costs import Storage
from beamwright.sections import ModelSettings
from engines import random_decoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [1, 8, 40]
SIZES = "layers=2,hidden=72,intermediate=100,vocab=64,context=64"
FAMILIES = {
    "llama": f"llama,{SIZES},heads=6,kv_heads=2,head_dim=12",
    "qwen3": f"qwen3,{SIZES},heads=3,kv_heads=1,head_dim=16",
    "opt": f"opt,{SIZES},heads=4",
}


@pytest.fixture(autouse=True)
def rounds_to_nearest(monkeypatch):
    """As cards do it; the interpreter cuts off what does not fit into bfloat16."""
    if DEVICE == "cuda":
        return
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(numbers, source, target, mode):
        if target != language.bfloat16:
            return convert(numbers, source, target, mode)
        found = torch.from_numpy(numbers.copy()).bfloat16()
        return found.view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def drawn(*size, dtype):
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def norm_of(width, dtype, kind="rms"):
    bias = drawn(width, dtype=dtype) if kind == "layer" else None
    return Norm(kind, 1e-5, drawn(width, dtype=dtype) / 4 + 1, bias)


def assert_close(found, expected, unequal=0.01):
    """But for the last bit, and mostly with that one, too; in float32 sums have another order."""
    step = torch.finfo(found.dtype).eps
    half = found.dtype != torch.float32
    torch.testing.assert_close(found, expected, rtol=2 * step, atol=(4 if half else 16) * step)
    if half:
        assert (found != expected).float().mean() <= unequal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("kind", "width"), [("rms", 72), ("layer", 128), ("rms", 517)])
def test_residual_and_norm(rows, kind, width, dtype):
    x, delta = (drawn(rows + more, width, dtype=dtype)[more:] for more in (0, 1))
    norm, whole = norm_of(width, dtype, kind), x + delta
    expected = norm(whole)
    alone = layer_kernels.add_norm(x[-1:].clone(), delta[-1:], norm)
    found = layer_kernels.add_norm(x, delta, norm)
    assert torch.equal(x, whole)
    assert_close(found, expected)
    assert torch.equal(found[-1:], alone), "a row follows the batch"
    assert torch.equal(layer_kernels.add_norm(x, None, norm), found)
    assert torch.equal(x, whole), "nothing was to be added"


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_the_norm_adds_up_the_parts_of_a_product_as_the_product_does(dtype, monkeypatch):
    monkeypatch.setattr(streaming, "count_parts", lambda *_: 3)
    inner, weight = drawn(8, 384, dtype=dtype), drawn(80, 384, dtype=dtype)
    down, x, norm = KernelLinear(weight), drawn(8, 80, dtype=dtype), norm_of(80, dtype)
    parts = down.partial_sums(inner)
    assert parts.shape == (3, 8, 80)
    added, apart = x.clone(), x.clone()
    assert torch.equal(
        layer_kernels.add_norm(apart, parts, norm), layer_kernels.add_norm(added, down(inner), norm)
    )
    assert torch.equal(apart, added)
    biased = KernelLinear(weight, weight[:, 0].clone())
    assert torch.equal(biased.partial_sums(inner), biased(inner)), "a bias is added to the whole"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "normed"), [(6, 2, 16, False), (3, 1, 24, True)]
)
def test_rotation_and_norms_of_heads(rows, queries, keys, head_dim, normed, dtype):
    shape = f"qwen3,{SIZES},heads={queries},kv_heads={keys},head_dim={head_dim}"
    decoder = random_decoder(shape, dtype, DEVICE, kernels=False)
    norms = [norm_of(head_dim, dtype) for _ in range(2)] if normed else [None, None]
    layer = decoder.weights.layers[0]
    layer.query_norm, layer.key_norm = norms
    positions = torch.arange(rows, device=DEVICE) % 64
    tables = decoder._far.cos, decoder._far.sin
    # More lies beside each row's heads than those that are turned.
    wide = drawn(rows, queries + 3 * keys, head_dim, dtype=dtype)
    expected, found = wide.clone(), wide.clone()
    decoder._rotate_heads(layer, expected, *(table[positions].unsqueeze(1) for table in tables))
    layer_kernels.rotate(found[:, : queries + 2 * keys], queries, keys, positions, *tables, *norms)
    assert_close(found, expected)
    assert torch.equal(found[:, queries + keys :], wide[:, queries + keys :])
    alone = wide[-1:].clone()
    layer_kernels.rotate(alone, queries, keys, positions[-1:], *tables, *norms)
    assert torch.equal(alone, found[-1:]), "a row follows the batch"


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("kind", layer_kernels.GATED)
def test_gates(rows, kind, dtype, monkeypatch):
    monkeypatch.setattr(layer_kernels, "_PIECE", 64)
    inner = 2 * drawn(rows, 2 * 100, dtype=dtype)
    gate, up = inner.chunk(2, dim=-1)
    tanh = {"approximate": "tanh" if kind == "gelu_tanh" else "none"}
    expected = (F.silu(gate) if kind == "silu" else F.gelu(gate, **tanh)).mul_(up)
    # Of gelu's negative side little is left in float32, and more of it here than torch leaves.
    assert_close(
        layer_kernels.gated(inner, kind), expected, unequal=0.01 if kind == "silu" else 0.1
    )


# --- in a decoder ----------------------------------------------------------------------------


class OwnTokenOnly(AttentionView):
    """A view in which every token sees itself only; it keeps what it was told to foresee."""

    def __init__(self, *, looks_ahead=False):
        self.looks_ahead, self.foreseen = looks_ahead, []

    def foresee(self, layer, query):
        self.foreseen.append(query)

    def attend(self, layer, query, key_value, sinks=None):
        return query + key_value[:, 1].repeat_interleave(query.shape[1] // key_value.shape[2], 1)


def both(name, dtype=torch.float32, tile_rows=None):
    """A decoder with torch's operations, and one with the kernels, of the same weights."""
    how = {"dtype": dtype, "device": DEVICE, "tile_rows": tile_rows}
    plain, kernels = (random_decoder(FAMILIES[name], **how) for _ in range(2))
    plain._fused, kernels._fused = None, layer_kernels
    return plain, kernels


def hidden_of(decoder, rows, view=None, read=None):
    tokens = torch.arange(rows, device=DEVICE) % 60
    return decoder.hidden(tokens, tokens + 3, view or OwnTokenOnly(), read)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_logits_are_torch_s(name, dtype):
    plain, kernels = both(name, dtype)
    expected, found = (decoder.logits(hidden_of(decoder, 12)) for decoder in (plain, kernels))
    step = torch.finfo(dtype).eps
    assert (found - expected).abs().max() <= 8 * step * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_tiles_read_rows_first_layers_and_what_is_foreseen(name):
    plain, kernels = both(name)
    tiled = both(name, tile_rows=8)[1]
    whole, read = hidden_of(kernels, 12), torch.tensor([3, 11, 0, 7], device=DEVICE)
    torch.testing.assert_close(hidden_of(tiled, 12), whole)
    torch.testing.assert_close(hidden_of(kernels, 12, read=read), whole[read])
    firsts = [hidden_of(each.first_layers(), 12) for each in (plain, kernels)]
    torch.testing.assert_close(*firsts)
    views = [OwnTokenOnly(looks_ahead=True) for _ in range(2)]
    torch.testing.assert_close(*map(hidden_of, (plain, kernels), (12, 12), views))
    assert [len(view.foreseen) for view in views] == [1, 1]
    for expected, found in zip(*(view.foreseen for view in views), strict=True):
        torch.testing.assert_close(found, expected)


class AsTriton:
    """A kernel as Triton gives it: `launch` is told the grid, and returns a handle."""

    def __init__(self, launch):
        self.launch = launch

    def __getitem__(self, grid):
        return lambda *args, **how: self.launch(grid, args)


def test_what_is_compiled_is_launched_by_its_handle(monkeypatch):
    """But only on tensors of the same kind: Triton compiles for where they begin, too."""
    compiled, by_handle = [], []
    handle = AsTriton(lambda *launch: by_handle.append(launch))
    kernel = AsTriton(lambda *launch: compiled.append(launch) or handle)
    monkeypatch.setattr(layer_kernels, "add_norm_rows", kernel)
    monkeypatch.setattr(layer_kernels, "_handles", lambda known={}: known)
    norm, x, delta = norm_of(72, torch.float32), *(torch.zeros(9, 72) for _ in range(2))
    shifted = torch.zeros(9 * 72 + 1)[1:].view(9, 72)
    for rows, added in ((9, delta), (4, None), (9, shifted), (9, delta)):
        layer_kernels.add_norm(x[:rows], added, norm)
    layer_kernels.add_norm(x.double(), delta.double(), norm_of(72, torch.float64))
    assert [grid[0] for grid, _ in compiled] == [9, 9, 9]
    assert [(grid[0], args[6]) for grid, args in by_handle] == [(4, 0), (9, 1)]


def test_kernels_are_for_cards_and_their_dtypes(monkeypatch):
    cuda = torch.device("cuda")
    assert fused_kernels(cuda, torch.bfloat16) is layer_kernels
    assert fused_kernels(cuda, torch.float64) is None
    assert fused_kernels(torch.device("cpu"), torch.float32) is None, "nor to be interpreted"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert fused_kernels(cuda, torch.bfloat16) is None


def test_reference_attention_is_for_those_who_want_no_kernels(monkeypatch):
    monkeypatch.setattr(dense, "fused_kernels", lambda *_: layer_kernels)
    monkeypatch.setattr(linear, "why_no_kernels", lambda *_: None)
    model, made = f"random:{FAMILIES['llama']}", []
    for attention in ("auto", "reference"):
        settings = ModelSettings(model=model, attention=attention)
        made.append(load_model(model, settings).decoder._fused)
    assert made == [layer_kernels, None]
    packs = [
        make_packer(Storage.PLAIN, torch.float16, "cuda", kernels=each) for each in (True, False)
    ]
    assert isinstance(packs[0], KernelChooser)
    assert packs[1] is prepack_linear
