"""Probing: what unended paths answer so far, and which of them need not go on (Dynasor).

Every so many tokens a path is asked what it would answer now, in an aside that nobody keeps
(`Probe`). A path whose last answers agree ends with that one; where enough paths agree all do, so
that the search ends (certaindex); of those that repeat one the best goes on (DeepPrune). What is
asked, and what follows, is a function of the paths alone. Knows text and ids; no models, no KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from beamwright.engine.decisions import read_answer
from beamwright.errors import InputError
from beamwright.models.tokenizer import TextCodec
from beamwright.protocols import Action, Answers, Conclude, Extend, Probe, Prune
from beamwright.search import strategy_row
from beamwright.search.rounds import latest_probed, latest_votes, repeats, standing
from beamwright.sections import SearchSettings, StopSettings
from beamwright.tree import Node, NodeState, SearchTree, StopReason


class Probing:
    """Asks the paths of one tree. way: how answers are read. context: most tokens of a path.

    Raises:
        InputError: if the model has no tokenizer, or the probe's text no tokens.
    """

    def __init__(
        self,
        search: SearchSettings,
        stop: StopSettings,
        way: Answers,
        codec: TextCodec | None,
        context: int,
    ) -> None:
        if codec is None:
            raise InputError("--probe-every: the generator has no tokenizer")
        text = search.probe_text
        self._search, self._share, self._way = search, stop.stop_probes, way
        self._codec, self._context, self._every = codec, context, search.probe_every or 1
        self._open, self._ids = text.count("{") - text.count("}"), tuple(codec.encode(text))
        self._competes, marks = strategy_row(search).competes, codec.thoughts
        self._close: tuple[int, ...] = ()
        if marks is not None:  # a reply's header may follow a thought's end
            self._close = (*marks.end, *codec.encode("".join(marks.family.headers)))

    # --- what is asked -----------------------------------------------------------------------

    def probe(self, node: Node) -> Probe | None:
        """What a path is asked behind a step of its own; None where it is not its time.

        That is behind the first step that completes another `--probe-every` tokens of its reply, as
        long as that thinks, or is no thinking model's.
        """
        waits = node.state is NodeState.CANDIDATE and not node.ended and not node.greedy
        if not waits or not node.answers or node.probe is not None:
            return None
        begin = node.replies_to.end
        asked = (node.start - begin) // self._every
        if asked == (node.end - begin) // self._every:
            return None
        if not node.thinking and any(step.thought for step in node.reply()):
            return None  # it is about to answer by itself
        given = self._given(node)
        limit = min(self._search.probe_tokens, self._context - node.end - len(given))
        return Probe(node, given, limit, self._ends) if limit > 0 else None

    def _given(self, node: Node) -> tuple[int, ...]:
        """What is read behind a step: inside a thought, what ends that comes first."""
        return (*self._close, *self._ids) if node.thinking else self._ids

    def _ends(self, token_ids: Sequence[int]) -> bool:
        """True where the reply ends, or the brace is closed that the probe has opened."""
        if token_ids[-1] in self._codec.eos_ids:
            return True
        depth = self._open
        for letter in self._codec.decode(token_ids) if depth > 0 else "":
            depth += (letter == "{") - (letter == "}")
            if depth <= 0:
                return True
        return False

    def note(self, node: Node, token_ids: Sequence[int]) -> None:
        """Write on a node what it was asked, and what it says."""
        node.probe = (*self._given(node), *token_ids)
        said = self._text(node, node.probe)[len(node.text) :]
        node.answer, node.vote = read_answer(self._way, said, node)

    def _text(self, node: Node, probe: Sequence[int]) -> str:
        """The reply's text with a probe behind it."""
        reply_ids = node.path_token_ids()[node.replies_to.end :]
        return self._codec.reply_text([*reply_ids, *probe])

    # --- what follows ------------------------------------------------------------------------

    def applied(self, tree: SearchTree, actions: Sequence[Action]) -> list[Action]:
        """These actions, where a path that need not go on ends with its latest answer instead."""
        going = [
            action.node
            for action in actions
            if isinstance(action, Extend) and action.node.state is NodeState.CANDIDATE
            if not action.greedy and self._may_end(action.node)
        ]
        ending = set(going)
        if not self._agree(tree, actions):
            window = self._search.certainty_window
            ending = {node for node in going if standing(node, window) is not None}
            if self._search.prune_repeats and not self._competes:
                ending.update(repeats((n for n in going if n not in ending), window))
        return [
            Conclude(action.node)
            if isinstance(action, Extend) and action.node in ending
            else action
            for action in actions
        ]

    @staticmethod
    def _may_end(node: Node) -> bool:
        """True if there is an answer that was given where the path still is: thinking, or not."""
        asked = latest_probed(node)
        return asked is not None and asked.vote is not None and asked.thinking == node.thinking

    def _agree(self, tree: SearchTree, actions: Iterable[Action]) -> bool:
        """True if so large a share of the paths' last answers, a certainty window of each, is one;
        a path that has ended says the same for all of it."""
        if self._share is None:
            return False
        out = {action.node for action in actions if isinstance(action, Prune)}
        paths = [n for n in (*tree.finished(), *tree.candidates()) if n.answers and n not in out]
        said, window = Counter[str | None](), self._search.certainty_window
        for path in paths:
            said.update([path.vote] * window if path.ended else latest_votes(path, window))
        del said[None]
        return bool(said) and max(said.values()) >= self._share * window * len(paths) - 1e-9

    def conclude(self, tree: SearchTree, node: Node) -> Node:
        """Let what a path said when it was asked be its last step."""
        asked = latest_probed(node)
        assert asked is not None
        assert asked.probe is not None
        tree.keep(node)
        (last,) = tree.expand(node, 1)
        tree.commit(last, asked.probe, (), StopReason.PROBE, self._text(node, asked.probe))
        last.answer, last.vote = asked.answer, asked.vote
        return last
