"""The seams between rooms: what each room promises the loop. Types and data only, no torch.

Work goes down to a step writer, events come back up; policies get views and return data
(docs/develop/architecture.md). The imports under TYPE_CHECKING name types and are never executed.
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
    """Which way a transfer goes over the link."""

    H2D = "h2d"
    D2H = "d2h"


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepDecoded:
    """A node's step is complete.

    token_ids: the step's tokens, the one that completed the stop included.
    logprobs: log-probability of each token under the model's untempered distribution.
    stats: what was asked for (`Traits.token_stats`) of the distribution of each token, by name.
    top: the likeliest tokens beside each, where they were asked for. thought: see `Node`.
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
    """A node's step has its verifier score; None where the verifier has no opinion."""

    node: Node
    score: float | None


@dataclass(frozen=True)
class StepFailed:
    """A node's step cannot be decoded or scored, and so its tree cannot be finished."""

    node: Node
    error: BeamwrightError


@dataclass(frozen=True)
class StepDropped:
    """A speculative child has lost what it had: its room was needed."""

    node: Node


@dataclass(frozen=True)
class StepAwaited:
    """A node's step has not begun: of what it follows a part was read, and there is more."""

    node: Node


Event = StepDecoded | StepScored | StepFailed | StepDropped | StepAwaited


class StepWriter(Protocol):
    """Writes the steps of open nodes: running batch, remote generator, simulation, script.

    running_nodes: whose steps are under way; a plan says nothing about them. busy: steps are under
    way, or wait in the order of a plan. counts: groups begun so far, and what else it counts.

    A writer that decodes children before selection has opened them (FlashTTS 4.1) says more.
    speculation: whether it ever does ("off"), always ("exact", "truncate"), or where it pays.
    speculating: it has some to go on with. last_rows: of the last iteration, rows whose nodes are
    open, and speculative ones; None where it has no rows.
    """

    counts: Counters
    speculation: str = "off"
    last_rows: tuple[int, int] | None = None

    @property
    def running_nodes(self) -> Collection[Node]: ...
    @property
    def busy(self) -> bool: ...
    @property
    def speculating(self) -> bool:
        return False

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """What a schedule may know of these open nodes."""

    def submit(self, plan: Plan) -> None:
        """Decode what the plan says instead of what waited; steps under way go on."""

    def iterate(self) -> Sequence[Event]:
        """One bounded piece of work; no event where no step has ended."""

    def cancel(self, nodes: Sequence[Node]) -> None:
        """Give up open steps and free what they hold."""

    def release(self, nodes: Sequence[Node]) -> None:
        """Free every KV segment that these nodes own."""

    def speculate(self, nodes: Sequence[Node]) -> None:
        """Decode these speculative children, the likeliest first, where nothing else can be.

        Instead of those that waited; what is under way goes on until it is cancelled.
        """
        return

    def begin_like(self, node: Node, begun: Node, share: float) -> None:
        """Let an open node begin with this share of its sibling's tokens (`truncate`)."""
        return

    def forget_unseen(self, tree: SearchTree) -> None:
        """Free KV that no window of a row to come of this tree reaches."""
        return


# --- policies --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traits:
    """What a verifier or a strategy says of itself beside its methods.

    token_stats: names of statistics of each token's distribution that it reads in `node.stats`
    (`engine.sampling.TOKEN_STATS`); what nobody reads is never computed.

    Of a verifier. listwise: scores may depend on the other nodes of a call, which are then all of a
    round's; otherwise a score is a function of its node's path alone. beside_decoding: it may be
    called on a thread of its own while steps are decoded; it reads nothing but the nodes that it is
    given, with those above them, and what it keeps itself. takes_paths: some nodes of a call may be
    above others, and come first. reads_drawn: it reads what the generator drew (`token_ids`,
    `logprobs`, `stats`), so steps given as texts have no score. reads_states: the generator keeps
    the hidden states of new tokens for it (`engine.row.GeneratorState`). answers_each_step: it
    has to be given every step. sees: what of a reply it is given (`Node.seen`).

    Of a strategy with prospects. foresees_by_score: scores of this round's steps are worth having
    before the round is over. certain: every complete step goes on, whatever the scores are.
    """

    token_stats: frozenset[str] = frozenset()
    listwise: bool = False
    beside_decoding: bool = False
    takes_paths: bool = False
    reads_drawn: bool = False
    reads_states: bool = False
    answers_each_step: bool = False
    sees: Sees = "answer"
    foresees_by_score: bool = False
    certain: bool = False


def traits_of(policy: object, **usual: Any) -> Traits:
    """What a policy carries as `traits`, or says by attributes of the same names.

    usual: what holds where it does not say.
    """
    traits = getattr(policy, "traits", None)
    if isinstance(traits, Traits):
        return traits
    names = [each.name for each in fields(Traits)]
    said = usual | {name: getattr(policy, name) for name in names if hasattr(policy, name)}
    return Traits(**said | {"token_stats": frozenset(said.get("token_stats", ()))})


def stats_read_by(*policies: object) -> frozenset[str]:
    """Names of the token statistics that these verifiers and strategies read."""
    return frozenset[str]().union(*(traits_of(policy).token_stats for policy in policies))


@dataclass(frozen=True)
class Extend:
    """Give `node` this many children; greedy ones take the likeliest token every time."""

    node: Node
    children: int
    greedy: bool = False


@dataclass(frozen=True)
class Ask:
    """Answer an ended reply with a turn of the user's, and begin the next reply with one step.

    Where the turn does not fit the model's context, the node is a final candidate instead.
    """

    node: Node
    turn: Turn


@dataclass(frozen=True)
class Prune:
    """Drop `node` from the search."""

    node: Node


@dataclass(frozen=True)
class Complete:
    """Set `node` aside as a final candidate: its path has ended."""

    node: Node


@dataclass(frozen=True)
class Finish:
    """Stop searching; `reason` says why when there are fewer candidates than asked for."""

    reason: str | None = None


Action = Extend | Ask | Prune | Complete | Finish


class Strategy(Protocol):
    """Policy: what to extend, prune or finish in a tree whose round is complete.

    rng: this round's random stream, the same whenever this round of this problem is decided.
    turns, where it has them: what it answers ended replies with (`Ask`).
    """

    def select(self, tree: SearchTree, rng: Random) -> list[Action]: ...


@dataclass(frozen=True)
class Prospect:
    """What selection may do with a finished step: open so many children, or none.

    greedy: of the children. potential: those with a higher one are more likely to be opened.
    """

    node: Node
    children: int
    greedy: bool = False
    potential: float = 1.0


@runtime_checkable
class Foresees(Protocol):
    """A strategy that says what it may extend when the round is over.

    beams: of the round that is under way; candidates have their step, and some of them a score.
    ahead: speculative children that have their step. A wrong prospect costs time and changes
    nothing.
    """

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> Sequence[Prospect]: ...


@dataclass(frozen=True)
class KVDemand:
    """The KV that a round's beams need on the device. Segments are numbered, parents first.

    parent: per segment, the number of the segment before it on the path, or None for a root.
    segment_bytes: per segment, its device bytes (whole blocks).
    resident: per segment, how many copies of it the device holds now (at most one if shared).
    leaf: per beam, the number of the deepest segment that it reads; None for a beam without any.
    growth_bytes: per beam, what its step will write (whole blocks; expected where not exact).
    capacity_bytes: device bytes that one group may use: what is free now, or can be evicted.
    copy_per_beam: every beam of a group needs its own copy (the LBS paper's layout); otherwise a
        segment is held once for all beams under it.
    previous_need_bytes: what the round before needed in one group, growth included.
    """

    parent: Sequence[int | None]
    segment_bytes: Sequence[int]
    resident: Sequence[int]
    leaf: Sequence[int | None]
    growth_bytes: Sequence[int]
    capacity_bytes: int
    copy_per_beam: bool = False
    previous_need_bytes: int | None = None


@dataclass(frozen=True)
class ScheduleView:
    """What a schedule may look at: the open nodes of all trees in depth-first order.

    demand: their KV; None where there is one tier and nothing to decide. max_beams: how many the
    device has working memory for at present (LBS section 4.2, #Beam); None where it does not say.
    step_tokens: that the longest step will have; exact: and all of them, unless a path ends.
    """

    beams: tuple[Node, ...]
    demand: KVDemand | None = None
    max_beams: int | None = None
    step_tokens: int = 1
    exact: bool = False
    costs: PassCosts | None = None

    def limit(self, max_batch: int | None) -> int | None:
        """The most beams of a group: what the user allows and what the device can."""
        known = [limit for limit in (max_batch, self.max_beams) if limit is not None]
        return min(known, default=None)


@dataclass(frozen=True)
class Parking:
    """Rows without barriers and without blocks for all of their step: where none is left, the one
    that came last waits on the host with its tokens.

    most_rows: more at a time would be no faster. level_from: with so many steps left or fewer, the
    one that has the fewest tokens goes first, so that the last ones end together.
    """

    most_rows: int | None = None
    level_from: int = 0


@dataclass(frozen=True)
class Plan:
    """The order in which beams join the running batch, in groups.

    groups: with `--batching grouped` the next one begins when the one before it has ended.
    parking: rows park instead; None: what a row is expected to write is kept free for it.
    write_back: KV has to go to the host, because the tree outgrows the device.
    eager: it goes while it is decoded; otherwise shortly before its room is needed, so that most
        of what is pruned never goes.
    """

    groups: tuple[tuple[Node, ...], ...]
    write_back: bool = False
    eager: bool = False
    parking: Parking | None = None


class SchedulePolicy(Protocol):
    """Policy: arrange beams into groups. Changes the time, never the tree."""

    @property
    def name(self) -> str: ...
    def plan(self, view: ScheduleView) -> Plan: ...


class Answers(Protocol):
    """What a reply states, and when two replies state the same.

    read: its answer; None without one. key: the same text for equal answers. notes: what the
    verifier wrote about the reply last, by kind. about, where it has that: the way for one problem,
    by its text.
    """

    def read(self, text: str) -> str | None: ...

    def key(self, answer: str, notes: Mapping[str, str]) -> str: ...


class Verifier(Protocol):
    """Scores finished steps; keeps what it needs on the nodes (`node.handles['verifier']`).

    probabilities: every score lies between 0 and 1, whatever the step. What else holds of it, its
    `Traits` say.

    No node of a call is above another: what is above was scored in an earlier one, or is not
    (`engine.scoring.Judged`). With `Traits.takes_paths` some may be, and come first.
    """

    default_aggregate: str
    probabilities: bool

    def score(self, nodes: Sequence[Node]) -> list[float | None]: ...

    def release(self, nodes: Sequence[Node]) -> None: ...


# --- reporting -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundReport:
    """What a callback sees after every round of a tree.

    candidates: what the strategy judged; some waited since earlier rounds, and some may wait on.
    """

    tree: SearchTree
    round: int
    candidates: tuple[Node, ...]
    survivors: tuple[Node, ...]
    pruned: tuple[Node, ...]
    finished: tuple[Node, ...]
    elapsed_s: float


RoundCallback = Callable[[RoundReport], None]
