"""Loads the weights of Beamwright's own decoder from a checkpoint, or makes random weights.

`shape.TensorNames` has the tensors' names, and says which of them are fused. A checkpoint is read
tensor by tensor, and each projection is converted to its final format before the next one is read.
So at most one projection is in memory twice.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from beamwright.errors import NotFiniteError
from beamwright.models.decoder import Linear
from beamwright.models.dense import DecoderWeights, Layer, Norm
from beamwright.models.formats import StoredWeights, open_checkpoint
from beamwright.models.formats.key_tables import check_tensor_sizes
from beamwright.models.formats.plain_files import RowReader
from beamwright.models.grouped import check_size, join_projections
from beamwright.models.linear import head_linear, quantise_linear
from beamwright.models.native import can_multiply
from beamwright.models.offload import WeightOffload
from beamwright.models.shape import FAMILIES, ModelShape, TensorNames
from beamwright.models.weight_homes import HostTable
from beamwright.plan.costs import LARGE_TABLE_BYTES, Storage

Convert = Callable[[Linear], Linear]

_CHECKED_VALUES = 1 << 22  # values checked at once; a sum in float32 copies them


def keep_unchanged(linear: Linear) -> Linear:
    """Return the projection unchanged."""
    return linear


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading weights: precision, device and format in memory.

    dtype, device: precision and device of plain weights.
    storage: the format of the layers' projections.
    pack: converts each projection and the LM head to its final format (`linear.make_packer`).
    head: False to leave out the LM head.
    tile_rows: rows per tile, see `Decoder`; None for no tiles.
    has_others: True if the file may contain more tensors outside of layers, such as a score head.
    offload: takes the weights of layers that do not stay on the device; None: all layers stay.
    """

    dtype: torch.dtype
    device: str
    storage: Storage = Storage.PLAIN
    pack: Convert = keep_unchanged
    head: bool = True
    tile_rows: int | None = None
    has_others: bool = False
    offload: WeightOffload | None = None


class _Reader:
    """Reader of one checkpoint's tensors, which casts them and moves them to the device.

    Quantised projections may stay in the file's format.
    """

    def __init__(
        self, stored: StoredWeights | None, prefix: str, placing: LoadOptions, where: str
    ) -> None:
        self._stored, self._prefix, self.placing = stored, prefix, placing
        self._dtype, self._device = placing.dtype, placing.device
        self._where = f"model {where}: weight {prefix}"

    def read_tensor(self, name: str, *size: int) -> Tensor:
        assert self._stored is not None
        tensor = self._stored.tensor(self._prefix + name)
        assert tensor is not None  # see `check_weights`
        check_size(tuple(tensor.shape), size, f"{self._where}{name}")
        placed = tensor.to(device=self._device, dtype=self._dtype)
        check_finite(placed, tensor, f"{self._where}{name}")
        return placed

    def stored_rows(self, name: str) -> RowReader | None:
        """Return a table whose rows are read from the file on demand; None if unsupported."""
        if self._stored is None or self._device != "cpu":
            return None
        return self._stored.row_reader(self._prefix + name, self._dtype)

    def read_fused(self, names: list[str], outs: list[int], columns: int, bias: bool) -> Linear:
        """Fuse the named projections into one by stacking their rows."""
        biases = self._stacked([f"{name}.bias" for name in names], outs) if bias else None
        kept = [
            self.stored_projection(name, rows, columns)
            for name, rows in zip(names, outs, strict=True)
        ]
        if any(kept):
            parts = [
                linear or Linear(self.read_tensor(f"{name}.weight", rows, columns))
                for linear, name, rows in zip(kept, names, outs, strict=True)
            ]
            return join_projections(parts, biases)
        return Linear(self._stacked([f"{name}.weight" for name in names], outs, columns), biases)

    def stored_projection(self, name: str, *size: int) -> Linear | None:
        """Read a projection in the file's quantised format; None to use a plain weight."""
        if self._stored is None or not self.placing.storage.is_stored:
            return None
        if (linear := self._stored.quantised_linear(self._prefix + name)) is None:
            return None
        return linear.check_and_place(size, self._device, f"{self._where}{name}")

    def _stacked(self, names: list[str], outs: list[int], *columns: int) -> Tensor:
        whole = torch.empty((sum(outs), *columns), dtype=self._dtype, device=self._device)
        for name, rows in zip(names, whole.split(outs), strict=True):
            rows.copy_(self.read_tensor(name, len(rows), *columns))
        return whole

    def read_norm(self, name: str, shape: ModelShape, size: int) -> Norm:
        bias = self.read_tensor(f"{name}.bias", size) if shape.norm == "layer" else None
        weight = self.read_tensor(f"{name}.weight", size)
        return Norm(shape.norm, shape.norm_eps, weight, bias, shape.unit_offset)


def check_finite(placed: Tensor, stored: Tensor, what: str) -> None:
    """Check that a weight has no NaN and no infinite values.

    stored: the weight in the file. placed: the weight, cast to its final dtype. what: its name.

    Raises:
        NotFiniteError: if it has such values, in the file or because the dtype is too narrow.
    """
    if _all_finite(placed):
        return
    if _all_finite(stored):
        narrow = str(placed.dtype).removeprefix("torch.")
        raise NotFiniteError(f"{what} does not fit into {narrow}: use --dtype bfloat16 or float32")
    raise NotFiniteError(f"{what} holds NaN or infinite values: the file is damaged")


def _all_finite(values: Tensor) -> bool:
    # A sum is fast, but can overflow. So if a sum is not finite, each of its values is checked.
    return all(
        bool(part.sum(dtype=torch.float32).isfinite()) or bool(part.isfinite().all())
        for part in values.flatten().split(_CHECKED_VALUES)
    )


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read the named tensors in their stored dtype; names that the folder lacks are left out.

    Raises:
        InputError: if a file is missing or unreadable.
    """
    checkpoint = open_checkpoint(folder)
    return {name: tensor for name in names if (tensor := checkpoint.tensor(name)) is not None}


def load_weights(
    folder: Path, shape: ModelShape, placing: LoadOptions
) -> tuple[ModelShape, DecoderWeights]:
    """Load a checkpoint's weights; return the shape (see `with_own_head`) and the weights.

    Raises:
        InputError: for missing, unreadable or wrongly shaped weights, naming the tensor.
    """
    checkpoint = open_checkpoint(folder)
    shape = with_own_head(shape, checkpoint)
    check_weights(checkpoint, shape, str(folder), has_others=placing.has_others)
    prefix = _prefix(checkpoint, shape)
    reader, head = (_Reader(checkpoint, at, placing, str(folder)) for at in (prefix, ""))
    return shape, _assemble(shape, reader, head)


def check_weights(
    stored: StoredWeights, shape: ModelShape, where: str, *, has_others: bool = False
) -> None:
    """Compare a checkpoint's tensor names and sizes with the decoder's, without reading values.

    Raises:
        InputError: if a tensor is left over, missing or of another size.
    """
    needed = dict[str, tuple[int, ...]]()

    class _Needed(_Reader):
        def read_tensor(self, name: str, *size: int) -> Tensor:
            needed[self._prefix + name] = size
            return torch.empty(size, device="meta")

    unread = LoadOptions(torch.float32, "meta")
    body, head = (_Needed(None, at, unread, where) for at in (_prefix(stored, shape), ""))
    _assemble(shape, body, head)
    spare = ["lm_head.weight"] * (shape.tied or not shape.has_lm_head)
    spare += [name for name in stored.sizes if has_others and "layers." not in name]
    check_tensor_sizes(needed, stored.sizes, f"model {where}", shape.architecture, spare)


def _prefix(stored: StoredWeights, shape: ModelShape) -> str:
    """Return the prefix of tensor names; it lacks "model." if a model was saved without a head."""
    stem = FAMILIES[shape.architecture].tensors.prefix
    alone = stem.partition(".")[2]
    return alone if f"{alone}embed_tokens.weight" in stored.sizes else stem


def with_own_head(shape: ModelShape, stored: StoredWeights) -> ModelShape:
    """Return the shape, with `tied` set to False if the file's LM head is not the embedding.

    `transformers` does the same, whatever `tie_word_embeddings` says.
    """
    name, embedding = "lm_head.weight", f"{_prefix(stored, shape)}embed_tokens.weight"
    if not (shape.tied and shape.has_lm_head and {name, embedding} <= stored.sizes.keys()):
        return shape
    head, table = stored.tensor(name), stored.tensor(embedding)
    same = head is not None and table is not None and torch.equal(head, table)
    return replace(shape, tied=same)


def random_weights(
    shape: ModelShape,
    dtype: torch.dtype,
    device: str,
    seed: int,
    storage: Storage = Storage.PLAIN,
    pack: Convert = keep_unchanged,
    offload: WeightOffload | None = None,
) -> DecoderWeights:
    """Draw weights from N(0, 0.02), for benchmarks in which only sizes matter.

    Weights are drawn on the device, because a CPU takes a minute for 7B. Their values depend on the
    kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)

    class _Random(_Reader):
        def read_tensor(self, name: str, *size: int) -> Tensor:
            if name.endswith("norm.weight"):
                return torch.ones(size, dtype=dtype, device=device)
            drawn = torch.randn(size, generator=generator, device=device).mul_(0.02)
            return drawn.to(dtype)

    placing = LoadOptions(dtype, device, storage, pack, offload=offload)
    reader = _Random(None, "", placing, "random")
    return _assemble(shape, reader, reader)


def _assemble(shape: ModelShape, reader: _Reader, head: _Reader) -> DecoderWeights:
    called, hidden = FAMILIES[shape.architecture].tensors, shape.hidden
    embedding, lm_head = _load_embedding_and_head(shape, reader, head)

    def layer(number: int) -> Layer:
        trim_heap()
        loaded = _layer(shape, called, reader, f"layers.{number}.")
        if (offload := reader.placing.offload) is not None:
            offload.add(number, loaded.projections)
        return loaded

    weights = DecoderWeights(
        embedding=embedding,
        layers=[layer(number) for number in range(shape.layers)],
        lm_head=lm_head,
        final_norm=reader.read_norm(called.final_norm, shape, hidden),
    )
    if shape.learned_positions is not None:
        rows = shape.full_context + shape.learned_positions
        weights.positions = reader.read_tensor("embed_positions.weight", rows, hidden)
    return weights


def _load_embedding_and_head(
    shape: ModelShape, reader: _Reader, head: _Reader
) -> tuple[Tensor | RowReader | HostTable, Linear]:
    """Load the embedding and the LM head. The head has no outputs if the shape has no LM head."""
    name, size = "embed_tokens.weight", (shape.vocab, shape.hidden)
    if shape.has_lm_head and reader.placing.storage is Storage.BLOCKS:
        of_head = (reader, "embed_tokens") if shape.tied else (head, "lm_head")
        kept, rows = of_head[0].stored_projection(of_head[1], *size), reader.stored_rows(name)
        if kept is not None and can_multiply(kept) and rows is not None:
            return rows, reader.placing.pack(kept)
    table = reader.read_tensor(name, *size)
    if not shape.has_lm_head:
        lm_head = Linear(table.new_empty(0, shape.hidden))
    else:
        whole = Linear(table if shape.tied else head.read_tensor("lm_head.weight", *size))
        lm_head = reader.placing.pack(head_linear(whole, reader.placing.storage))
    if lm_head.weight is table or table.nbytes < LARGE_TABLE_BYTES:
        return table, lm_head
    stored, offload = reader.stored_rows(name), reader.placing.offload
    if offload is None:
        return stored or table, lm_head
    offload.table_bytes = table.nbytes
    return stored or HostTable(table), lm_head


def _layer(shape: ModelShape, called: TensorNames, reader: _Reader, at: str) -> Layer:
    placing, h, d, inner = reader.placing, shape.hidden, shape.head_dim, shape.intermediate
    q, kv = shape.heads * d, shape.kv_heads * d

    def projection(names: Sequence[str], outs: list[int], columns: int, bias: bool) -> Linear:
        linear = reader.read_fused([at + name for name in names], outs, columns, bias)
        return placing.pack(quantise_linear(linear, placing.storage))

    layer = Layer(
        attention_norm=reader.read_norm(at + called.attention_norm, shape, h),
        qkv=projection(called.qkv, [q, kv, kv], h, shape.qkv_bias),
        out=projection([called.out], [h], q, shape.out_bias),
        mlp_norm=reader.read_norm(at + called.mlp_norm, shape, h),
        gate_up=projection(called.gate_up, [inner] * len(called.gate_up), h, shape.mlp_bias),
        down=projection([called.down], [h], inner, shape.mlp_bias),
    )
    if shape.qk_norm:
        layer.query_norm = reader.read_norm(f"{at}self_attn.q_norm", shape, d)
        layer.key_norm = reader.read_norm(f"{at}self_attn.k_norm", shape, d)
    if shape.after_norms:
        layer.after_attention = reader.read_norm(at + called.after_attention, shape, h)
        layer.after_mlp = reader.read_norm(at + called.after_mlp, shape, h)
    return layer


def trim_heap() -> None:
    """Return freed host memory to the system; glibc keeps freed blocks that lie between used ones.

    Loaders call this function between layers.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
