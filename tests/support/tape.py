"""A CUDA graph's stand-in on a CPU, and an attention backend in plain torch that it can capture.

A tape holds the operations of one call with the tensors and numbers of that call, and plays them
again without the Python around them: what the host has counted meanwhile is not seen, and a tensor
that has moved is not found. Reading a tensor on the host while a tape is recorded is an error.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from beamwright.attention.protocols import AttentionBackend, DecodeView
from beamwright.models.prefill_passes import Replay
from beamwright.models.session import DecodeSession

_READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select"}
_READS |= {"_unique2"}


class HostReadError(AssertionError):
    """A captured step must not ask the device for a value, nor bring it one."""


class Tape(TorchDispatchMode):
    """Records what runs under it; what is written in place, or is a view, needs no copy."""

    def __init__(self):
        super().__init__()
        self.played = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READS:
            raise HostReadError(func)
        out = func(*args, **kwargs)
        known = {storage(t) for t in tensors((args, kwargs))}
        places = [storage(t) for t in tensors(out)]
        fresh = {i: t for i, t in enumerate(tensors(out)) if places[i] not in known}
        self.played.append((partial(func, *args, **kwargs), fresh))
        return out

    def launch(self, kernel, grid, args, kwargs):
        """A Triton kernel: the interpreter's own operations are none of the step's."""
        with _disable_current_modes():
            kernel[grid](*args, **kwargs)
        self.played.append((partial(kernel[grid], *args, **kwargs), {}))

    def play(self):
        for call, fresh in self.played:
            found = tensors(call())
            for place, first in fresh.items():
                first.copy_(found[place])


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage(tensor):
    """Where it is; None if torch does not say (prepacked weights)."""
    return None if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


class TapeReplay(Replay):
    """`CudaGraphReplay` with tapes; the first run of a key is recorded while it happens."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.tapes, self.version = monkeypatch, {}, None
        self.num_played = self.num_recorded = 0
        self.keys = set()

    def run(self, key, version, launches):
        self.keys.add(key)
        if version != self.version:
            self.release()
            self.version = version
        if key in self.tapes:
            self.tapes[key].play()
            self.num_played += 1
            return
        tape = Tape()
        with capturing(self.monkeypatch, tape), tape:
            launches()
        self.tapes[key] = tape
        self.num_recorded += 1

    def release(self):
        self.tapes.clear()


def put_on_tape(monkeypatch, solver, backend):
    """Gives a solver with `graphs="on"` this backend, and tapes; returns the `TapeReplay`."""
    rows, replay = solver._machinery.batch._rows, TapeReplay(monkeypatch)
    solver.generator.backend = backend
    model = solver.generator
    session = DecodeSession(model.decoder, model.store, model.backend, stays=True)
    rows._session, rows.replay = session, replay
    return replay


class Late(Replay):
    """Steps of a card, of which the host learns when it asks for it."""

    is_plain = False

    def fetch(self, values):
        return values.numpy().copy


def put_late(solver):
    """Gives a solver such steps, without passes that look at each token."""
    rows = solver._machinery.batch._rows
    rows.replay = Late()


@contextmanager
def capturing(monkeypatch, tape):
    """Host reads that no dispatcher sees are errors; Triton's launches go to the tape."""

    def forbidden(*args, **kwargs):
        raise HostReadError("between host and device")

    class Launched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *args, **kwargs: tape.launch(self.kernel, grid, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", forbidden)
        patch.setattr(torch.Tensor, "numpy", forbidden)
        patch.setattr(torch, "tensor", forbidden)
        patch.setattr(torch, "from_numpy", forbidden)
        try:
            from beamwright.attention.kernels import launch
            from beamwright.engine import draw_kernel, filter_kernel
            from beamwright.models import layer_kernels, step_kernels
        except ImportError:
            kernels = []
        else:
            kernels = [(launch, f"attend_{what}") for what in ("parts", "chunks")]
            kernels += [(launch, "merge_rows")]
            kernels += [(draw_kernel, "draw_pieces"), (draw_kernel, "merge_pieces")]
            kernels += [(filter_kernel, "find_maxima"), (filter_kernel, "find_thresholds")]
            kernels += [(layer_kernels, f"{name}_rows") for name in ("add_norm", "rotate", "gate")]
            kernels += [(step_kernels, f"{name}_rows") for name in ("delta", "scan", "convolve")]
            patch.setattr(layer_kernels, "_handles", dict)
        for module, name in kernels:
            patch.setattr(module, name, Launched(getattr(module, name)))
        yield


# --- a backend that can be captured ----------------------------------------------------------


class Lists:
    """Workspace of `FixedAttention`: [row, token] places in the pool, and how many count."""

    def __init__(self):
        self.flat, self.lengths, self.num_moves = torch.zeros(0, dtype=torch.long), None, 0

    def write(self, rows):
        longest = 1 << max(4, max(map(len, rows)).bit_length())
        if self.lengths is None or self.flat.numel() < len(rows) * longest:
            self.flat = torch.zeros(2 * len(rows) * longest, dtype=torch.long)
            self.lengths = torch.zeros(256, dtype=torch.long)
            self.num_moves += 1
        # As wide for every number of rows: a captured step knows one width.
        width = self.flat.numel() // len(rows)
        places = self.flat[: len(rows) * width].view(len(rows), width).zero_()
        for row, held in enumerate(rows):
            places[row, : len(held)] = torch.tensor(held, dtype=torch.long)
            self.lengths[row] = len(held)
        return places, self.lengths[: len(rows)]

    def release(self):
        self.lengths = None


class FixedDecode(DecodeView):
    def __init__(self, store, paths, tail, lists):
        self.store, self.paths, self.tail, self.lists = store, list(paths), tail, lists
        self.live = [True] * len(paths)
        self.stale = True

    def prepare(self, num_heads):
        if self.stale:
            size = self.store.pool.block_tokens
            rows = [
                [
                    part.segment.copies[0][token // size] * size + token % size
                    for part in path
                    for token in range(part.visible)
                ]
                if live
                else []
                for path, live in zip(self.paths, self.live, strict=True)
            ]
            self.places, self.lengths = self.lists.write(rows)
            self.stale = False

    def attend(self, layer, query, key_value, sinks=None):
        self.tail.write(layer, key_value)
        self.prepare(query.shape[1])
        size = self.store.pool.block_tokens
        pool = self.store.pool.storage[:, layer]
        held = pool[self.places // size, :, self.places % size].permute(2, 0, 3, 1, 4)
        both = torch.cat([held, self.tail.storage[layer]], dim=3)
        seen = torch.arange(self.places.shape[1]) < self.lengths[:, None]
        own = torch.arange(self.tail.storage.shape[4]) < self.tail.counts[:, None]
        seen = torch.cat([seen, own], dim=1)[:, None, None]
        grouped = query.unflatten(1, (key_value.shape[2], -1))
        keys, values = both.masked_fill(~seen[:, 0, :, :, None], 0)
        scores = (grouped[..., None, :] * keys[:, :, None]).sum(-1) * query.shape[2] ** -0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights[..., None] * values[:, :, None]).sum(3).flatten(1, 2)

    def keep_rows(self, rows):
        kept = rows.tolist()
        self.paths, self.live = [self.paths[r] for r in kept], [self.live[r] for r in kept]
        self.stale = True

    def deactivate_rows(self, rows):
        for row in rows:
            self.live[row] = False


class FixedAttention(AttentionBackend):
    """As slow as can be, and a function of fixed tensors only; in float64 equal to the others."""

    name, tail_tokens = "fixed", 64

    def __init__(self, prefill):
        self.prefill_view = prefill.prefill_view

    def workspace(self, store):
        return Lists()

    def decode_view(self, store, paths, tail, workspace=None):
        return FixedDecode(store, paths, tail, workspace or Lists())
