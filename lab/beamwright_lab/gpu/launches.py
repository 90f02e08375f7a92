"""Record which kernels a decode step or prefill pass would launch on a card, without a card.

The engine's own model, rows and sampler run on torch's `meta` device, whose tensors have shapes but
no values; kernels are recorded instead of run. A read by the host fails, as it would during graph
capture, and so does an operation that mixes devices. Which products stream is measured at start-up
on a real card; here it is what an H100 chose (`choose_linear`).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from beamwright.attention import make_attention
from beamwright.engine.tensor_rows import TensorRowRunner
from beamwright.kv.segments import PathPart
from beamwright.models import dense
from beamwright.models.decoder import Linear
from beamwright.models.dense import DenseDecoder
from beamwright.models.grouped import GroupedLinear
from beamwright.models.prefill import PrefillRequest
from beamwright.models.prefill_passes import Launches, Replay
from beamwright.models.shape import ModelShape
from beamwright.models.tree_model import TreeModel
from beamwright.models.weights import random_weights
from beamwright.plan.costs import Storage
from beamwright.sections import SamplingSettings

DEVICE = torch.device("meta")
HOPPER = (9, 0)
_KV_BYTES = 1 << 36  # meta tensors take no memory
_NO_LAUNCH = ("empty", "new_empty", "detach_")  # prefixes of operations that launch nothing


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass
class LaunchRecord:
    """Record of what ran, in order.

    launches: of Triton kernels. names: of those and of torch operations, without views. copied:
    number of operations that read host tensors.
    """

    launches: list[Launch] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    copied: int = 0

    def take(self) -> LaunchRecord:
        """Return the record so far, and clear it."""
        found = LaunchRecord(self.launches, self.names, self.copied)
        self.launches, self.names, self.copied = [], [], 0
        return found


# Operations that may read host tensors; a captured step must not use them so.
_READS_HOST = ("copy_", "index", "index_put_", "index_select")


class _Operations(TorchDispatchMode):
    def __init__(self, record: LaunchRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, given = func.overloadpacket.__name__, _tensors((args, kwargs))
        found = func(*args, **(kwargs or {}))
        there = _tensors(found)
        sides = {each.device == DEVICE for each in given if each.ndim}
        if len(sides) > 1 and name not in _READS_HOST:
            raise RuntimeError(f"{name}: tensors on the card and on the host")
        known = {each.untyped_storage()._cdata for each in given}
        is_view = all(each.untyped_storage()._cdata in known for each in there)
        if name.startswith(_NO_LAUNCH) or (is_view and not name.endswith("_")):
            return found
        if any(each.device == DEVICE for each in there):
            self._record.names.append(name)
            self._record.copied += any(each.device != DEVICE for each in given)
        return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextmanager
def on_card(capability: tuple[int, int] = HOPPER) -> Iterator[LaunchRecord]:
    """Make the code treat `meta` as a card of this capability; yield the record of what runs."""
    record = LaunchRecord()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        record.launches.append(Launch(kernel, tuple(grid), args, options))
        record.names.append(record.launches[-1].name)
        handle = mock.MagicMock()
        handle.__getitem__ = lambda _, later: (
            lambda *more: run(kernel, *more, grid=later, warmup=False, **options)
        )
        return handle

    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for name, value in {
            "why_no_kernels": lambda *_: None,
            "is_interpreted": lambda: False,
            "samples_in_kernel": lambda *_: True,
            "_capability": lambda _: capability,
        }.items():
            for module in _modules_with(name):
                put(module, name, value)
        from beamwright.models import layer_kernels  # loads Triton

        put(dense, "fused_kernels", lambda *_: layer_kernels)
        put(layer_kernels, "_handles", dict)
        for kind in {type(layer_kernels.gate_rows), *type(layer_kernels.gate_rows).__mro__}:
            if "run" in vars(kind) and kind.__name__.endswith("Function"):
                put(kind, "run", run)
        stack.enter_context(_Operations(record))
        stack.enter_context(torch.inference_mode())
        yield record


def _modules_with(name: str) -> list[Any]:
    return [
        module
        for key, module in [*sys.modules.items()]
        if key.startswith("beamwright.") and name in vars(module)
    ]


# --- a model's passes --------------------------------------------------------------------------


def choose_linear(linear: Linear) -> Linear:
    """Replace a linear layer as an H100 did for Qwen2.5's shapes.

    Wide layers stream few rows, layers with long sums and few outputs stream all rows; quantised
    weights are read as stored (docs/log/2026-11.md#streamed-products).
    """
    from beamwright.models import codes, streaming  # loads Triton

    if isinstance(linear, GroupedLinear):
        laid_out = codes.Codes.of(linear)
        assert laid_out is not None
        return streaming.CodedLinear(laid_out, linear.bias, None)
    outputs, columns = linear.weight.shape
    if outputs >= _WIDE_OUTPUTS:
        return streaming.FewRowsLinear(linear.weight, linear.bias)
    if outputs <= columns and columns >= _LONG_COLUMNS:
        return streaming.KernelLinear(linear.weight, linear.bias)
    return linear


_WIDE_OUTPUTS, _LONG_COLUMNS = 2 * 132 * 64, 3584


def _tree_model(shape: ModelShape, storage: Storage = Storage.PLAIN) -> TreeModel:
    """Build a model without values, inside `on_card`."""
    with mock.patch.multiple(torch, Generator=mock.MagicMock(), randn=_nothing_drawn):
        weights = random_weights(shape, torch.bfloat16, "meta", 0, storage, choose_linear)
    backend = make_attention("triton-tree", DEVICE, torch.bfloat16)
    return TreeModel(DenseDecoder(shape, weights), backend, _KV_BYTES)


def _nothing_drawn(size: Sequence[int], **options: Any) -> torch.Tensor:
    return torch.empty(size, device=options["device"])


def _prefilled(model: TreeModel, lengths: Sequence[int]) -> list[PathPart]:
    segments = [model.store.create() for _ in lengths]
    parts = zip(segments, lengths, strict=True)
    model.prefill([PrefillRequest((), s, range(n), 0, read=[n - 1]) for s, n in parts])
    return [PathPart(segment, segment.length) for segment in segments]


def prefill_launches(
    shape: ModelShape, lengths: Sequence[int], capability: tuple[int, int] = HOPPER
) -> LaunchRecord:
    """Record one prefill pass over prompts of these lengths, with storing their KV."""
    with on_card(capability) as record:
        model = _tree_model(shape)
        record.take()
        _prefilled(model, lengths)
    return record


class _RecordingReplay(Replay):
    """Replay that records a captured pass's launches apart from those that prepare it."""

    def __init__(self, record: LaunchRecord) -> None:
        self._record, self.step = record, LaunchRecord()

    def run(self, key: Hashable, version: int, launches: Launches) -> None:
        before = self._record.take()
        launches()
        self.step = self._record.take()
        self._record.__dict__.update(vars(before))


def captured_prefill(
    shape: ModelShape, lengths: Sequence[int], capability: tuple[int, int] = HOPPER
) -> tuple[LaunchRecord, LaunchRecord]:
    """Return the launches that prepare a captured prefill pass, and those of its replay."""
    with on_card(capability) as record:
        model = _tree_model(shape)
        apart = _RecordingReplay(record)
        model.capture(apart)
        _prefilled(model, [16])
        record.take()
        _prefilled(model, lengths)
    return record, apart.step


def step_launches(
    shape: ModelShape,
    num_rows: int,
    sampling: SamplingSettings | None = None,
    capability: tuple[int, int] = HOPPER,
    storage: Storage = Storage.PLAIN,
) -> LaunchRecord:
    """Record what is captured of a decode pass whose rows share a prompt."""
    sampling = sampling or SamplingSettings()
    with on_card(capability) as record:
        model = _tree_model(shape, storage)
        path = tuple(_prefilled(model, [16]))
        rows = TensorRowRunner(model, None, replay=Replay())
        session = rows._session
        session.arrange_rows([], [path] * num_rows, [model.store.create() for _ in range(num_rows)])
        buffers = rows._pass_buffers()
        buffers.sampling.load([sampling] * session.num_rows, [False] * session.num_rows)
        buffers.wants_top = sampling.top_logprobs > 0
        session.prepare(1)
        record.take()
        rows._compute_pass(buffers)
    return record
