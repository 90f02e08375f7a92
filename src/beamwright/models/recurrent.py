"""Recurrent layers: what they keep of a row in a fixed size, instead of KV, and how they are run.

Layers compute states; `view.states` keeps them (`kv.states.StateRows`, a test's dictionary), None
of rows that begin from zeros and whose states nobody keeps. Of a row, a state is as it is behind
the row's last token. A module of `transformers` asks its cache for states and hands them back:
`StateCache` stands there, so no family needs code of its own here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.kv.states import StateRows
from beamwright.models.shape import NotBuiltError, StatePart

_CACHES = ("cache", "cache_params", "past_key_values")
"""What modules call their cache; the first since transformers 5.24."""
_ROWS = 64
"""Rows that a module gets at once: what it makes of their states is as large as those, or twice."""
_PROBED = 6
_SAME = 0.05
"""How far apart values may be, of the largest: rounding is not, a state that is left out is."""


class StateCache:
    """What a recurrent module takes for `transformers`' cache: the states of its rows.

    parts: by kind, [rows, *size], or where they lie; none where the rows begin. Modules that get
    one token write into them, or hand over what takes their place.
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
        """Inputs [rows, channels, tokens] of the convolution; with those before them."""
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
        """Of attention that has states besides."""
        return key, value


def _kind(name: str, number: int) -> str:
    return f"{name}{number or ''}"


def take_caches(layer: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """A layer's innermost modules that take a cache, by name in it; it may be the layer itself."""
    found = {name: each for name, each in layer.named_modules() if cache_of(each)}
    inside = {name: f"{name}." if name else "" for name in found}
    return {
        name: module
        for name, module in found.items()
        if not any(other != name and other.startswith(inside[name]) for other in found)
    }


def cache_of(module: torch.nn.Module) -> str | None:
    """What the module calls the cache that it takes; None if it takes none."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in names), None)


def states_of(
    module: torch.nn.Module, layer: int, call: inspect.BoundArguments
) -> tuple[StatePart, ...]:
    """What a module keeps that is called so; () if it keeps nothing.

    Raises:
        NotBuiltError: if it needs more than tokens and their states.
    """
    cache, hidden = StateCache({}), call.args[0]
    found = _called(module, call, cache)
    if not cache.is_used:
        return ()
    given = [value for name, value in call.arguments.items() if name != "attention_mask"]
    if sum(isinstance(value, Tensor) for value in given) > 1 or not isinstance(found, Tensor):
        what = type(module).__name__
        raise NotBuiltError(f"{what} makes its states of more than a layer's input")
    alone = Recurrent(module, layer, (), hidden.dtype)
    alone.plain(hidden[:, :1], cache)  # what it does with one token is seen to run
    return tuple(
        StatePart(layer, kind, tuple(part.shape[1:]), part.dtype != hidden.dtype)
        for kind, part in cache.parts.items()
    )


def check_stateless(module: torch.nn.Module, call: inspect.BoundArguments) -> None:
    """
    Raises:
        NotBuiltError: if attention that is called so keeps states besides.
    """
    cache = StateCache({})
    with suppress(Exception):  # it asks the cache for more; what counts comes before
        _called(module, call, cache)
    if cache.is_used:
        raise NotBuiltError(f"{type(module).__name__}: attention with states of its own")


def _called(module: torch.nn.Module, call: inspect.BoundArguments, cache: StateCache) -> Any:
    call.arguments[cache_of(module) or ""] = cache
    return module.forward(*call.args, **call.kwargs)


class Recurrent:
    """Runs a recurrent module on packed rows [1, tokens, hidden] with the states of a view.

    Rows with one token each are computed together, [rows, 1, hidden]; rows with more one by one, so
    that their bits depend on none beside them.
    in_chunks: the module honours a state where it gets several tokens; else those behind one go one
    after another. step: computes one token of rows [rows, 1, hidden]; in_place: of rows whose
    states stay where they lie (`models.steps`), if anything does. parts: by kind, sizes and
    numbers of a row.
    """

    def __init__(
        self, module: torch.nn.Module, layer: int, parts: Sequence[StatePart], dtype: torch.dtype
    ) -> None:
        self.module, self.layer, self.in_chunks = module, layer, True
        self._plain: Callable[..., Tensor] = module.forward
        self._takes = next(iter(inspect.signature(module.forward).parameters))
        self._cache = cache_of(module) or ""
        self.dtype = dtype
        self.parts = {
            part.kind: (part.size, torch.float32 if part.wide else dtype) for part in parts
        }
        self.step: Callable[[Tensor, StateCache], Tensor] = self.plain
        self.in_place: Callable[[Tensor, StateCache], Tensor] | None = None
        self._states: Callable[[], StateRows | None] = lambda: None

    def install(self, states: Callable[[], StateRows | None]) -> None:
        """Stand where the module's `forward` was. states: those of the pass that is computed."""
        self._states = states
        self.module.forward = self

    def plain(self, hidden: Tensor, cache: StateCache) -> Tensor:
        """The module's own forward of rows [rows, tokens, hidden] behind their states."""
        return self._plain(hidden, **{self._cache: cache})

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = args[0] if args else kwargs[self._takes]
        states = self._states()
        if states is None:
            return self._decode(hidden, self._zeros(hidden.shape[1], hidden.device))[0]
        lengths = states.lengths
        if lengths is None and self.in_place is not None:
            placed = states.placed(self.layer)
            if placed is not None:
                return self.in_place(hidden.transpose(0, 1), StateCache(placed)).transpose(0, 1)
        before = states.read(self.layer)
        if lengths is None:
            found, after = self._decode(hidden, before)
        else:
            found, after = self._prefill(hidden, before, lengths)
        kept = {kind: after[kind].to(dtype) for kind, (_, dtype) in self.parts.items()}
        states.write(self.layer, kept)
        return found

    def _decode(self, hidden: Tensor, parts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """A token of every row, some rows at a time."""
        rows = hidden[0, :, None].split(_ROWS)
        caches = [StateCache(each) for each in _split(parts, [len(some) for some in rows])]
        found = [self.step(some, cache) for some, cache in zip(rows, caches, strict=True)]
        return torch.cat(found).transpose(0, 1), _joined(caches)

    def _prefill(
        self, hidden: Tensor, parts: dict[str, Tensor], lengths: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """So many tokens of each row; zeros for those that pad the batch."""
        *rows, padding = hidden.split([*lengths, hidden.shape[1] - sum(lengths)], dim=1)
        found, caches = [], []
        for tokens, own in zip(rows, _split(parts, [1] * len(rows)), strict=True):
            pieces, cache = (tokens,), StateCache(own)
            if not self.in_chunks:
                if any(bool(part.any()) for part in own.values()):
                    pieces = tokens.split(1, dim=1)
                else:
                    cache = StateCache({})
            found += [self.plain(piece, cache) for piece in pieces]
            caches.append(cache)
        return torch.cat([*found, torch.zeros_like(padding)], dim=1), _joined(caches)

    def _zeros(self, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        return {
            kind: torch.zeros(num_rows, *size, dtype=dtype, device=device)
            for kind, (size, dtype) in self.parts.items()
        }

    def drawn(
        self, rows: int, tokens: int, width: int, device: torch.device
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Random tokens [rows, tokens, width] and states of rows, for trials."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, tokens, width, generator=generator).to(device, self.dtype)
        return hidden, {
            kind: torch.randn(rows, *size, generator=generator).to(device, dtype)
            for kind, (size, dtype) in self.parts.items()
        }

    @torch.inference_mode()
    def agrees(self, width: int, device: torch.device, *, behind: bool) -> bool:
        """Whether random tokens [1, tokens, width] together are what they are one by one.

        behind: a random state; else from nothing.
        """
        hidden, drawn = self.drawn(1, _PROBED, width, device)
        start = drawn if behind else self._zeros(1, device)
        together = StateCache({kind: part.clone() for kind, part in start.items() if behind})
        one_by_one = StateCache(start)
        found = self.plain(hidden, together)
        steps = torch.cat([self.plain(token, one_by_one) for token in hidden.split(1, dim=1)], 1)
        pairs = [(found, steps)]
        pairs += [(together.parts[kind], one_by_one.parts[kind]) for kind in self.parts]
        return near(pairs, _SAME)


def near(pairs: Iterable[tuple[Tensor, Tensor]], share: float) -> bool:
    """Whether of each pair no value is further apart than this share of the largest."""
    return all(
        float((one.float() - other.float()).abs().max()) <= share * float(other.abs().max())
        for one, other in pairs
    )


def _split(parts: Mapping[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    """Parts of so many rows each."""
    cut = {kind: part.split(sizes) for kind, part in parts.items()}
    return [{kind: pieces[i] for kind, pieces in cut.items()} for i in range(len(sizes))]


def _joined(caches: Sequence[StateCache]) -> dict[str, Tensor]:
    first = caches[0].parts
    return {kind: torch.cat([each.parts[kind] for each in caches]) for kind in first}
