"""Weights: from a Hugging Face folder, or random, to DecoderWeights, by one table per layout.

Fused weights are rows of the table; a checkpoint is read tensor by tensor and never held twice.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from beamwright.cost import Storage
from beamwright.errors import InputError, NotFiniteError
from beamwright.files import read_regular
from beamwright.models.decoder import DecoderWeights, Layer, Linear, Norm
from beamwright.models.quantised import quantiser
from beamwright.models.shape import ModelShape

TensorSource = Callable[[str], torch.Tensor | None]


class _WeightFiles:
    """Tensors by name from safetensors or `pytorch_model*.bin` files, single or sharded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[Path, object] = {}
        self._where = dict(self._index())
        if not self._where:
            raise InputError(f"model {folder}: no *.safetensors or pytorch_model*.bin weights")

    def _index(self) -> Iterator[tuple[str, Path]]:
        safe = sorted(
            path for path in self.folder.glob("*.safetensors") if path.name.startswith("model")
        )
        bins = sorted(self.folder.glob("pytorch_model*.bin"))
        indexes = [*self.folder.glob("*.safetensors.index.json")]
        if not safe and not indexes:
            indexes = [*self.folder.glob("pytorch_model*.bin.index.json")]
        for index in indexes:
            for file in set(_weight_map(index).values()):
                if not (self.folder / file).exists():
                    raise InputError(f"model {self.folder}: shard {file} is missing")
        for path in safe or bins:
            yield from ((name, path) for name in self._open(path))

    def _open(self, path: Path) -> list[str]:
        try:
            if path.suffix == ".safetensors":
                handle = safe_open(path, framework="pt")
                self._handles[path] = handle
                return list(handle.keys())
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(tensors, dict):
                raise ValueError(f"a {type(tensors).__name__}, not tensors by name")
            self._handles[path] = tensors
            return [name for name in tensors if isinstance(tensors[name], torch.Tensor)]
        except (
            SafetensorError,
            pickle.UnpicklingError,
            OSError,
            RuntimeError,
            EOFError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:
            line = " ".join(str(error).split())[:200]
            raise InputError(f"model file {path}: cannot be read ({line})") from error

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor of that name, or None."""
        path = self._where.get(name)
        if path is None:
            return None
        handle = self._handles[path]
        tensor: torch.Tensor
        tensor = handle[name] if isinstance(handle, dict) else handle.get_tensor(name)  # type: ignore[attr-defined]
        return tensor

    def outline(self, name: str) -> torch.Tensor | None:
        """A tensor of the same shape that holds nothing, or None."""
        path = self._where.get(name)
        if path is None:
            return None
        handle = self._handles[path]
        if isinstance(handle, dict):
            return torch.empty(handle[name].shape, device="meta")
        return torch.empty(handle.get_slice(name).get_shape(), device="meta")  # type: ignore[attr-defined]

    def names(self) -> list[str]:
        return list(self._where)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(read_regular(index))["weight_map"]
        if not all(isinstance(file, str) for file in found.values()):
            raise TypeError("weight_map names something that is no file")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"model index {index}: cannot be read ({line})") from error


class _Reader:
    """Named tensors of one checkpoint, cast and placed; says what is missing."""

    def __init__(
        self, source: TensorSource, prefix: str, dtype: torch.dtype, device: str, where: str
    ) -> None:
        self._source, self._prefix = source, prefix
        self._dtype, self._device, self._where = dtype, device, where

    def maybe(self, name: str, rows_by_columns: tuple[int, ...]) -> torch.Tensor | None:
        tensor = self._source(self._prefix + name)
        if tensor is None:
            return None
        if tuple(tensor.shape) != rows_by_columns:
            raise InputError(
                f"model {self._where}: {name} has shape {tuple(tensor.shape)}, "
                f"config says {rows_by_columns}"
            )
        placed = tensor.to(device=self._device, dtype=self._dtype)
        check_finite(placed, tensor, f"model {self._where}: weight {self._prefix}{name}")
        return placed

    def need(self, name: str, *size: int) -> torch.Tensor:
        tensor = self.maybe(name, size)
        if tensor is None:
            raise InputError(f"model {self._where}: weight {self._prefix + name} is missing")
        return tensor

    def linear(self, names: list[str], outs: list[int], columns: int, bias: bool) -> Linear:
        """One (fused) projection from the named ones, stacked row-wise."""
        pairs = list(zip(names, outs, strict=True))
        weight = torch.cat([self.need(f"{name}.weight", out, columns) for name, out in pairs])
        if not bias:
            return Linear(weight)
        return Linear(weight, torch.cat([self.need(f"{name}.bias", out) for name, out in pairs]))

    def norm(self, name: str, shape: ModelShape, size: int) -> Norm:
        if not shape.norm_affine:
            return Norm(shape.norm, size, shape.norm_eps)
        bias = self.need(f"{name}.bias", size) if shape.norm == "layer" else None
        return Norm(shape.norm, size, shape.norm_eps, self.need(f"{name}.weight", size), bias)


def check_finite(placed: torch.Tensor, stored: torch.Tensor, what: str) -> None:
    """Refuse NaN and infinite weights. placed: `stored` in the precision that it is used in.

    Raises:
        NotFiniteError: that names `what`, and says if it is the precision's fault.
    """
    if placed.is_meta:  # it holds no values
        return
    # A sum takes one pass and no memory; it can overflow by itself, so a bad one is looked into.
    if placed.sum(dtype=torch.float32).isfinite() or placed.isfinite().all():
        return
    if stored.isfinite().all():
        narrow = str(placed.dtype).removeprefix("torch.")
        raise NotFiniteError(f"{what} does not fit into {narrow}: use --dtype bfloat16 or float32")
    raise NotFiniteError(f"{what} holds NaN or infinite values: the file is damaged")


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of all tensors in a checkpoint folder; reads no weights.

    Raises:
        InputError: for missing or unreadable files.
    """
    return frozenset(_WeightFiles(folder).names())


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Those of the named tensors that a checkpoint folder has, as they are stored.

    Raises:
        InputError: for missing or unreadable files.
    """
    checkpoint = _WeightFiles(folder)
    found = {name: checkpoint.get(name) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def load_weights(
    folder: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    device: str,
    *,
    need_lm_head: bool = True,
    storage: Storage = Storage.PLAIN,
) -> DecoderWeights:
    """Read a checkpoint folder.

    device: "meta" reads no values: names and shapes alone, all of which must be there.
    storage: how projections are kept; each layer is converted before the next is read.
    need_lm_head: False for a model whose logits nobody reads (a reward model with its own head);
    the embedding stands in for an LM head that is not there.

    Raises:
        InputError: for missing, unreadable or wrongly shaped weights, naming the tensor.
    """
    checkpoint = _WeightFiles(folder)
    names = checkpoint.names()
    source = checkpoint.outline if device == "meta" else checkpoint.get
    stem = "model.decoder." if shape.architecture == "opt" else "model."
    prefix = stem if any(name.startswith(stem) for name in names) else stem.partition(".")[2]
    reader = _Reader(source, prefix, dtype, device, str(folder))
    head = _Reader(source, "", dtype, device, str(folder))
    needed = need_lm_head or "lm_head.weight" in names
    return _assemble(shape, reader, head, need_lm_head=needed, storage=storage)


def random_weights(
    shape: ModelShape,
    dtype: torch.dtype,
    device: str,
    seed: int,
    storage: Storage = Storage.PLAIN,
) -> DecoderWeights:
    """Weights of a shape drawn from N(0, 0.02): for benchmarks, where only sizes matter.

    Drawn on the device, because a CPU takes a minute for 7B; each kind of device draws others.
    """
    generator = torch.Generator(device).manual_seed(seed)

    class _Random(_Reader):
        def maybe(self, name: str, rows_by_columns: tuple[int, ...]) -> torch.Tensor | None:
            if name.endswith("norm.weight"):
                return torch.ones(rows_by_columns, dtype=dtype, device=device)
            drawn = torch.randn(rows_by_columns, generator=generator, device=device) * 0.02
            return drawn.to(dtype)

    reader = _Random(lambda name: None, "", dtype, device, "random")
    return _assemble(shape, reader, reader, storage=storage)


def _assemble(
    shape: ModelShape,
    reader: _Reader,
    head: _Reader,
    *,
    need_lm_head: bool = True,
    storage: Storage = Storage.PLAIN,
) -> DecoderWeights:
    opt = shape.architecture == "opt"
    embed = shape.embed_dim or shape.hidden
    embedding = reader.need("embed_tokens.weight", shape.vocab, embed)
    lm_head = Linear(embedding)
    if need_lm_head and not shape.tied:
        lm_head = Linear(head.need("lm_head.weight", shape.vocab, embed))
    make_layer, keep = _opt_layer if opt else _llama_layer, quantiser(storage)
    final = "final_layer_norm" if opt else "norm"
    weights = DecoderWeights(
        embedding=embedding,
        layers=[keep(make_layer(shape, reader, f"layers.{i}.")) for i in range(shape.layers)],
        lm_head=lm_head,
        final_norm=reader.norm(final, shape, shape.hidden) if shape.final_norm else None,
    )
    if shape.learned_positions is not None:
        weights.positions = _position_table(shape, reader)
    if embed != shape.hidden:
        weights.project_in = reader.linear(["project_in"], [shape.hidden], embed, bias=False)
        weights.project_out = reader.linear(["project_out"], [embed], shape.hidden, bias=False)
    return weights


def _position_table(shape: ModelShape, reader: _Reader) -> torch.Tensor:
    offset = shape.learned_positions or 0
    return reader.need("embed_positions.weight", shape.full_context + offset, shape.hidden)


def _llama_layer(shape: ModelShape, reader: _Reader, at: str) -> Layer:
    h, d = shape.hidden, shape.head_dim
    q, kv, inner = shape.heads * d, shape.kv_heads * d, shape.intermediate
    attention = [f"{at}self_attn.{name}_proj" for name in "qkv"]
    mlp = [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"]
    layer = Layer(
        attention_norm=reader.norm(f"{at}input_layernorm", shape, h),
        qkv=reader.linear(attention, [q, kv, kv], h, shape.qkv_bias),
        out=reader.linear([f"{at}self_attn.o_proj"], [h], q, shape.out_bias),
        mlp_norm=reader.norm(f"{at}post_attention_layernorm", shape, h),
        gate_up=reader.linear(mlp, [inner, inner], h, shape.mlp_bias),
        down=reader.linear([f"{at}mlp.down_proj"], [h], inner, shape.mlp_bias),
    )
    if shape.qk_norm:
        layer.query_norm = reader.norm(f"{at}self_attn.q_norm", shape, d)
        layer.key_norm = reader.norm(f"{at}self_attn.k_norm", shape, d)
    return layer


def _opt_layer(shape: ModelShape, reader: _Reader, at: str) -> Layer:
    h, inner = shape.hidden, shape.intermediate
    attention = [f"{at}self_attn.{name}_proj" for name in "qkv"]
    return Layer(
        attention_norm=reader.norm(f"{at}self_attn_layer_norm", shape, h),
        qkv=reader.linear(attention, [h, h, h], h, shape.qkv_bias),
        out=reader.linear([f"{at}self_attn.out_proj"], [h], h, shape.out_bias),
        mlp_norm=reader.norm(f"{at}final_layer_norm", shape, h),
        gate_up=reader.linear([f"{at}fc1"], [inner], h, shape.mlp_bias),
        down=reader.linear([f"{at}fc2"], [h], inner, shape.mlp_bias),
    )
