"""How far single searches stray from the expected tree: the distinct nodes of sampled searches.

A search keeps whom it keeps; a budget that holds the expected tree need not hold the next one. Here
some searches are played with counts alone: n / width of n candidates survive, all choices alike
(`growth` has the expectation). Their spread says what nearly every other search needs.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from beamwright.plan.growth import Workload, in_blocks, tree_steps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]

_SAMPLED_BEAMS = 8192  # of all samples together: large searches differ less from each other
_NUM_DEVIATIONS = 3


@dataclass(frozen=True)
class Spread:
    """What nearly every search needs at least and at most, and the mean, in tokens or bytes."""

    least: int
    mean: int
    worst: int

    @classmethod
    def of(cls, peaks: Counts) -> Spread:
        """Three standard deviations about the mean, and all that was seen."""
        mean = float(peaks.mean())
        reach = _NUM_DEVIATIONS * float(peaks.std())
        least, worst = min(peaks.min(), mean - reach), max(peaks.max(), mean + reach)
        return cls(math.floor(least), round(mean), math.ceil(worst))

    @classmethod
    def exactly(cls, value: int) -> Spread:
        """No spread at all."""
        return cls(value, value, value)

    def scaled(self, factor: int) -> Spread:
        """In bytes, of so many each."""
        return Spread(factor * self.least, factor * self.mean, factor * self.worst)


@dataclass(frozen=True)
class SampledSearches:
    """Counts of nodes above the beams when each step starts [samples, steps].

    shared: distinct nodes. copied: copies of nodes where every beam reads its own. A copy that a
    pruned beam leaves stays while others read the node, so these are more than beams times levels.
    """

    shared: Counts
    copied: Counts

    def held_tokens(self, workload: Workload, *, copies: bool) -> Spread:
        """Tokens of whole blocks that a search holds at most, at the end of any of its steps."""
        beams = workload.num_beams
        growth = [beams * in_blocks(tokens) for tokens in self._lengths(workload)]
        nodes = self.copied if copies else self.shared
        prompt_held = in_blocks(workload.prompt_tokens) * (beams if copies else 1)
        peaks = prompt_held + in_blocks(workload.step_tokens) * nodes + growth
        return Spread.of(peaks.max(axis=1))

    def union_tokens(self, workload: Workload) -> Spread:
        """Distinct tokens that a search holds at most, where they need not be in blocks."""
        growth = [workload.num_beams * tokens for tokens in self._lengths(workload)]
        peaks = workload.prompt_tokens + workload.step_tokens * self.shared + growth
        return Spread.of(peaks.max(axis=1))

    def _lengths(self, workload: Workload) -> list[int]:
        """Tokens of each step; the last one may be shorter."""
        before = (self.shared.shape[1] - 1) * workload.step_tokens
        *full, _ = [workload.step_tokens] * self.shared.shape[1]
        return [*full, workload.generate_tokens - before]


def sampled_searches(workload: Workload) -> SampledSearches:
    """The same searches for equal numbers of beams, width and steps."""
    return _play(workload.num_beams, workload.width, workload.num_steps)


def expected_search(workload: Workload) -> SampledSearches:
    """The expected tree in place of sampled ones: quick, and without spread."""
    import numpy as np  # noqa: PLC0415 (slow import)

    nodes = [round(step.num_nodes) for step in tree_steps(workload)]
    copies = [workload.num_beams * level for level in range(len(nodes))]
    return SampledSearches(np.array([nodes]), np.array([copies]))


@lru_cache(maxsize=32)
def _play(num_beams: int, width: int, num_steps: int) -> SampledSearches:
    import numpy as np  # noqa: PLC0415 (slow import)

    num_samples = max(16, min(64, _SAMPLED_BEAMS // num_beams))
    shared = np.zeros((num_samples, num_steps), dtype=np.int64)
    copied = np.zeros_like(shared)
    for sample in range(num_samples):
        chance = random.Random(sample)
        # Column by column: the candidate of each earlier round that a beam descends from.
        ancestors = np.zeros((num_beams, 0), dtype=np.int64)
        copies = np.zeros((0, num_beams), dtype=np.int64)
        for step in range(1, num_steps):
            survivors = sorted(chance.sample(range(num_beams), num_beams // width))
            own = np.arange(num_beams, dtype=np.int64)[:, None]
            ancestors = np.hstack([ancestors, own])[np.repeat(survivors, width)]
            slots = ancestors + num_beams * np.arange(step, dtype=np.int64)
            readers = np.bincount(slots.ravel(), minlength=step * num_beams)
            readers = readers.reshape(step, num_beams)
            before = np.vstack([copies, np.ones((1, num_beams), dtype=np.int64)])
            copies = np.where(readers > 0, np.maximum(before, readers), 0)
            shared[sample, step] = np.count_nonzero(readers)
            copied[sample, step] = copies.sum()
    return SampledSearches(shared, copied)
