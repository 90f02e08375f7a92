"""How large a search tree is, step by step, before any search has run. Knows counts only.

Model: every round keeps n / width of the n candidates, all choices alike (no score correlation).
Looking back from the present, the distinct ancestors at each level then follow a coalescent: of k
parents with `width` children each, those with a descendant among the `a` that matter one level
down. The expectation is taken level by level; ignoring the spread of `a` puts the union one or two
per cent high for 64 beams, up to six for 16 (n 64, width 2: 0.133 of the sum of paths; 0.131 over
150 simulated searches, standard deviation 0.006). A single search's largest step exceeds the
largest expected one by some 4 %. Selection that follows scores shares more, one that keeps families
apart shares less.

A search keeps whom it keeps, so a budget that holds the expected tree need not hold the next one:
some searches are played with counts alone, and their spread says what nearly every other one needs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from beamwright.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]


BLOCK_TOKENS = 8
"""Tokens of a block of KV; a node starts a fresh one."""


def in_blocks(num_tokens: int, block: int = BLOCK_TOKENS) -> int:
    """Tokens of the whole blocks that so many tokens of one node take."""
    return -(-num_tokens // block) * block


@dataclass(frozen=True)
class Workload:
    """One search with fixed lengths. width: children per survivor; n / width survive a step.

    Raises:
        InputError: if a number is not positive, or width does not divide num_beams.
    """

    num_beams: int
    width: int
    prompt_tokens: int
    generate_tokens: int
    step_tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InputError(f"{name.replace('_', ' ')} must be positive, not {value}")
        if self.num_beams % self.width:
            raise InputError(f"--n {self.num_beams} is not a multiple of --width {self.width}")

    @property
    def longest(self) -> int:
        """Tokens of every path when it ends."""
        return self.prompt_tokens + self.generate_tokens

    @property
    def num_steps(self) -> int:
        """Steps of every path; the last one may be shorter."""
        return math.ceil(self.generate_tokens / self.step_tokens)

    def num_states(self, num_rows: int) -> int:
        """Of recurrent layers, states that are held for so many rows: theirs, and those of the
        nodes that they began from."""
        return num_rows + -(-num_rows // self.width)


@dataclass(frozen=True)
class TreeStep:
    """One step of the search. Token counts are per beam (path) or of distinct tokens (union).

    num_levels: steps before this one; num_nodes: distinct nodes of all paths when it starts, the
    prompt left out; num_tokens: that this step adds to each beam.
    """

    workload: Workload
    num_levels: int
    num_nodes: float
    num_tokens: int

    @property
    def path_tokens(self) -> int:
        """Length of every path when the step starts."""
        return self.workload.prompt_tokens + self.num_levels * self.workload.step_tokens

    @property
    def union_tokens(self) -> float:
        """Distinct tokens of all paths when the step starts."""
        return self.grouped_union_tokens(1)

    def grouped_union_tokens(self, num_groups: int) -> float:
        """Sum over depth-first groups of even size of the distinct tokens of their paths."""
        work = self.workload
        nodes = self._grouped_nodes(num_groups)
        return num_groups * work.prompt_tokens + work.step_tokens * nodes

    def group_held_tokens(self, num_groups: int) -> float:
        """Tokens of whole blocks of the largest of these groups, when the step ends.

        Unions are of mean size: groups of a real tree differ.
        """
        work = self.workload
        rows = -(-work.num_beams // num_groups)
        nodes = self._grouped_nodes(num_groups) / num_groups
        before = in_blocks(work.prompt_tokens) + nodes * in_blocks(work.step_tokens)
        return before + rows * in_blocks(self.num_tokens)

    def _grouped_nodes(self, num_groups: int) -> float:
        """Sum over such groups of their distinct nodes.

        A cut between two groups falls between two ancestors of a level, or through one, which
        both groups then hold. With a of m units' ancestors, it misses with (a - 1) / (m - 1).
        """
        work = self.workload
        survivors = work.num_beams // work.width
        units = survivors if num_groups <= survivors else work.num_beams
        missed = (self.num_nodes - self.num_levels) / (units - 1) if units > 1 else 0.0
        return self.num_nodes + (num_groups - 1) * (self.num_levels - missed)


def tree_steps(workload: Workload) -> Iterator[TreeStep]:
    """The steps of a search; the last one may be shorter."""
    ancestors = expected_ancestors(workload.num_beams, workload.width, workload.num_steps)
    num_nodes = 0.0
    for number, newest in enumerate(ancestors):
        left = workload.generate_tokens - number * workload.step_tokens
        yield TreeStep(
            workload=workload,
            num_levels=number,
            num_nodes=num_nodes,
            num_tokens=min(workload.step_tokens, left),
        )
        num_nodes += newest  # one more level above the beams of the next step


def expected_ancestors(num_beams: int, width: int, num_levels: int) -> list[float]:
    """Expected distinct ancestors of all beams, per level, the newest level first."""
    survivors = num_beams // width
    counts = [float(survivors)]
    while len(counts) < num_levels:
        # Chance that none of a parent's children is among the a that matter (hypergeometric).
        missed = 1.0
        for child in range(width):
            missed *= max(0.0, num_beams - counts[-1] - child) / (num_beams - child)
        counts.append(max(1.0, survivors * (1.0 - missed)))
    return counts[:num_levels]


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

    def scaled(self, factor: int, more: int = 0) -> Spread:
        """In bytes, of so many each, and so many bytes more."""
        each = (self.least, self.mean, self.worst)
        return Spread(*(factor * count + more for count in each))


def held_tokens(workload: Workload, num_nodes: Counts) -> Spread:
    """Tokens of whole blocks that searches hold at most, at the end of any of their steps.

    num_nodes [searches, steps]: distinct nodes above the beams when each step starts.
    """
    work, num_full = workload, workload.num_steps - 1  # the last step may be shorter
    last_tokens = work.generate_tokens - num_full * work.step_tokens
    lengths = [*[work.step_tokens] * num_full, last_tokens]
    growth = [work.num_beams * in_blocks(tokens) for tokens in lengths]
    peaks = in_blocks(work.prompt_tokens) + in_blocks(work.step_tokens) * num_nodes + growth
    return Spread.of(peaks.max(axis=1))


def expected_nodes(workload: Workload) -> Counts:
    """The expected tree in place of sampled ones [1, steps]: quick, and without spread."""
    import numpy as np  # noqa: PLC0415 (slow import)

    return np.array([[round(step.num_nodes) for step in tree_steps(workload)]])


@lru_cache(maxsize=32)
def sampled_nodes(workload: Workload) -> Counts:
    """Of searches that select at random [searches, steps]; equal shapes give the same searches."""
    import numpy as np  # noqa: PLC0415 (slow import)

    num_beams, num_steps = workload.num_beams, workload.num_steps
    num_searches = max(16, min(64, _SAMPLED_BEAMS // num_beams))
    num_nodes = np.zeros((num_searches, num_steps), dtype=np.int64)
    own = np.arange(num_beams, dtype=np.int64)[:, None]
    for sample, counts in enumerate(num_nodes):
        chance = random.Random(sample)
        # Column by column: the candidate of each earlier round that a beam descends from.
        ancestors = np.zeros((num_beams, 0), dtype=np.int64)
        for step in range(1, num_steps):
            survivors = sorted(chance.sample(range(num_beams), num_beams // workload.width))
            ancestors = np.hstack([ancestors, own])[np.repeat(survivors, workload.width)]
            places = ancestors + num_beams * np.arange(step, dtype=np.int64)
            counts[step] = np.count_nonzero(np.bincount(places.ravel()))
    return num_nodes


def dm_lower_bound_bytes(needed_bytes: Iterable[int], budget_bytes: int) -> int:
    """Sum over rounds of max(0, distinct sealed bytes needed - device KV budget).

    needed_bytes: per round, the KV bytes of the distinct nodes that the round's beams extend.
    """
    return sum(max(0, needed - budget_bytes) for needed in needed_bytes)
