"""Verifier with a judge: a chat model writes a critique of a path that states the path's score.

Critiques are generated outside the tree (`engine.asides`). The prompt of each critique is prefilled
as a whole, which costs little compared with generating the critique. The prompt's format is data
(`spec.JudgeSpec`).
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
from beamwright.models.tokenizer import PLACEHOLDER
from beamwright.models.tree_model import TreeModel
from beamwright.protocols import Traits
from beamwright.tree import Node
from beamwright.verify.prm import find_token_id
from beamwright.verify.spec import JudgeSpec

_NOTE = "critique"


@dataclass(eq=False, kw_only=True)
class _Critique(Aside):
    """A critique that is being generated; `given` has the prompt's token ids."""

    prompt_text: str  # the prompt as text
    stops: tuple[str, ...]  # `JudgeSpec.stops` with the number of the next step filled in
    number: int  # number of the judged step, from 1; empty steps are not counted
    sample: int  # index of this critique among the critiques of the step, from 0


class JudgeVerifier:
    """Verifier that scores steps by a chat model's critiques, and stores them in `node.notes`.

    Empty steps are left out of the prompt.

    end_ids: token ids that end the judge's turn.

    Raises:
        InputError: if the checkpoint has no chat template, or if the template cannot render the
            prompt.
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
        if PLACEHOLDER not in self._prompt("", [PLACEHOLDER], []):
            raise InputError(f"--verifier {name}: its chat template omits the user's turn")
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
        _, place, after = self._render(turns).rpartition(PLACEHOLDER)
        first = codec.encode(after.lstrip())[:1] if place else []
        self.end_ids = codec.eos_ids | (codec.special_ids & frozenset(first))
        num_tokens = min(tree_model.decoder.shape.vocab, codec.vocab_size)
        who = f"verifier {name}"
        self._writer = AsideWriter(tree_model, num_tokens, who, spec.sampling)
        words = () if spec.suffix is None else (spec.bad, spec.good)
        self._pair = [find_token_id(word, model) for word in words]
        # Number of tokens that every prompt leaves free in the context for `spec.suffix`.
        self._suffix_tokens = len(codec.encode(spec.suffix or ""))

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """Return a score per step: the mean score of its critiques.

        The score is None for an empty step, for a path beyond the judge's context, and if no
        critique has a score. Without `spec.suffix`, a critique has no score if it is truncated or
        states no score in range; `node.usage["judge_unparsed"]` counts these critiques. At
        temperature 0, an equal prompt of several nodes is answered once.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold one prompt and its critique.
        """
        alike: dict[object, list[_Critique]] = {}
        for row in (row for node in nodes for row in self._critiques(node)):
            drawn = (row.node, row.sample) if self.spec.sampling.temperature else None
            alike.setdefault((row.prompt_text, row.number, drawn), []).append(row)
        firsts = {rows[0]: rows for rows in alike.values()}
        scores: dict[Node, list[float]] = {node: [] for node in nodes}
        left = [*firsts]
        while left:  # each batch has as many critiques as fit the budget at full length
            # If not even one critique fits at full length, try one, because it may end early.
            batch = left[: max(1, len(self._writer.first_that_fit(left)))]
            left = left[len(batch) :]
            self._writer.write(batch)
            for first in batch:
                text, score = self._read(first)
                for row in firsts[first]:
                    row.node.notes[f"{_NOTE} {row.sample + 1}" if row.sample else _NOTE] = text
                    row.node.usage["judge_unparsed"] += score is None
                    scores[row.node] += [] if score is None else [score]
        return [sum(known) / len(known) if (known := scores[node]) else None for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Do nothing, because the judge keeps no KV between calls."""

    def _critiques(self, node: Node) -> list[_Critique]:
        """Return the critiques to generate for a step.

        The list is empty if the step is not judged, or if the context has no room for a critique.
        """
        seen = [step for step in node.reply() if step.is_seen_by(self.spec.sees)]
        path = [(step, text) for step in seen if (text := self._stripped(step))]
        ended_only = self.spec.scores == "ended_paths"
        if not (path and node.ended if ended_only else self._stripped(node)):
            return []
        critiques = [step.notes.get(_NOTE, "") for step, _ in path[:-1]]
        texts = [text for _, text in path]
        prompt_text = self._prompt(node.root.problem_text, texts, critiques, node.root.now)
        prompt = self._codec.encode(prompt_text)
        room = self.tree_model.decoder.shape.context - len(prompt) - self._suffix_tokens
        stops = tuple(s.replace("{next}", str(len(path) + 1)) for s in self.spec.stops)
        limit = min(self.spec.max_tokens, room)
        samples = range(self.spec.samples if room > 0 else 0)
        return [
            _Critique(
                node=node,
                given=prompt,
                limit=limit,
                ends=partial(self._has_ended, stops),
                stream=lineage_key(self.spec.seed, node.lineage, f"critique {each}"),
                prompt_text=prompt_text,
                stops=stops,
                number=len(path),
                sample=each,
            )
            for each in samples
        ]

    def _stripped(self, node: Node) -> str:
        """Return the text of a step without matches of `drop` and surrounding delimiters."""
        return re.sub(self.spec.drop, "", node.step_text).lstrip("\n").rstrip()

    def _prompt(
        self, problem: str, texts: Sequence[str], critiques: Sequence[str], now: str | None = None
    ) -> str:
        """Return the prompt of a critique: the conversation, and the beginning of the judge's turn.

        texts: the texts of the steps.
        critiques: the critiques of the earlier steps, for formats with a turn per step.
        now: the time that chat templates see.
        """
        step, numbered = self.spec.step, enumerate(texts, start=1)
        steps = [step.replace("{number}", str(n)).replace("{step}", text) for n, text in numbered]
        first = 1 if self.spec.turns == "each_step" else len(steps)
        # Split the prompt at its placeholders. Replacing them one after another would also replace
        # a "{steps}" that the problem's text contains.
        before, _, rest = self.spec.prompt.partition("{problem}")
        between, _, after = rest.partition("{steps}")
        content = f"{before}{problem}{between}{''.join(steps[:first])}{after}"
        turns = [{"role": "user", "content": content}]
        for critique, content in zip(critiques, steps[first:], strict=False):
            turns.append({"role": "assistant", "content": critique})
            turns.append({"role": "user", "content": content})
        opening = self.spec.opening.replace("{number}", str(len(steps)))
        return self._render(turns, now, add_generation_prompt=True) + opening

    def _render(self, turns: list[dict[str, str]], now: str | None = None, **options: bool) -> str:
        """Return `turns` in the chat template, after the system message if there is one."""
        if self.spec.system is not None:
            turns = [{"role": "system", "content": self.spec.system}, *turns]
        return self._codec.apply_chat_template(
            turns, f"--verifier {self.name}", **options, given={"now": now}
        )

    def _read(self, row: _Critique) -> tuple[str, float | None]:
        """Return the text of the judge's turn, and the score of the critique.

        With `spec.suffix`, the text includes the opening, the suffix and the likelier of both
        tokens.
        """
        text, usage = self._codec.decode(row.token_ids), row.node.usage
        ends = [at for stop in row.stops if (at := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
        usage["verifier_prefilled"] += len(row.given)
        usage["verifier_generated"] += len(row.token_ids)
        if self.spec.suffix is None:
            text = text.strip()
            return text, self.spec.read_score(text) if row.ended else None
        score = self._good_probability(row, row.prompt_text + text + self.spec.suffix)
        word = self._codec.decode_raw([self._pair[(score or 0.0) >= 0.5]])
        opening = self.spec.opening.replace("{number}", str(row.number))
        return f"{opening}{text}{self.spec.suffix}{word}{self.spec.closing}", score

    def _good_probability(self, row: _Critique, text: str) -> float | None:
        """Return the probability of the good token against the bad one after `text`.

        The probability is None if `text` exceeds the context. The whole text is encoded and
        prefilled again, as in the published code, because the suffix may change the tokens of the
        text before it.
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

    def _has_ended(self, stops: Sequence[str], token_ids: Sequence[int]) -> bool:
        """Return True if the last token ends the turn, or if the last tokens contain a stop text.

        A token has at least one byte, so it suffices to decode as many tokens as the longest stop
        text has bytes.
        """
        if token_ids[-1] in self.end_ids:
            return True
        most = max((len(stop.encode()) for stop in stops), default=0)
        text = self._codec.decode(token_ids[-most:]) if most else ""
        return any(stop in text for stop in stops)
