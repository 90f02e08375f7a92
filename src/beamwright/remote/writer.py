"""RemoteSteps: steps that a generator elsewhere writes. A `StepWriter`, as the running batch is.

Every step is a prompt of its own, the path above it, so that what the server keeps of earlier
prompts is hit by its next ones: the order is the schedule's, siblings are one question, and nothing
of a path is ever rendered again. Limits, reasons to stop and counts are those of steps written here
(`engine.endings`). The same finds thoughts in what comes back: tokens behind the end of a step are
dropped, and a thought that its budget ends is closed here, for the next prompt holds its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from beamwright.counters import Counters, Progress
from beamwright.engine.endings import (
    StopFinder,
    begins_thought,
    delimiters,
    row_limit,
    text_stopped,
)
from beamwright.engine.row import Decoding, Decodings, Row, RowLimit
from beamwright.errors import InputError, UnavailableError
from beamwright.kv.segments import Segment
from beamwright.protocols import Event, Plan, ScheduleView, StepDecoded, StepFailed, StepWriter
from beamwright.remote.dialects import Continuation, PromptRequest, Reply
from beamwright.schedule.declare import InGpuSchedule
from beamwright.tree import Node, StopReason

if TYPE_CHECKING:
    from beamwright.remote.generator import RemoteGenerator

_TAIL = 32  # tokens at a prompt's end, where a template may have closed an empty thought
_FEWEST_CUT, _CUT_SHARE = 8, 0.1  # tokens of a prompt whose loss is no other tokenisation
_WAIT_S = 0.05
"""Without a reply for so long, the loop checks deadlines and cancellations."""


class ServedSchedule(InGpuSchedule):
    """All beams in depth-first order, so that a prompt follows the one it shares most with."""

    name = "served"


@dataclass(eq=False)
class _Question:
    """Siblings that are written together; cancelled ones are None."""

    nodes: list[Node | None]
    limit: RowLimit

    @property
    def wanted(self) -> list[Node]:
        return [node for node in self.nodes if node is not None]


@dataclass(eq=False)
class RemoteSteps(StepWriter):
    """default: how steps are drawn where a tree has no settings of its own. max_batch: most steps
    at a time; None: all of them, and the server has them wait.
    """

    source: RemoteGenerator
    default: Decoding
    max_batch: int | None = None
    progress: Progress = field(default_factory=Progress)
    counts: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.codec, self._context = self.source.codec, self.source.context
        self._decodings, self._marks = Decodings(self.default), self.codec.thoughts
        self._ends = StopFinder(self.codec)
        self._waiting: list[Node] = []
        self._running: dict[Node, _Question] = {}
        self._alone = False  # this server does not give several texts for one prompt

    # --- what is to be written ---------------------------------------------------------------

    @property
    def running_nodes(self) -> frozenset[Node]:
        """Nodes whose steps are under way."""
        return frozenset(self._running)

    @property
    def busy(self) -> bool:
        """True if a step runs or waits."""
        return bool(self._running or self._waiting)

    def decode_as(self, root: Node, decoding: Decoding) -> None:
        """Give the tree of this root settings of its own, until its root is released.

        Raises:
            InputError: for likeliest tokens beside each, whose ids nobody says, and for budgets of
                thoughts whose ends nobody shows.
        """
        marks, thinking = self._marks, decoding.step.thinking
        unseen = marks is not None and not self.codec.special_ids.isdisjoint(marks.end)
        if unseen and not self.source.token_ids and thinking not in ("auto", "off"):
            said = "a server that returns no token ids does not show where thoughts end"
            raise InputError(f"--thinking {thinking}: {said}")
        if decoding.sampling.top_logprobs:
            raise InputError("top_logprobs: a generator elsewhere does not say them")
        self._decodings.set(root, decoding)

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """Return a view without KV, which the server manages."""
        return ScheduleView(beams)

    def submit(self, plan: Plan) -> None:
        """Replace the waiting steps; those that were asked for go on."""
        nodes = (node for group in plan.groups for node in group)
        self._waiting = [node for node in nodes if node not in self._running]

    def cancel(self, nodes: Iterable[Node]) -> None:
        """Cancel the steps of these nodes."""
        gone = set(nodes)
        self._waiting = [node for node in self._waiting if node not in gone]
        self.release(gone)

    def release(self, nodes: Iterable[Node]) -> None:
        """Forget these nodes; a question without any left is cancelled."""
        for node in nodes:
            self._decodings.forget(node)
            if (question := self._running.pop(node, None)) is not None:
                question.nodes[question.nodes.index(node)] = None
                if not question.wanted:
                    self.source.cancel(question)

    def abort(self) -> None:
        """Cancel everything that runs or waits."""
        self.cancel([*self._running, *self._waiting])

    # --- what is written ---------------------------------------------------------------------

    def iterate(self) -> list[Event]:
        """Ask for the waiting steps, and wait a moment for replies."""
        self._ask()
        if not self._running:
            return []
        number = next(iter(self._running)).round
        self.progress.doing(f"round {number}: {len(self._running)} steps are written elsewhere")
        events: list[Event] = []
        for reply in self.source.wait(_WAIT_S):
            counts, question = self.counts, reply.key
            assert isinstance(question, _Question)
            counts.iterations += 1
            counts.requests += reply.tries
            counts.retries += reply.tries - 1
            if reply.error is None:
                _note_cut(question, reply)
                counts.prompt_tokens += reply.prompt_tokens or 0
                counts.cached_tokens += reply.cached_tokens or 0
                counts.untold_prompts += reply.prompt_tokens is None
                counts.untold_cached += reply.cached_tokens is None
            events += self._settled(question, reply)
        return events

    def _ask(self) -> None:
        while self._waiting:
            nodes = self._siblings()
            running = len(self._running)
            if self.max_batch and running and running + len(nodes) > self.max_batch:
                return
            row = self._row(nodes[0])
            tokens, closing = row.limit.tokens, self._ends.closing(row)
            if closing is not None:
                tokens = min(tokens, closing.at - nodes[0].start)
            question = _Question([*nodes], RowLimit(max(1, tokens), row.limit.reason))
            self._running.update(dict.fromkeys(nodes, question))
            self._waiting = [node for node in self._waiting if node not in self._running]
            self.counts.groups += 1
            self.counts.admitted += len(nodes)
            self.source.ask(question, self._prompt(row, len(nodes), question.limit.tokens))

    def _siblings(self) -> list[Node]:
        """Take the first waiting step with all siblings opened with it, so that their seeds do not
        depend on other steps."""
        first = self._waiting[0]
        greedy = first.greedy or not self._decodings.of(first).sampling.temperature
        if self._alone or greedy:  # the likeliest text is asked for once: servers refuse more
            return [first]
        kind = (first.parent, first.round, first.greedy)
        siblings = [n for n in self._waiting if (n.parent, n.round, n.greedy) == kind]
        siblings.sort(key=lambda node: node.lineage[-1])
        limits = [size for size in (self.source.most, self.max_batch) if size is not None]
        return siblings[: min(limits, default=len(siblings))]

    def _prompt(self, row: Row, count: int, max_tokens: int) -> PromptRequest:
        node, step, sampling = row.node, row.decoding.step, row.decoding.sampling
        parent, marks, thinks, (high, low) = node.parent, self._marks, bool(row.thought), row.key
        assert parent is not None
        path = parent.path_token_ids()
        if node.greedy:
            sampling = sampling.model_copy(update={"temperature": 0.0})
        cuts = [text.decode() for text in delimiters(step, thought=thinks)]
        if marks is not None and thinks and self.codec.special_ids.isdisjoint(marks.end):
            cuts = [marks.family.end, *cuts]
        if not thinks or node.root.raw:
            cuts += step.stop_strings
        return PromptRequest(
            token_ids=tuple(path),
            text=lambda: (
                self.codec.decode_raw(path[: node.replies_to.end]) + parent.text
                if marks is None
                else self.codec.decode_raw(path)
            ),
            count=count,
            seed=(high ^ low) & 0x7FFFFFFF,
            max_tokens=max_tokens,
            sampling=sampling,
            stops=tuple(cuts),
            ignore_eos=step.ignore_eos,
        )

    def _settled(self, question: _Question, reply: Reply) -> list[Event]:
        """Turn a reply into events of its steps. Missing texts are asked for again, one by one."""
        for node in question.wanted:
            del self._running[node]
        error = reply.error or (None if reply.written else UnavailableError("nothing was written"))
        if error is not None:
            return [StepFailed(node, error) for node in question.wanted]
        missing = [node for node in question.nodes[len(reply.written) :] if node is not None]
        if missing:
            self._alone = True
            self._waiting = [*missing, *self._waiting]
        events: list[Event] = []
        for owner, written in zip(question.nodes, reply.written, strict=False):
            if owner is None:
                self.counts.row_tokens += len(written.token_ids or ())
                continue
            step = self._step(owner, written, question.limit)
            events.append(step)
            if isinstance(step, StepDecoded):
                self.counts.row_tokens += len(step.token_ids)
                self.progress.wrote(len(step.token_ids))
        return events

    def _step(self, node: Node, written: Continuation, limit: RowLimit) -> StepDecoded | StepFailed:
        """Cut a step from a text, token by token, as if it had been drawn here."""

        def add(token: int) -> None:
            row.stop = self._ends.reason(row, [token])
            row.tokens.append(token)

        if (failed := self._failed(node, written, limit)) is not None:
            return failed
        ids, row, closing = self._ids(written), self._row(node), None
        if begins_thought(node, self._marks) is None:
            step = row.decoding.step
            row.thought, row.otherwise = None, row_limit(node, step, self._context)
            row.first_limit = row_limit(node, step, self._context, thought=True)
        if written.token_ids is None:  # it may be more tokens here than it was drawn as
            row.first_limit = RowLimit(max(len(ids), row.limit.tokens), row.limit.reason)
        for token in ids:
            closing = closing or self._ends.closing(row)
            if row.stop is not None or (closing and node.start + len(row.tokens) >= closing.at):
                break
            add(token)
        drawn, closing = len(row.tokens), closing or self._ends.closing(row)
        node.usage["overrun"] += len(ids) - drawn
        if closing is not None and row.stop is None and node.start + drawn >= closing.at:
            for token in closing.ids:  # whatever its message holds
                add(token)
                if row.stop is StopReason.THOUGHT_END or (row.stop and row.stop.ends_path):
                    break
        cut = limit.reason if self._marks is None else StopReason.STEP_LIMIT
        ended = {"eos": StopReason.EOS, "stop": StopReason.DELIMITER}
        row.stop = row.stop or ended.get(written.ended, cut)
        whole = drawn == len(ids)  # of a text, it was drawn as other tokens than it is here
        row.logprobs = [*written.logprobs[: None if whole else drawn]]
        return row.decoded(self._text(row, written, whole=whole))

    def _ids(self, written: Continuation) -> tuple[int, ...]:
        """Return the tokens, with the one that ended the text."""
        ids, marks, eos = written.token_ids, self._marks, self.codec.eos_ids
        ids = tuple(self.codec.encode(written.text)) if ids is None else ids
        closed = marks is not None and ids[-len(marks.end) :] == marks.end
        at_end = written.ended == "eos" and not closed and eos.isdisjoint(ids[-1:])
        return (*ids, *sorted(eos)[:1]) if at_end else ids

    def _text(self, row: Row, written: Continuation, *, whole: bool) -> str:
        """Return the text of the reply so far; as written, where no token ids are known."""
        above, text = row.node.parent, self.codec.reply_text(row.reply_ids())
        if written.token_ids is None and self._marks is None and whole and above is not None:
            text = above.text + written.text
        if row.stop is StopReason.STOP_STRING:
            return text_stopped(text, row.node, row.decoding.step.stop_strings)
        return text

    def _failed(self, node: Node, written: Continuation, limit: RowLimit) -> StepFailed | None:
        """Check a text; returns its failure, if any."""
        token_ids, most = written.token_ids, limit.tokens
        if token_ids is None:
            most *= 2  # a text may be other tokens here than it was drawn as
        count = self.codec.count_tokens(written.text, most) if token_ids is None else len(token_ids)
        if max(count, len(written.logprobs)) > most:
            said = f"the generator writes more than the {limit.tokens} tokens asked"
            return StepFailed(node, InputError(said))
        if not all(0 <= token < self.codec.vocab_size for token in token_ids or ()):
            said = "the generator draws tokens that are unknown here"
            return StepFailed(node, UnavailableError(said))
        return None

    # --- thoughts ----------------------------------------------------------------------------

    def _row(self, node: Node) -> Row:
        """Make the row of a step that is asked for. Where only its first tokens tell whether it
        thinks, assume so, unless the prompt or `--thinking off` speaks against it."""
        decoding, marks = self._decodings.of(node), self._marks
        begins = begins_thought(node, marks)
        if begins is None and marks is not None:
            shown = self.codec.decode_raw(node.replies_to.token_ids[-_TAIL:]).rstrip()
            begins = decoding.step.thinking != "off" and not shown.endswith(marks.family.end)
        limit = row_limit(node, decoding.step, self._context, thought=bool(begins))
        return Row(node, Segment(), decoding, limit, thought=begins)


def _note_cut(question: _Question, reply: Reply) -> None:
    """Note tokens of the prompt that the server says it has not read: it cuts prompts.

    A few may be missing: the server tokenises a text again, in longer tokens. Some leave out those
    that were cached.
    """
    read = (reply.prompt_tokens or 0) + (reply.cached_tokens or 0)
    for node in question.wanted[:1] if read else ():
        unread = node.start - read
        if unread > max(_FEWEST_CUT, node.start * _CUT_SHARE):
            node.usage["prompt_unread"] = unread
