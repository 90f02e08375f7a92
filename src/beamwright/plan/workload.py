"""Predict the size of a search tree, step by step: distinct nodes and tokens of all paths.

The model: every round keeps n / width of the n candidates, all choices equally likely (scores are
not correlated). Going back from the newest level, the number of distinct ancestors per level
shrinks as in a coalescent: a parent counts only if one of its children is an ancestor of a beam.

The expectation is computed level by level from the expected number `a` of ancestors one level
below. Ignoring the variance of `a` makes the union of all paths one or two percent too large for 64
beams, and up to six percent for 16. (For n 64 and width 2 the union is 0.133 of the sum of paths.
The mean of 150 simulated searches is 0.131, with a standard deviation of 0.006.) The largest step
of a single search is some 4 % larger than the largest expected step. Selection by real scores
shares more KV than this model. Selection in separate subtrees (DVTS) shares less.

A budget that holds the expected tree may be too small for a particular search. `sampled_nodes`
therefore simulates some searches by counts alone, and `Spread` says what nearly every search needs.
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


# Tokens of a block of KV. Every node starts a new block.
BLOCK_TOKENS = 8


def round_up_to_blocks(num_tokens: int, block: int = BLOCK_TOKENS) -> int:
    """Round the tokens of one node up to whole KV blocks of `block` tokens."""
    return -(-num_tokens // block) * block


@dataclass(frozen=True)
class Workload:
    """The size of one search for an estimate: number of beams and lengths in tokens, all fixed.

    width: children of each survivor; num_beams / width beams survive a step.
    generate_tokens: tokens of a complete path, without the prompt.

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
            raise InputError(
                f"--n {self.num_beams} is not a multiple of --width {self.width}; use "
                f"{-(-self.num_beams // self.width) * self.width}"
            )

    @property
    def longest(self) -> int:
        """Length of every complete path in tokens, the prompt included."""
        return self.prompt_tokens + self.generate_tokens

    @property
    def num_steps(self) -> int:
        """Number of steps of every path. The last step may be shorter."""
        return math.ceil(self.generate_tokens / self.step_tokens)

    def num_states(self, num_rows: int) -> int:
        """Return how many recurrent states `num_rows` rows hold: one per row and one per parent."""
        return num_rows + -(-num_rows // self.width)


@dataclass(frozen=True)
class TreeStep:
    """One step of the expected search. "path" is per beam; "union" counts shared tokens once.

    num_levels: number of steps before this one.
    num_nodes: distinct nodes of all paths when the step starts, without the prompt.
    num_tokens: tokens that this step adds to each beam.
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
        """Return the distinct tokens of each group's paths, summed over `num_groups` groups.

        Groups are equally large and follow each other depth-first.
        """
        work = self.workload
        nodes = self._grouped_nodes(num_groups)
        return num_groups * work.prompt_tokens + work.step_tokens * nodes

    def group_held_tokens(self, num_groups: int) -> float:
        """Return the token slots of the KV blocks of the largest group when the step ends.

        The distinct tokens of a group are assumed to be the mean over groups; real groups differ.
        """
        work = self.workload
        rows = -(-work.num_beams // num_groups)
        nodes = self._grouped_nodes(num_groups) / num_groups
        before = round_up_to_blocks(work.prompt_tokens) + nodes * round_up_to_blocks(
            work.step_tokens
        )
        return before + rows * round_up_to_blocks(self.num_tokens)

    def _grouped_nodes(self, num_groups: int) -> float:
        """Return the distinct nodes of each group's paths, summed over `num_groups` groups.

        A cut between two groups falls either between two ancestors of a level, or through one
        ancestor, which then counts for both groups. If m survivors (or beams, if there are more
        groups than survivors) have a distinct ancestors on a level, the cut falls between two of
        them with probability (a - 1) / (m - 1).
        """
        work = self.workload
        survivors = work.num_beams // work.width
        units = survivors if num_groups <= survivors else work.num_beams
        missed = (self.num_nodes - self.num_levels) / (units - 1) if units > 1 else 0.0
        return self.num_nodes + (num_groups - 1) * (self.num_levels - missed)


def tree_steps(workload: Workload) -> Iterator[TreeStep]:
    """Yield the steps of the expected search in order. The last one may be shorter."""
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
        num_nodes += newest  # the next step has one more level above its beams


def expected_ancestors(num_beams: int, width: int, num_levels: int) -> list[float]:
    """Return the expected number of distinct ancestors of all beams per level, newest first."""
    survivors = num_beams // width
    counts = [float(survivors)]
    while len(counts) < num_levels:
        # Probability that no child of a parent is among the counts[-1] ancestors one level below
        # (hypergeometric).
        missed = 1.0
        for child in range(width):
            missed *= max(0.0, num_beams - counts[-1] - child) / (num_beams - child)
        counts.append(max(1.0, survivors * (1.0 - missed)))
    return counts[:num_levels]


# Number of beams of all sampled searches together. Large searches vary less, so fewer of them
# suffice.
_SAMPLED_BEAMS = 8192
_NUM_DEVIATIONS = 3


@dataclass(frozen=True)
class Spread:
    """Least, mean and worst peak KV need of a search, in tokens or bytes.

    Nearly every search needs between `least` and `worst`.
    """

    least: int
    mean: int
    worst: int

    @classmethod
    def of(cls, peaks: Counts) -> Spread:
        """Return three standard deviations around the mean, widened to include every sample.

        peaks [searches]: the largest need of each sampled search.
        """
        mean = float(peaks.mean())
        margin = _NUM_DEVIATIONS * float(peaks.std())
        least, worst = min(peaks.min(), mean - margin), max(peaks.max(), mean + margin)
        return cls(math.floor(least), round(mean), math.ceil(worst))

    def scaled(self, factor: int, more: int = 0) -> Spread:
        """Return each count times `factor` plus `more`, for example to convert tokens to bytes."""
        each = (self.least, self.mean, self.worst)
        return Spread(*(factor * count + more for count in each))


def peak_tokens(workload: Workload, num_nodes: Counts) -> Spread:
    """Return the peak number of KV token slots of a search: the maximum over the ends of its steps.

    num_nodes [searches, steps]: distinct nodes above the beams when each step starts.
    """
    work, num_full = workload, workload.num_steps - 1  # the last step may be shorter
    last_tokens = work.generate_tokens - num_full * work.step_tokens
    lengths = [*[work.step_tokens] * num_full, last_tokens]
    growth = [work.num_beams * round_up_to_blocks(tokens) for tokens in lengths]
    peaks = (
        round_up_to_blocks(work.prompt_tokens)
        + round_up_to_blocks(work.step_tokens) * num_nodes
        + growth
    )
    return Spread.of(peaks.max(axis=1))


def expected_nodes(workload: Workload) -> Counts:
    """Return node counts [1, steps] of the expected tree: faster than sampling, but no variance."""
    import numpy as np  # noqa: PLC0415 (slow import)

    return np.array([[round(step.num_nodes) for step in tree_steps(workload)]])


@lru_cache(maxsize=32)
def sampled_nodes(workload: Workload) -> Counts:
    """Simulate searches that select at random, and return their node counts [searches, steps].

    Seeds are fixed, so equal workloads give equal counts.
    """
    import numpy as np  # noqa: PLC0415 (slow import)

    num_beams, num_steps = workload.num_beams, workload.num_steps
    num_searches = max(16, min(64, _SAMPLED_BEAMS // num_beams))
    num_nodes = np.zeros((num_searches, num_steps), dtype=np.int64)
    own = np.arange(num_beams, dtype=np.int64)[:, None]
    for sample, counts in enumerate(num_nodes):
        chance = random.Random(sample)
        # ancestors [beam, round]: the candidate of each earlier round that the beam descends from.
        ancestors = np.zeros((num_beams, 0), dtype=np.int64)
        for step in range(1, num_steps):
            survivors = sorted(chance.sample(range(num_beams), num_beams // workload.width))
            ancestors = np.hstack([ancestors, own])[np.repeat(survivors, workload.width)]
            places = ancestors + num_beams * np.arange(step, dtype=np.int64)
            counts[step] = np.count_nonzero(np.bincount(places.ravel()))
    return num_nodes


def dm_lower_bound_bytes(needed_bytes: Iterable[int], budget_bytes: int) -> int:
    """Return a lower bound on the bytes moved over the link: the sum of max(0, needed - budget).

    needed_bytes: per round, the KV bytes of the distinct nodes that the round's beams extend.
    """
    return sum(max(0, needed - budget_bytes) for needed in needed_bytes)
