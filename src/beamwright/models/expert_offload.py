"""Offloading of experts: the device keeps the most used experts of each layer; others visit it.

Which experts a layer needs is known once its router has run. Many rows need nearly all of them, few
rows need few. Attention, routers and shared experts stay on the device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import torch

from beamwright.kv.link import Link
from beamwright.models.offload import Buffer, MovableWeight, PackedKey, WeightOffload, Weights
from beamwright.models.weight_homes import WeightHome
from beamwright.plan.costs import WEIGHT_BUFFERS

_MOST_USES = 1 << 12  # uses of an expert at which the counts of its layer are halved


class ExpertOffload(WeightOffload):
    """Keeps all experts at home, and the most used ones of each layer on the device as well.

    A missing expert is copied into a buffer while the expert before it computes. If it has been
    used more often than an expert that its layer keeps, the two change places.

    home, link: where experts live, and how they travel.
    kept_share: share of the experts' bytes to keep on the device.
    """

    def __init__(self, kept_share: float, home: WeightHome, link: Link, device: str) -> None:
        super().__init__(home, link, device)
        self._kept_share = kept_share
        self._uses: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._kept: defaultdict[int, set[int]] = defaultdict(set)
        self._spare: list[Buffer] = []  # for experts that a layer will keep
        self._passing: list[Buffer] = []  # for experts that leave once they have computed
        self._most_kept = self._num_packed = 0

    @property
    def pass_bytes(self) -> int:
        return max(0, self.home_bytes - self.buffer_bytes)

    # --- loading -----------------------------------------------------------------------------

    def add(
        self,
        number: int,
        linears: Sequence[MovableWeight],
        experts: Sequence[Sequence[MovableWeight]] = (),
    ) -> None:
        if not experts:
            return
        made = [Weights((number, place), each) for place, each in enumerate(experts)]
        for each in made:
            self._accept(each.move_home(self._mover.home))
        self._weights[number] = made

    def close_loading(self) -> None:
        """Allocate the buffers. Every layer keeps equally many experts."""
        experts = [each for layer in self._weights.values() for each in layer]
        fewest = min(len(layer) for layer in self._weights.values())
        self._most_kept = int(self._kept_share * fewest)
        count = min(len(experts), self._most_kept * len(self._weights) + WEIGHT_BUFFERS)
        self._buffers += [Buffer() for _ in range(count - len(self._buffers))]
        del self._buffers[count:]
        most = max(each.buffer_bytes for each in experts)
        for buffer in self._buffers:
            buffer.memory = torch.zeros(most, dtype=torch.uint8, device=self._device)
        self._forget()

    def _accept(self, packed: Mapping[PackedKey, torch.Tensor]) -> None:
        """Keep tensors that oneDNN packed, as memory of a buffer that has none of these sizes."""
        if not packed or any(buffer.accept(packed) for buffer in self._buffers):
            return
        self._num_packed += 1
        if len(self._buffers) < self._kept_share * self._num_packed + WEIGHT_BUFFERS:
            self._buffers.append(Buffer())
            self._buffers[-1].accept(packed)

    # --- running -----------------------------------------------------------------------------

    def bring_experts(self, layer: int) -> Callable[[Sequence[int]], Iterator[int]] | None:
        return None if layer not in self._weights else lambda wanted: self._bring(layer, wanted)

    def _forget(self) -> None:
        super()._forget()
        self._kept.clear()
        self._passing, self._spare = self._buffers[:WEIGHT_BUFFERS], self._buffers[WEIGHT_BUFFERS:]

    def _bring(self, layer: int, wanted: Sequence[int]) -> Iterator[int]:
        """Yield each wanted expert once compute may use it: first kept ones, then others."""
        experts, uses, kept = self._weights[layer], self._uses[layer], self._kept[layer]
        uses.update(wanted)
        if max(uses.values()) >= _MOST_USES:
            self._uses[layer] = uses = Counter({each: count // 2 for each, count in uses.items()})
        missing = [number for number in wanted if number not in kept]
        coming = iter(missing)
        queued = [self._fetch(experts[each]) for each in islice(coming, len(self._passing))]
        try:
            for number in [*(each for each in wanted if each in kept), *missing]:
                self._mover.wait(experts[number])
                yield number
                if number in kept:
                    continue
                self._passing.append(self._after_use(layer, number))
                del queued[0]
                queued += [self._fetch(experts[each]) for each in islice(coming, 1)]
        finally:  # the caller may have failed
            self._passing += [expert.buffer for expert in queued]

    def _fetch(self, expert: Weights) -> Weights:
        """Queue the copy of an expert into a passing buffer."""
        expert.bind(self._passing.pop(0))
        self._mover.fetch(expert)
        return expert

    def _after_use(self, layer: int, number: int) -> Buffer:
        """Decide whether the layer keeps an expert; return a buffer for the next missing one."""
        experts, kept, uses = self._weights[layer], self._kept[layer], self._uses[layer]
        if len(kept) < self._most_kept and self._spare:
            kept.add(number)
            return self._spare.pop()
        least = min(kept, key=lambda each: (uses[each], each), default=None)
        if least is None or uses[least] >= uses[number]:
            return experts[number].buffer
        kept.remove(least)
        kept.add(number)
        return experts[least].buffer
