"""JudgeVerifier: a chat model writes a critique of a path; the score is read from what it wrote.

Critiques are asides (`engine.asides`) behind prompts of their own: one takes many times as long as
reading the path again. What is prompt is data (`spec.JudgeSpec`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from beamwright.engine.asides import Aside, AsideWriter
from beamwright.engine.noise import lineage_key
from beamwright.errors import InputError
from beamwright.models.load import LoadedModel
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tokenizer import PLACE
from beamwright.models.tree_model import TreeModel
from beamwright.protocols import Traits
from beamwright.tree import Node
from beamwright.verify.prm import token_id
from beamwright.verify.spec import JudgeSpec

_NOTE = "critique"


@dataclass(eq=False, kw_only=True)
class _Critique(Aside):
    """A critique under way; `given` is its prompt.

    asked: the prompt's text. stops: see `JudgeSpec`; of this step. number: the step's. sample: its
    own, among the step's.
    """

    asked: str
    stops: tuple[str, ...]
    number: int
    sample: int


class JudgeVerifier:
    """Scores steps by what a chat model writes about them; the text is in `node.notes`.

    Steps that are empty leave no trace in a prompt. end_ids: tokens that end the judge's turn.

    Raises:
        InputError: if the checkpoint has no chat template, or it cannot write such a prompt.
    """

    probabilities = True

    def __init__(
        self, spec: JudgeSpec, model: LoadedModel, tree_model: TreeModel, name: str = "judge"
    ) -> None:
        if model.codec is None:
            raise ValueError("a judge needs a tokenizer")
        self.spec, self.name = spec, name
        self.default_aggregate: str = spec.aggregate
        each_step = spec.turns == "each_step"
        self.traits = Traits(beside_decoding=True, answers_each_step=each_step, sees=spec.sees)
        self.tree_model = tree_model
        self._codec = codec = model.codec
        if codec.chat_template is None:
            raise InputError(
                f"--verifier {name}: a judge needs a chat template; its tokenizer has none"
            )
        if PLACE not in self._prompt("", [PLACE], []):
            raise InputError(f"--verifier {name}: its chat template leaves the user's turn out")
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACE}]
        _, place, behind = self._render(turns).rpartition(PLACE)
        first = codec.encode(behind.lstrip())[:1] if place else []
        self.end_ids = codec.eos_ids | (codec.special_ids & frozenset(first))
        num_tokens = min(tree_model.decoder.shape.vocab, codec.vocab_size)
        who = f"verifier {name}"
        self._writer = AsideWriter(tree_model, num_tokens, who, spec.sampling)
        words = () if spec.suffix is None else (spec.bad, spec.good)
        self._pair = [token_id(word, model) for word in words]
        self._most_behind = len(codec.encode(spec.suffix or ""))  # tokens that it may take

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """A score per step.

        None for an empty step, one beyond the judge's context, and where no critique has a score:
        without a suffix one that is cut off or states none in range, counted as "judge_unparsed" in
        `node.usage`.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold one prompt and its critique.
        """
        alike: dict[object, list[_Critique]] = {}
        for row in (row for node in nodes for row in self._rows(node)):
            drawn = (row.node, row.sample) if self.spec.sampling.temperature else None
            alike.setdefault((row.asked, row.number, drawn), []).append(row)
        firsts = {rows[0]: rows for rows in alike.values()}
        scores: dict[Node, list[float]] = {node: [] for node in nodes}
        left = [*firsts]
        while left:  # as many as the budget holds with critiques of full length
            # A single one that does not fit takes block by block: it may be short.
            batch = left[: max(1, len(self._writer.that_fit(left)))]
            left = left[len(batch) :]
            self._writer.write(batch)
            for first in batch:
                text, score = self._read(first)
                for row in firsts[first]:
                    row.node.notes[f"{_NOTE} {row.sample + 1}" if row.sample else _NOTE] = text
                    row.node.usage["judge_unparsed"] += score is None
                    scores[row.node] += [] if score is None else [score]
        return [sum(found) / len(found) if (found := scores[node]) else None for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""

    def _rows(self, node: Node) -> list[_Critique]:
        """The critiques to be written about a step; none where there is no room for one."""
        seen = [step for step in node.reply() if step.seen(self.spec.sees)]
        path = [(step, text) for step in seen if (text := self._stripped(step))]
        ended_only = self.spec.scores == "ended_paths"
        if not (path and node.ended if ended_only else self._stripped(node)):
            return []
        said = [step.notes.get(_NOTE, "") for step, _ in path[:-1]]
        texts = [text for _, text in path]
        asked = self._prompt(node.root.problem_text, texts, said, node.root.now)
        prompt = self._codec.encode(asked)
        room = self.tree_model.decoder.shape.context - len(prompt) - self._most_behind
        stops = tuple(s.replace("{next}", str(len(path) + 1)) for s in self.spec.stops)
        limit = min(self.spec.max_tokens, room)
        samples = range(self.spec.samples if room > 0 else 0)
        return [
            _Critique(
                node=node,
                given=prompt,
                limit=limit,
                ends=partial(self._ends, stops),
                stream=lineage_key(self.spec.seed, node.lineage, f"critique {each}"),
                asked=asked,
                stops=stops,
                number=len(path),
                sample=each,
            )
            for each in samples
        ]

    def _stripped(self, node: Node) -> str:
        """A step's text without what only delimits it, or is to be left out."""
        return re.sub(self.spec.drop, "", node.step_text).lstrip("\n").rstrip()

    def _prompt(
        self, problem: str, texts: Sequence[str], said: Sequence[str], now: str | None = None
    ) -> str:
        """The conversation up to the critique. said: about the steps before, if those are turns."""
        step, numbered = self.spec.step, enumerate(texts, start=1)
        steps = [step.replace("{number}", str(n)).replace("{step}", text) for n, text in numbered]
        first = 1 if self.spec.turns == "each_step" else len(steps)
        before, _, rest = self.spec.prompt.partition(
            "{problem}"
        )  # neither is looked into for names
        between, _, after = rest.partition("{steps}")
        asked = f"{before}{problem}{between}{''.join(steps[:first])}{after}"
        turns = [{"role": "user", "content": asked}]
        for critique, asked in zip(said, steps[first:], strict=False):
            turns.append({"role": "assistant", "content": critique})
            turns.append({"role": "user", "content": asked})
        opening = self.spec.opening.replace("{number}", str(len(steps)))
        return self._render(turns, now, add_generation_prompt=True) + opening

    def _render(self, turns: list[dict[str, str]], now: str | None = None, **told: bool) -> str:
        if self.spec.system is not None:
            turns = [{"role": "system", "content": self.spec.system}, *turns]
        return self._codec.chat(turns, f"--verifier {self.name}", **told, given={"now": now})

    def _read(self, row: _Critique) -> tuple[str, float | None]:
        """What the judge said, with what was put into its mouth, and the critique's score."""
        text, usage = self._codec.decode(row.token_ids), row.node.usage
        ends = [at for stop in row.stops if (at := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
        usage["verifier_prefilled"] += len(row.given)
        usage["verifier_generated"] += len(row.token_ids)
        if self.spec.suffix is None:
            text = text.strip()
            return text, self.spec.read_score(text) if row.ended else None
        score = self._weigh(row, row.asked + text + self.spec.suffix)
        word = self._codec.decode_raw([self._pair[(score or 0.0) >= 0.5]])
        opening = self.spec.opening.replace("{number}", str(row.number))
        return f"{opening}{text}{self.spec.suffix}{word}{self.spec.closing}", score

    def _weigh(self, row: _Critique, text: str) -> float | None:
        """How likely the good token is against the bad one behind a text, which is read anew.

        So its tokens are those of the whole, as published: a suffix may merge with what it follows.
        """
        token_ids = self._codec.encode(text)
        if len(token_ids) > self.tree_model.decoder.shape.context:
            return None
        row.node.usage["verifier_prefilled"] += len(token_ids)
        store, last = self.tree_model.store, (len(token_ids) - 1,)
        segment = store.create()
        try:
            (hidden,) = self.tree_model.prefill([PrefillRequest((), segment, token_ids, 0, last)])
        finally:
            store.free(segment)
        _, good = self.tree_model.decoder.logits(hidden)[0, self._pair].softmax(-1).tolist()
        return float(good)

    def _ends(self, stops: Sequence[str], token_ids: Sequence[int]) -> bool:
        """True if the newest token ends the turn, or the newest ones hold a stop; each adds a byte
        at least."""
        if token_ids[-1] in self.end_ids:
            return True
        most = max((len(stop.encode()) for stop in stops), default=0)
        text = self._codec.decode(token_ids[-most:]) if most else ""
        return any(stop in text for stop in stops)
