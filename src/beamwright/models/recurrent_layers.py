"""Runs recurrent layers (Mamba, gated delta nets), which keep a fixed-size state instead of KV.

The layers compute states and `view.states` (`kv.states.RowStates`) stores them. `view.states` is
None if all rows start from zeros and their states are not kept. A row's state is the one after its
last token. `transformers` modules read and write states through their cache argument. `StateCache`
takes the place of that cache, so no family needs code here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.kv.states import RowStates
from beamwright.models.shape import NoDecoderError, StatePart

# Names of the cache argument; "cache" is used since transformers 5.24.
_CACHES = ("cache", "cache_params", "past_key_values")
# Maximum number of rows per call of a module. A call's temporary tensors are as large as the states
# of these rows, or twice as large.
_ROWS = 64
_PROBED = 6  # tokens of a trial
# Maximum difference, as a share of the largest value, that counts as equal in a trial. Rounding
# stays far below this share; an ignored state exceeds it.
_SAME = 0.05


class StateCache:
    """The states of some rows, with the interface of a `transformers` cache.

    parts: state tensors [rows, *size] by kind ("conv", "recurrent"), or their locations in the pool
        (`kv.states.StatePlace`) for in-place steps. Empty for rows without tokens. A module updates
        them in place or replaces them.
    """

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts, self.is_used = parts, False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.parts.get(_kind("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.parts.get(_kind("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Append inputs of the convolution, and return older and new ones together.

        conv_states: the new inputs [rows, channels, tokens].
        """
        self.is_used, kind = True, _kind("conv", state_idx)
        before = self.parts.get(kind)
        size = conv_kernel_size or conv_states.shape[-1]
        if before is None:
            every = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            every = torch.cat([before, conv_states], dim=-1)
        self.parts[kind] = every[..., -size:]
        return every

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.is_used = True
        self.parts[_kind("recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return bool(self.parts)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged: attention's KV is not kept here."""
        return key, value


def _kind(name: str, number: int) -> str:
    return f"{name}{number or ''}"


def find_cache_modules(layer: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of a layer that may keep KV or states, by name within the layer.

    These are the innermost modules whose `forward` has a cache argument.
    """
    modules = {name: each for name, each in layer.named_modules() if cache_argument(each)}
    inside = {name: f"{name}." if name else "" for name in modules}
    return {
        name: module
        for name, module in modules.items()
        if not any(other != name and other.startswith(inside[name]) for other in modules)
    }


def cache_argument(module: torch.nn.Module) -> str | None:
    """Return the name of the module's cache argument; None if it has none."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in names), None)


def find_states(
    module: torch.nn.Module, layer: int, call: inspect.BoundArguments
) -> tuple[StatePart, ...]:
    """Run a module once to learn which states it keeps; () if it keeps none.

    call: the arguments of the module in a forward pass on the meta device.

    Raises:
        NoDecoderError: if the module needs other input than hidden states and its own states.
    """
    cache, hidden = StateCache({}), call.args[0]
    output = _call_with_cache(module, call, cache)
    if not cache.is_used:
        return ()
    given = [value for name, value in call.arguments.items() if name != "attention_mask"]
    if sum(isinstance(value, Tensor) for value in given) > 1 or not isinstance(output, Tensor):
        what = type(module).__name__
        raise NoDecoderError(f"{what} computes states from more than the layer's input")
    alone = Recurrent(module, layer, (), hidden.dtype)
    alone.run_original(hidden[:, :1], cache)  # checks that a single token runs as well
    return tuple(
        StatePart(layer, kind, tuple(part.shape[1:]), part.dtype != hidden.dtype)
        for kind, part in cache.parts.items()
    )


def check_stateless(module: torch.nn.Module, call: inspect.BoundArguments) -> None:
    """Check that an attention module keeps no recurrent state.

    Raises:
        NoDecoderError: if the module keeps one.
    """
    cache = StateCache({})
    with suppress(Exception):  # the module may call methods that `StateCache` lacks
        _call_with_cache(module, call, cache)
    if cache.is_used:
        raise NoDecoderError(f"{type(module).__name__} is attention that keeps a state")


def _call_with_cache(
    module: torch.nn.Module, call: inspect.BoundArguments, cache: StateCache
) -> Any:
    call.arguments[cache_argument(module) or ""] = cache
    return module.forward(*call.args, **call.kwargs)


class Recurrent:
    """A recurrent module's replacement for `forward`, with the states of an attention view.

    The input is packed rows [1, tokens, hidden]. In decoding, with one token per row, rows are
    computed together as [rows, 1, hidden]. In a prefill, rows are computed one by one, so that a
    row's result does not depend on other rows.

    in_chunks: False if the module ignores its state when it gets several tokens. Tokens after a
        state are then computed one at a time.
    step: computes one token of each row [rows, 1, hidden].
    in_place: as `step`, but for states that stay in the pool's blocks (`models.steps`), or None.
    parts: (size, dtype) of a row's state by kind.
    """

    def __init__(
        self, module: torch.nn.Module, layer: int, parts: Sequence[StatePart], dtype: torch.dtype
    ) -> None:
        self.module, self.layer, self.in_chunks = module, layer, True
        self._plain: Callable[..., Tensor] = module.forward
        self._takes = next(iter(inspect.signature(module.forward).parameters))
        self._cache = cache_argument(module) or ""
        self.dtype = dtype
        self.parts = {
            part.kind: (part.size, torch.float32 if part.wide else dtype) for part in parts
        }
        self.step: Callable[[Tensor, StateCache], Tensor] = self.run_original
        self.in_place: Callable[[Tensor, StateCache], Tensor] | None = None
        self._states: Callable[[], RowStates | None] = lambda: None

    def install(self, states: Callable[[], RowStates | None]) -> None:
        """Replace the module's `forward` by this object.

        states: returns the states of the current pass's view.
        """
        self._states = states
        self.module.forward = self

    def run_original(self, hidden: Tensor, cache: StateCache) -> Tensor:
        """Run the module's original forward on [rows, tokens, hidden] with the rows' states."""
        return self._plain(hidden, **{self._cache: cache})

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = args[0] if args else kwargs[self._takes]
        states = self._states()
        if states is None:
            return self._decode(hidden, self._zeros(hidden.shape[1], hidden.device))[0]
        lengths = states.lengths
        if lengths is None and self.in_place is not None:
            placed = states.part_places(self.layer)
            if placed is not None:
                return self.in_place(hidden.transpose(0, 1), StateCache(placed)).transpose(0, 1)
        before = states.read(self.layer)
        if lengths is None:
            output, after = self._decode(hidden, before)
        else:
            output, after = self._prefill(hidden, before, lengths)
        kept = {kind: after[kind].to(dtype) for kind, (_, dtype) in self.parts.items()}
        states.write(self.layer, kept)
        return output

    def _decode(self, hidden: Tensor, parts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute one token of each row, at most `_ROWS` rows at a time."""
        rows = hidden[0, :, None].split(_ROWS)
        caches = [StateCache(each) for each in _split(parts, [len(some) for some in rows])]
        outputs = [self.step(some, cache) for some, cache in zip(rows, caches, strict=True)]
        return torch.cat(outputs).transpose(0, 1), _join_states(caches)

    def _prefill(
        self, hidden: Tensor, parts: dict[str, Tensor], lengths: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute `lengths[i]` tokens of row i; the output for padding tokens is zeros."""
        *rows, padding = hidden.split([*lengths, hidden.shape[1] - sum(lengths)], dim=1)
        outputs, caches = [], []
        for tokens, own in zip(rows, _split(parts, [1] * len(rows)), strict=True):
            pieces, cache = (tokens,), StateCache(own)
            if not self.in_chunks:
                if any(bool(part.any()) for part in own.values()):
                    pieces = tokens.split(1, dim=1)
                else:
                    cache = StateCache({})
            outputs += [self.run_original(piece, cache) for piece in pieces]
            caches.append(cache)
        return torch.cat([*outputs, torch.zeros_like(padding)], dim=1), _join_states(caches)

    def _zeros(self, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        return {
            kind: torch.zeros(num_rows, *size, dtype=dtype, device=device)
            for kind, (size, dtype) in self.parts.items()
        }

    def draw_inputs(
        self, rows: int, tokens: int, width: int, device: torch.device
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Draw random inputs [rows, tokens, width] and random states, for trials."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, tokens, width, generator=generator).to(device, self.dtype)
        return hidden, {
            kind: torch.randn(rows, *size, generator=generator).to(device, dtype)
            for kind, (size, dtype) in self.parts.items()
        }

    @torch.inference_mode()
    def chunks_agree(self, width: int, device: torch.device, *, after_state: bool) -> bool:
        """Return whether several tokens in one call give the same results as one by one.

        after_state: True to start after a random state, False to start without tokens before.
        """
        hidden, drawn = self.draw_inputs(1, _PROBED, width, device)
        start = drawn if after_state else self._zeros(1, device)
        together = StateCache({kind: part.clone() for kind, part in start.items() if after_state})
        one_by_one = StateCache(start)
        output = self.run_original(hidden, together)
        steps = torch.cat(
            [self.run_original(token, one_by_one) for token in hidden.split(1, dim=1)], 1
        )
        pairs = [(output, steps)]
        pairs += [(together.parts[kind], one_by_one.parts[kind]) for kind in self.parts]
        return are_near(pairs, _SAME)


def are_near(pairs: Iterable[tuple[Tensor, Tensor]], share: float) -> bool:
    """Return whether both tensors of each pair are equal up to `share` of the largest value."""
    return all(
        float((one.float() - other.float()).abs().max()) <= share * float(other.abs().max())
        for one, other in pairs
    )


def _split(parts: Mapping[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    """Split state tensors by rows: `sizes[i]` rows for result i."""
    cut = {kind: part.split(sizes) for kind, part in parts.items()}
    return [{kind: pieces[i] for kind, pieces in cut.items()} for i in range(len(sizes))]


def _join_states(caches: Sequence[StateCache]) -> dict[str, Tensor]:
    first = caches[0].parts
    return {kind: torch.cat([each.parts[kind] for each in caches]) for kind in first}
