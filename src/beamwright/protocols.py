"""Interfaces between packages: what policies, step writers and the engine exchange.

The engine asks the policies (strategy, schedule, verifier), which receive data and return data. It
sends plans to a step writer, which decodes, and receives events (docs/develop/architecture.md).

This module holds types and data only and imports no torch. The imports under TYPE_CHECKING name
types and are never executed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from beamwright.counters import Counters
    from beamwright.errors import BeamwrightError
    from beamwright.plan.machines import PassCosts
    from beamwright.tree import Node, SearchTree, Sees, StopReason, TopTokens, Turn


class Direction(StrEnum):
    """Direction of a transfer over the link: host to device or device to host."""

    H2D = "h2d"
    D2H = "d2h"


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepDecoded:
    """Event: the step of `node` is decoded.

    token_ids: the tokens of the step, including the token that completed the stop.
    logprobs: the log-probability of each token under the model's distribution at temperature 1.
    stop: the reason why the step ended.
    text: the text of the whole reply up to the end of this step (`Node.text`).
    stats: the requested statistics of each token's distribution, by name (`Traits.token_stats`).
    top: the most likely tokens at each position; empty unless they were requested.
    thought: True if the step is part of a thought.
    """

    node: Node
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: StopReason
    text: str
    stats: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    top: tuple[TopTokens, ...] = ()
    thought: bool = False


@dataclass(frozen=True)
class StepScored:
    """Event: the verifier has scored the step of `node`; the score is None if it gave none."""

    node: Node
    score: float | None


@dataclass(frozen=True)
class StepFailed:
    """Event: the step of `node` cannot be decoded or scored, so its tree cannot be finished."""

    node: Node
    error: BeamwrightError


@dataclass(frozen=True)
class StepDropped:
    """Event: a speculative child has lost its tokens and KV, because their memory was needed.

    A speculative child is a child that is decoded before selection has opened it.
    """

    node: Node


@dataclass(frozen=True)
class StepAwaited:
    """Event: the step of `node` has not begun, because its prompt or turn is still being prefilled.

    A long prompt is prefilled in chunks, one chunk per iteration.
    """

    node: Node


Event = StepDecoded | StepScored | StepFailed | StepDropped | StepAwaited


class StepWriter(Protocol):
    """Interface of a step writer: it decodes the steps of open nodes, here or on a server.

    running_nodes: the nodes whose steps are being decoded; a plan does not contain them.
    busy: True if a step is being decoded or waits to be decoded.

    A writer that also decodes speculative children, before selection has opened them (FlashTTS,
    section 4.1), overrides `speculation`, `speculating` and `speculate`.
    """

    counts: Counters  # what the writer has done, such as groups begun
    speculation: str = "off"  # "off": never. "exact", "truncate": always. "auto": if it pays
    # Open rows and speculative rows in the last iteration; None for a writer without rows. A row is
    # a path's place in the running batch.
    last_rows: tuple[int, int] | None = None

    @property
    def running_nodes(self) -> Collection[Node]: ...
    @property
    def busy(self) -> bool: ...
    @property
    def speculating(self) -> bool:
        """True if the writer has speculative children to decode now."""
        return False

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """Return the data about these open nodes that a schedule plans with."""

    def submit(self, plan: Plan) -> None:
        """Replace the waiting steps by the steps of `plan`. Steps being decoded continue."""

    def iterate(self) -> Sequence[Event]:
        """Do one bounded piece of work, and return its events; empty if no step has ended."""

    def cancel(self, nodes: Sequence[Node]) -> None:
        """Cancel the open steps of these nodes, and free their memory."""

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the KV segments that these nodes own."""

    def speculate(self, nodes: Sequence[Node]) -> None:
        """Decode speculative children in slots that no open step needs, likeliest first.

        They replace the speculative children that waited until now. Children that are being decoded
        continue until they are cancelled.
        """
        return

    def start_from_sibling(self, node: Node, begun: Node, share: float) -> None:
        """Start the step of `node` with the first `share` of the tokens of its sibling `begun`.

        Only `--speculation truncate` uses this (FlashTTS).
        """
        return

    def free_outside_window(self, tree: SearchTree) -> None:
        """Free the KV of `tree` that no future token attends to, because of a sliding window."""
        return


# --- policies --------------------------------------------------------------------------------


SAMPLING_MASS = "sampling_mass"  # name of the statistic `engine.sampling.sampling_mass`


@dataclass(frozen=True)
class Traits:
    """What the engine must know about a verifier or a strategy, besides its methods.

    It decides which statistics to compute and when to call the policy. A plugin sets `traits`, or
    attributes of the same names.
    """

    # Names of the statistics of each token's distribution that the policy reads in `node.stats`.
    # Only these are computed (`engine.sampling.TOKEN_STATS`).
    token_stats: frozenset[str] = frozenset()
    # Verifier: a score may depend on the other nodes of the same call, which then contains all
    # steps of a round. If False, a score depends on its node's path alone.
    listwise: bool = False
    # Verifier: it may be called on its own thread while steps are decoded. It may then read only
    # the given nodes, their ancestors, and its own state.
    beside_decoding: bool = False
    # Verifier: one call may contain a node and its ancestors, the ancestors first.
    takes_paths: bool = False
    # Verifier: it reads sampled tokens (`token_ids`, `logprobs` or `stats`), so it cannot score
    # steps that are given as text.
    reads_drawn: bool = False
    # Verifier: the generator keeps the hidden states of new tokens for it
    # (`engine.row.GeneratorState`).
    reads_states: bool = False
    # Verifier: it must receive every step of a path, so `--verify-every` must be 1.
    answers_each_step: bool = False
    # Verifier: the part of a reply that it scores: "answer", "thought" or "both".
    sees: Sees = "answer"
    # Strategy with a `prospects` method: scores make its predictions better, so the engine may
    # score steps before the round is decoded.
    foresees_by_score: bool = False
    # Strategy with `prospects`: every decoded step is extended, whatever its score is.
    certain: bool = False


def traits_of(policy: object, **usual: Any) -> Traits:
    """Return `policy.traits`, or build the traits from the policy's attributes of the same names.

    usual: values for traits that the policy does not declare.
    """
    traits = getattr(policy, "traits", None)
    if isinstance(traits, Traits):
        return traits
    names = [each.name for each in fields(Traits)]
    said = usual | {name: getattr(policy, name) for name in names if hasattr(policy, name)}
    return Traits(**said | {"token_stats": frozenset(said.get("token_stats", ()))})


def stats_read_by(*policies: object) -> frozenset[str]:
    """Return the names of the token statistics that these verifiers and strategies read."""
    return frozenset[str]().union(*(traits_of(policy).token_stats for policy in policies))


@dataclass(frozen=True)
class Extend:
    """Action: give `node` new children; greedy children always take the most likely token."""

    node: Node
    children: int
    greedy: bool = False


@dataclass(frozen=True)
class Ask:
    """Action: answer an ended reply with a user turn, and start one step of the next reply.

    If the turn does not fit the model's context, the node becomes a final candidate instead. A turn
    that stands alone is asked of the root, any number of times; the problem replaces a misfit.
    """

    node: Node
    turn: Turn


@dataclass(frozen=True)
class Prune:
    """Action: drop `node` from the search."""

    node: Node


@dataclass(frozen=True)
class FinishPath:
    """Action: make `node` a final candidate, because its path has ended."""

    node: Node


@dataclass(frozen=True)
class EndSearch:
    """Action: end the search.

    reason: why the search has fewer final candidates than requested, or None.
    """

    reason: str | None = None


Action = Extend | Ask | Prune | FinishPath | EndSearch
# Old names of two actions, for plugins written for 0.2. The next release removes them.
Complete = FinishPath
Finish = EndSearch


class Strategy(Protocol):
    """Policy that extends, prunes or finishes the nodes of a tree after each round.

    select: returns the actions for the candidates of `tree`, whose round is complete. `rng` is the
        random stream of this round. It is the same each time this round of this problem is decided,
        so that a resumed search gives the same tree.
    """

    def select(self, tree: SearchTree, rng: Random) -> list[Action]: ...


@dataclass(frozen=True)
class Prospect:
    """Prediction that selection will give a finished step this number of children.

    greedy: True if the children take the most likely token at each position.
    potential: the priority for speculation; children of a larger potential are decoded first.
    """

    node: Node
    children: int
    greedy: bool = False
    potential: float = 1.0


@runtime_checkable
class Foresees(Protocol):
    """Interface of a strategy that predicts which steps it will extend when the round is over.

    prospects: returns the steps that selection may extend. A wrong prediction costs time and never
        changes the tree. `beams` are the nodes of the current round: candidates among them have
        their step, and some have a score. `ahead` are speculative children whose step is decoded.
    """

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> Sequence[Prospect]: ...


@dataclass(frozen=True)
class KVDemand:
    """The KV that a round's beams need on the device, for a schedule.

    A segment is the KV of one node. Segments are numbered, parents before children.
    """

    # For each segment: the number of the segment before it on the path; None for a root.
    parent: Sequence[int | None]
    segment_bytes: Sequence[int]  # for each segment: its bytes on the device, in whole blocks
    # For each segment: the number of its copies on the device now; at most one if it is shared.
    resident: Sequence[int]
    # For each beam: the number of the deepest segment that it reads; None if it reads none.
    leaf: Sequence[int | None]
    # For each beam: the bytes that its step will write, in whole blocks, or an estimate of them.
    growth_bytes: Sequence[int]
    capacity_bytes: int  # bytes of KV that fit the device, the limit for one group
    # True if each beam needs its own copy of a segment, the layout of the LBS paper. Otherwise all
    # beams below a segment share one copy.
    copy_per_beam: bool = False
    # Bytes that the previous round needed in one group, growth included; None in the first round.
    previous_need_bytes: int | None = None


@dataclass(frozen=True)
class ScheduleView:
    """Input of `Schedule.plan`: the open nodes of all trees, and their demand for KV memory."""

    beams: tuple[Node, ...]  # open nodes that wait for their step, in depth-first order
    # The KV that these beams need; None if KV never leaves the device.
    demand: KVDemand | None = None
    # Beams for which the device has working memory now (#Beam in LBS, section 4.2); None: unknown.
    max_beams: int | None = None
    step_tokens: int = 1  # tokens of the longest step; an estimate unless `fixed_lengths`
    # True if step lengths are fixed: a step is shorter only where its path ends.
    fixed_lengths: bool = False
    # Estimated times of a pass and of the link; None if they are unknown.
    costs: PassCosts | None = None

    def limit(self, max_batch: int | None) -> int | None:
        """Return the largest number of beams of a group, or None without a limit.

        It is the smaller of `max_batch`, the user's limit, and the device's limit `max_beams`.
        """
        known = [limit for limit in (max_batch, self.max_beams) if limit is not None]
        return min(known, default=None)


@dataclass(frozen=True)
class Parking:
    """Parameters of a plan with parking: rows reserve KV one block at a time, not for a full step.

    When blocks run out, the row that was admitted last is preempted: its tokens and KV wait on the
    host. There are no barriers between groups.
    """

    # Maximum number of rows at once, because more would not be faster; None: no limit.
    most_rows: int | None = None
    # When at most this many steps are left, the row with the fewest tokens is admitted first, so
    # that the last rows end at about the same time.
    level_from: int = 0


@dataclass(frozen=True)
class Plan:
    """Output of `Schedule.plan`: the order in which beams join the running batch, in groups."""

    # With `--batching grouped`, a group starts when the previous group has ended.
    groups: tuple[tuple[Node, ...], ...]
    # True if KV has to be written back to the host because the tree outgrows the device.
    write_back: bool = False
    # True: KV is written back while it is decoded. False: it is written back shortly before its
    # memory is needed, so most KV of pruned paths never crosses the link.
    eager: bool = False
    # Parameters of parking. None: blocks for the expected length of each row's step stay reserved.
    parking: Parking | None = None


class SchedulePolicy(Protocol):
    """Interface of a schedule: it arranges beams into groups. It changes the time, never the tree.

    plan: returns the order and the groups of the beams in `view`.
    """

    @property
    def name(self) -> str: ...
    def plan(self, view: ScheduleView) -> Plan: ...


class Answers(Protocol):
    """Interface of an answer format: how an answer is read, and when two answers are equal.

    read: returns the answer that the reply `text` states; None if it states none.
    key: returns a text that is the same for all equal answers. `notes` are the latest notes that
        the verifier wrote about the reply, by kind.

    A format may also have `about(problem)`, which returns the format for the text of one problem.
    """

    def read(self, text: str) -> str | None: ...

    def key(self, answer: str, notes: Mapping[str, str]) -> str: ...


class Verifier(Protocol):
    """Interface of a verifier: it scores finished steps.

    score: returns a score for the step of each node; None for a step without a score. Without
        `Traits.takes_paths`, no node of a call is an ancestor of another: an ancestor was scored in
        an earlier call, or is never scored (`engine.scoring.VerifyEveryRule`). With it, ancestors
        come first.
    release: frees the state that the verifier keeps on these nodes, in `node.handles["verifier"]`.
    default_aggregate: how a path's score follows from its steps: "last", "min", "prod" or "mean".
    probabilities: True if every score lies between 0 and 1.

    `Traits` describes the further properties that a verifier can declare.
    """

    default_aggregate: str
    probabilities: bool

    def score(self, nodes: Sequence[Node]) -> list[float | None]: ...

    def release(self, nodes: Sequence[Node]) -> None: ...


# --- reporting -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundReport:
    """Argument of the `on_round` callback, which is called after every round of a tree."""

    tree: SearchTree
    round: int
    # Nodes that the strategy selected from; some waited since earlier rounds, and some may wait on.
    candidates: tuple[Node, ...]
    survivors: tuple[Node, ...]
    pruned: tuple[Node, ...]
    finished: tuple[Node, ...]
    elapsed_s: float


RoundCallback = Callable[[RoundReport], None]
