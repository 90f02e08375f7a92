"""Scoring: queue steps for a verifier, call it, and check its scores, built-in or a user's.

The queue is Alg. 2 of decoupled tree exploration. `executor` decides on which thread this runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Real
from operator import attrgetter
from typing import Generic, TypeVar

from beamwright.engine.decisions import policy_name
from beamwright.engine.timeline import NullTimeline, PhaseTimer, Timeline
from beamwright.errors import BeamwrightError, CapacityError, InputError, LinkError, NotFiniteError
from beamwright.models.load import convert_memory_errors
from beamwright.protocols import Event, StepFailed, StepScored, Verifier, traits_of
from beamwright.tree import Node, Sees, group_by_root

_depth = attrgetter("depth")
_LARGEST_SCORE = 1e30  # sums and squares of many such scores are still finite floats
MEMORY_ADVICE = "lower --n, --max-batch or --kv-memory; other programs may hold some of it"


T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """Queue with the largest priority first; equal priorities are first in, first out."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, T]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self._entries)

    def put(self, item: T, priority: int = 0) -> None:
        """Add an item."""
        number = sum(other >= priority for other, _ in self._entries)
        self._entries.insert(number, (priority, item))

    def take(self) -> T:
        """Remove and return the first item."""
        return self._entries.pop(0)[1]

    def replace_items(self, replace: Callable[[T], T | None]) -> None:
        """Replace each item with `replace(item)`; None removes the item."""
        changed = [(priority, replace(item)) for priority, item in self._entries]
        self._entries = [(priority, item) for priority, item in changed if item is not None]

    def clear(self) -> None:
        """Remove all items."""
        self._entries.clear()


class ScoringQueue(PriorityQueue[tuple[Node, ...]]):
    """Queue of the batches of steps that wait for a verifier, each batch of one tree.

    `take` joins batches to one call of at most `most_steps` steps (N_PRM in decoupled tree
    exploration, section 7.2), but takes at least one batch.
    """

    def __init__(self, most_steps: int = 1) -> None:
        super().__init__()
        self._most_steps = most_steps

    def take(self) -> tuple[Node, ...]:
        """Remove and return the steps of the next call; empty if nothing waits."""
        taken: list[Node] = []
        for batch in list(self):
            if taken and len(taken) + len(batch) > self._most_steps:
                break
            taken += super().take()
        return tuple(taken)

    def release(self, nodes: Sequence[Node]) -> None:
        """Remove nodes from waiting batches; drop batches left with speculative steps only."""
        gone = frozenset(nodes)
        self.replace_items(lambda batch: remaining_batch(batch, gone))


@dataclass(frozen=True)
class VerifyEveryRule:
    """Predicate on nodes: is this step given to the verifier (`--verify-every`)?

    True for every `every`-th step that the verifier sees of a reply, and for the step that ends
    the path (VG-Search, Chen et al. 2025); False for white space between a thought and the answer.
    The result depends on the path alone.

    every: distance between judged steps. sees: the part of a reply that the verifier sees.
    """

    every: int = 1
    sees: Sees = "answer"

    @classmethod
    def for_verifier(cls, verifier: Verifier, every: int) -> VerifyEveryRule:
        """Create the predicate for `verifier`.

        Raises:
            InputError: if `every` is above 1, but this verifier must get each step.
        """
        traits = traits_of(verifier)
        if every > 1 and traits.answers_each_step:
            name = policy_name(verifier)
            raise InputError(
                f"--verify-every {every}: verifier {name} must score every step; use 1"
            )
        return cls(every, traits.sees)

    def __call__(self, node: Node) -> bool:
        if not node.is_seen_by(self.sees) or node.replies_to is node:
            return False
        if self.every == 1 and node.step_text.strip():
            return True  # the usual case
        steps = node.reply()
        shown = [step for step in steps if step.is_seen_by(self.sees)]
        if len(shown) < len(steps) and not any(step.step_text.strip() for step in shown):
            return False
        return node.ended or len(shown) % self.every == 0


def remaining_batch(batch: Sequence[Node], gone: Collection[Node]) -> tuple[Node, ...] | None:
    """Return a batch without the nodes `gone`; None if at most speculative nodes are left."""
    left = tuple(node for node in batch if node not in gone)
    return left if any(not node.speculative for node in left) else None


class VerifierCaller:
    """Caller of a verifier: it queues steps, times calls, and turns scores into events.

    One thread at a time may call it.

    stalled_s: returns the seconds that the verifier has waited for the link so far.
    """

    def __init__(
        self,
        verifier: Verifier,
        phase_timer: PhaseTimer,
        stalled_s: Callable[[], float] = lambda: 0.0,
        timeline: Timeline | None = None,
        most_steps: int = 1,
    ) -> None:
        self._verifier, self._traits = verifier, traits_of(verifier)
        self.phase_timer, self._stalled_s = phase_timer, stalled_s
        self.queue, self.timeline = ScoringQueue(most_steps), timeline or NullTimeline()
        self._failed: set[Node] = set()
        self._without_room: set[Node] = set()

    def score(self, nodes: Sequence[Node]) -> list[Event]:
        """Score steps, and return their scores or failures as events.

        If a call fails, each tree is scored alone, and a tree that fails gets one event. If memory
        is too small even for one tree, each of its steps fails with that error, and may be
        submitted again.

        Speculative children are scored with or after their parents: in the same call if the
        verifier takes paths (FlashTTS, section 4.1.3), otherwise, or if that does not fit, in one
        call per level. Children that cannot be scored get no event.

        Raises:
            LinkError: if the link has failed.
        """
        # Further steps of a failed tree may have been queued before it failed.
        nodes = [node for node in nodes if node.root not in self._failed]
        steps = [node for node in nodes if not node.speculative]
        ahead: list[Node] = []
        if self._traits.beside_decoding:
            ahead = sorted((node for node in nodes if node.speculative), key=_depth)
        if (
            ahead
            and self._traits.takes_paths
            and self._without_room.isdisjoint([node.parent for node in ahead])
        ):
            events = self._call_verifier([*steps, *ahead])
            if isinstance(events, list):
                return events
            self._release_unscored([*steps, *ahead])
        events = self._call_verifier(steps)
        if isinstance(events, BeamwrightError):
            return self._score_each_tree(steps, events)
        for _, level in groupby(ahead, key=_depth):
            children = list(level)
            ready = [child for child in children if child.parent not in self._without_room]
            scores = self._call_verifier(ready)
            if isinstance(scores, BeamwrightError):
                scores, ready = [], []
            events += scores
            self._release_unscored([child for child in children if child not in ready])
        return events

    def _call_verifier(self, nodes: Sequence[Node]) -> list[Event] | BeamwrightError:
        """Score nodes in one call, and return events, or the error instead of raising it.

        An error of the link is raised.
        """
        if not nodes:
            return []
        try:
            with (
                convert_memory_errors("a round cannot be finished (verify)", MEMORY_ADVICE),
                self.phase_timer.phase("verify", self._stalled_s),
                self.timeline.span("verify", "verify", steps=len(nodes)),
            ):
                scores = self._verifier.score(nodes)
            self._without_room.difference_update(nodes)
            tokens = sum(len(node.token_ids) for node in nodes)
            self.phase_timer.add(verifier_calls=1, scored_steps=len(nodes), scored_tokens=tokens)
            return [*make_score_events(self._verifier, nodes, scores)]
        except LinkError:
            raise
        except BeamwrightError as error:
            return error

    def _score_each_tree(self, steps: Sequence[Node], error: BeamwrightError) -> list[Event]:
        """Score each tree of a failed call alone; if it was a single tree, fail it with `error`."""
        trees = group_by_root(steps)
        if len(trees) == 1 and not isinstance(error, CapacityError):
            self._failed.update(trees)
            return [StepFailed(steps[0], error)]
        self._release_unscored(steps)
        if len(trees) > 1:
            return [event for nodes in trees.values() for event in self.score(nodes)]
        return [StepFailed(node, error) for node in steps]

    def _release_unscored(self, nodes: Sequence[Node]) -> None:
        """Free the verifier's KV of nodes that did not fit, whose children cannot be scored now."""
        self._without_room.update(nodes)
        self._verifier.release(nodes)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free what the verifier keeps for these nodes, such as KV."""
        self._failed.difference_update(nodes)
        self._without_room.difference_update(nodes)
        self._verifier.release(nodes)


def make_score_events(
    verifier: Verifier, nodes: Sequence[Node], scores: Sequence[float | None]
) -> list[StepScored]:
    """Check the scores of a call, and return an event per step.

    Raises:
        NotFiniteError: if a score is NaN, infinite, or too large to be summed.
        InputError: if there is not one number, or None, per step.
    """
    name = f"verifier {policy_name(verifier)}"
    if len(scores) != len(nodes):
        raise InputError(f"{name}: returned {len(scores)} scores for {len(nodes)} steps")
    events: list[StepScored] = []
    for node, score in zip(nodes, scores, strict=True):
        if not isinstance(score, Real | None):
            raise InputError(
                f"{name}: the score of {_name_step(node)} is a {type(score).__name__}, "
                "but must be a number or None"
            )
        if not _is_usable(score):
            raise NotFiniteError(
                f"{name}: the score of {_name_step(node)} is {score!s:.40}, but must be a "
                f"finite number up to {_LARGEST_SCORE:g} or None"
            )
        events.append(StepScored(node, None if score is None else float(score)))
    return events


def check_path_score(node: Node) -> None:
    """Check the score of the path that ends in `node`.

    Raises:
        NotFiniteError: if the score is NaN, infinite, or too large to be summed.
    """
    if not _is_usable(node.score):
        steps = [step.step_score for step in node.reply()]
        raise NotFiniteError(
            f"the path score of {_name_step(node)} is {node.score}, from the step scores "
            f"{steps[-3:]}. Check the verifier's scores or choose another --aggregate."
        )


def _is_usable(score: float | None) -> bool:
    return score is None or abs(score) <= _LARGEST_SCORE  # False for NaN


def _name_step(node: Node) -> str:
    return f"problem {node.problem_id}, step {node.depth}"
