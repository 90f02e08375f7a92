"""RemoteStepWriter: decode the steps of open nodes on a remote server.

Each step is one request whose prompt is the step's path, so the server's prefix cache is hit.
Requests are sent in the schedule's order, and siblings share a request. Limits, stop reasons and
thoughts follow the same code as local steps (`engine.endings`). Tokens after the end of a step are
dropped. If a thinking budget ends a thought, this module adds the closing tokens, which become part
of the next prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from beamwright.counters import Counters, Progress
from beamwright.engine.endings import (
    StopFinder,
    begins_in_thought,
    cut_at_stop_string,
    delimiters,
    row_limit,
)
from beamwright.engine.row import DecodingSettings, Row, RowLimit, TreeDecodingSettings
from beamwright.errors import InputError, UnavailableError
from beamwright.kv.segments import Segment
from beamwright.protocols import Event, Plan, ScheduleView, StepDecoded, StepFailed, StepWriter
from beamwright.remote.dialects import Continuation, PromptRequest, Reply
from beamwright.schedule.declare import InGpuSchedule
from beamwright.tree import Node, StopReason

if TYPE_CHECKING:
    from beamwright.remote.generator import RemoteGenerator

# Number of tokens at the end of a prompt in which to find an empty thought of the chat template.
_TAIL = 32
# If the server read fewer prompt tokens than were sent, by at least this number and this share, it
# has truncated the prompt. Smaller differences can come from another tokenisation.
_FEWEST_CUT, _CUT_SHARE = 8, 0.1
_WAIT_S = 0.05  # seconds to wait for replies between checks of deadlines and cancellations


class RemoteSchedule(InGpuSchedule):
    """Schedule for a remote server: depth-first order, so that adjacent prompts share prefixes."""

    name = "served"


@dataclass(eq=False)
class _PendingRequest:
    """A request in flight, and the sibling nodes that share it. A cancelled sibling is None."""

    nodes: list[Node | None]
    limit: RowLimit

    @property
    def live_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node is not None]


@dataclass(eq=False)
class RemoteStepWriter(StepWriter):
    """Step writer that sends steps to a remote server and turns the replies into events.

    source: the client of the server's model.
    default: decoding settings for trees without their own.
    max_batch: maximum number of steps in flight; None: all, which the server then queues.
    """

    source: RemoteGenerator
    default: DecodingSettings
    max_batch: int | None = None
    progress: Progress = field(default_factory=Progress)
    counts: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.codec, self._context = self.source.codec, self.source.context
        self._decodings, self._marks = TreeDecodingSettings(self.default), self.codec.thoughts
        self._ends = StopFinder(self.codec)
        self._waiting: list[Node] = []
        self._running: dict[Node, _PendingRequest] = {}
        # True once the server has returned fewer texts than requested: request one text at a time.
        self._alone = False

    # --- requests ----------------------------------------------------------------------------

    @property
    def running_nodes(self) -> frozenset[Node]:
        """The nodes whose steps are in flight."""
        return frozenset(self._running)

    @property
    def busy(self) -> bool:
        """True if a step is in flight or waits to be sent."""
        return bool(self._running or self._waiting)

    def set_decoding(self, root: Node, decoding: DecodingSettings) -> None:
        """Set the decoding settings of the tree of `root`, until `root` is released.

        Raises:
            InputError: for `top_logprobs`, which servers return without ids, and for a thinking
                budget if the server does not show where thoughts end.
        """
        marks, thinking = self._marks, decoding.step.thinking
        unseen = marks is not None and not self.codec.special_ids.isdisjoint(marks.end)
        if unseen and not self.source.token_ids and thinking not in ("auto", "off"):
            said = "the server returns no token ids, so the end of a thought is not visible"
            raise InputError(f"--thinking {thinking}: {said}")
        if decoding.sampling.top_logprobs:
            raise InputError("top_logprobs: not available with a remote generator")
        self._decodings.set(root, decoding)

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """Return a view without KV, which the server manages."""
        return ScheduleView(beams)

    def submit(self, plan: Plan) -> None:
        """Replace the waiting steps by those of a new plan; requests in flight continue."""
        nodes = (node for group in plan.groups for node in group)
        self._waiting = [node for node in nodes if node not in self._running]

    def cancel(self, nodes: Iterable[Node]) -> None:
        """Cancel the steps of these nodes."""
        gone = set(nodes)
        self._waiting = [node for node in self._waiting if node not in gone]
        self.release(gone)

    def release(self, nodes: Iterable[Node]) -> None:
        """Drop all state of these nodes, and cancel each request whose nodes are all dropped."""
        for node in nodes:
            self._decodings.discard(node)
            if (request := self._running.pop(node, None)) is not None:
                request.nodes[request.nodes.index(node)] = None
                if not request.live_nodes:
                    self.source.cancel(request)

    def abort(self) -> None:
        """Cancel all steps in flight and all waiting steps."""
        self.cancel([*self._running, *self._waiting])

    # --- replies -----------------------------------------------------------------------------

    def iterate(self) -> list[Event]:
        """Send requests for the waiting steps and wait briefly for replies."""
        self._ask()
        if not self._running:
            return []
        number = next(iter(self._running)).round
        self.progress.doing(f"round {number}: waiting for {len(self._running)} steps")
        events: list[Event] = []
        for reply in self.source.wait(_WAIT_S):
            counts, request = self.counts, reply.key
            assert isinstance(request, _PendingRequest)
            counts.iterations += 1
            counts.requests += reply.tries
            counts.retries += reply.tries - 1
            if reply.error is None:
                _record_truncation(request, reply)
                counts.prompt_tokens += reply.prompt_tokens or 0
                counts.cached_tokens += reply.cached_tokens or 0
                counts.untold_prompts += reply.prompt_tokens is None
                counts.untold_cached += reply.cached_tokens is None
            events += self._reply_events(request, reply)
        return events

    def _ask(self) -> None:
        while self._waiting:
            nodes = self._siblings()
            running = len(self._running)
            if self.max_batch and running and running + len(nodes) > self.max_batch:
                return
            row = self._row(nodes[0])
            tokens, closing = row.limit.tokens, self._ends.find_closing(row)
            if closing is not None:
                tokens = min(tokens, closing.at - nodes[0].start)
            request = _PendingRequest([*nodes], RowLimit(max(1, tokens), row.limit.reason))
            self._running.update(dict.fromkeys(nodes, request))
            self._waiting = [node for node in self._waiting if node not in self._running]
            self.counts.groups += 1
            self.counts.admitted += len(nodes)
            self.source.send(request, self._prompt(row, len(nodes), request.limit.tokens))

    def _siblings(self) -> list[Node]:
        """Return the first waiting node and its siblings of the same round, for one request.

        No other steps share the request, so its seed depends on these nodes only.
        """
        first = self._waiting[0]
        greedy = first.greedy or not self._decodings.of(first).sampling.temperature
        if self._alone or greedy:  # servers refuse to generate several greedy texts
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

    def _reply_events(self, request: _PendingRequest, reply: Reply) -> list[Event]:
        """Convert a reply to events. Missing texts are requested again, one by one."""
        for node in request.live_nodes:
            del self._running[node]
        error = reply.error or (
            None
            if reply.written
            else UnavailableError("the server returned no text; read its log, or try again")
        )
        if error is not None:
            return [StepFailed(node, error) for node in request.live_nodes]
        missing = [node for node in request.nodes[len(reply.written) :] if node is not None]
        if missing:
            self._alone = True
            self._waiting = [*missing, *self._waiting]
        events: list[Event] = []
        for owner, written in zip(request.nodes, reply.written, strict=False):
            if owner is None:
                self.counts.row_tokens += len(written.token_ids or ())
                continue
            step = self._build_step(owner, written, request.limit)
            events.append(step)
            if isinstance(step, StepDecoded):
                self.counts.row_tokens += len(step.token_ids)
                self.progress.wrote(len(step.token_ids))
        return events

    def _build_step(
        self, node: Node, written: Continuation, limit: RowLimit
    ) -> StepDecoded | StepFailed:
        """Convert a text to a decoded step, token by token, with local stop rules."""

        def add(token: int) -> None:
            row.stop = self._ends.find_reason(row, [token])
            row.tokens.append(token)

        if (failed := self._check_text(node, written, limit)) is not None:
            return failed
        ids, row, closing = self._token_ids_of(written), self._row(node), None
        if begins_in_thought(node, self._marks) is None:
            step = row.decoding.step
            row.thought, row.limit_outside_thought = None, row_limit(node, step, self._context)
            row.first_limit = row_limit(node, step, self._context, thought=True)
        if written.token_ids is None:  # a text tokenised here may be longer than on the server
            row.first_limit = RowLimit(max(len(ids), row.limit.tokens), row.limit.reason)
        for token in ids:
            closing = closing or self._ends.find_closing(row)
            if row.stop is not None or (closing and node.start + len(row.tokens) >= closing.at):
                break
            add(token)
        drawn, closing = len(row.tokens), closing or self._ends.find_closing(row)
        node.usage["overrun"] += len(ids) - drawn
        if closing is not None and row.stop is None and node.start + drawn >= closing.at:
            for token in closing.ids:  # the closing message may itself contain a stop string
                add(token)
                if row.stop is StopReason.THOUGHT_END or (row.stop and row.stop.ends_path):
                    break
        cut = limit.reason if self._marks is None else StopReason.STEP_LIMIT
        ended = {"eos": StopReason.EOS, "stop": StopReason.DELIMITER}
        row.stop = row.stop or ended.get(written.ended, cut)
        # Without token ids, numbers of tokens and of log-probabilities may differ, so keep all
        # log-probabilities of a complete text.
        whole = drawn == len(ids)
        row.logprobs = [*written.logprobs[: None if whole else drawn]]
        return row.make_event(self._text(row, written, whole=whole))

    def _token_ids_of(self, written: Continuation) -> tuple[int, ...]:
        """Return the text's tokens, including the end token if it ended the text."""
        ids, marks, eos = written.token_ids, self._marks, self.codec.eos_ids
        ids = tuple(self.codec.encode(written.text)) if ids is None else ids
        closed = marks is not None and ids[-len(marks.end) :] == marks.end
        at_end = written.ended == "eos" and not closed and eos.isdisjoint(ids[-1:])
        return (*ids, *sorted(eos)[:1]) if at_end else ids

    def _text(self, row: Row, written: Continuation, *, whole: bool) -> str:
        """Return the reply's text so far; the server's own text if it returned no token ids."""
        above, text = row.node.parent, self.codec.reply_text(row.reply_ids())
        if written.token_ids is None and self._marks is None and whole and above is not None:
            text = above.text + written.text
        if row.stop is StopReason.STOP_STRING:
            return cut_at_stop_string(text, row.node, row.decoding.step.stop_strings)
        return text

    def _check_text(self, node: Node, written: Continuation, limit: RowLimit) -> StepFailed | None:
        """Check a text's length and tokens; return the step's failure, or None if it is valid."""
        token_ids, most = written.token_ids, limit.tokens
        if token_ids is None:
            most *= 2  # a text tokenised here may have more tokens than on the server
        count = self.codec.count_tokens(written.text, most) if token_ids is None else len(token_ids)
        if max(count, len(written.logprobs)) > most:
            said = f"the generator wrote more than the {limit.tokens} tokens requested"
            return StepFailed(node, InputError(said))
        if not all(0 <= token < self.codec.vocab_size for token in token_ids or ()):
            said = "the generator returned token ids that --tokenizer does not have"
            return StepFailed(node, UnavailableError(said))
        return None

    # --- thoughts ----------------------------------------------------------------------------

    def _row(self, node: Node) -> Row:
        """Build the row (decoding state) of a step, which tracks its limits and stops.

        If the step's first tokens decide whether the step is a thought, assume that it is, unless
        the prompt has closed the thought or `--thinking off` is set.
        """
        decoding, marks = self._decodings.of(node), self._marks
        begins = begins_in_thought(node, marks)
        if begins is None and marks is not None:
            shown = self.codec.decode_raw(node.replies_to.token_ids[-_TAIL:]).rstrip()
            begins = decoding.step.thinking != "off" and not shown.endswith(marks.family.end)
        limit = row_limit(node, decoding.step, self._context, thought=bool(begins))
        return Row(node, Segment(), decoding, limit, thought=begins)


def _record_truncation(request: _PendingRequest, reply: Reply) -> None:
    """Record in the node's `usage` how many prompt tokens a truncating server did not read.

    A few missing tokens are ignored, because the server may tokenise the text into longer tokens.
    Cached tokens are added, because some servers count only uncached tokens as prompt tokens.
    """
    read = (reply.prompt_tokens or 0) + (reply.cached_tokens or 0)
    for node in request.live_nodes[:1] if read else ():
        unread = node.start - read
        if unread > max(_FEWEST_CUT, node.start * _CUT_SHARE):
            node.usage["prompt_unread"] = unread
