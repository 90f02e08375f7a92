"""JudgeVerifier: a chat model writes a critique of a path; the score is read from what it wrote.

Prompts and critiques are in segments that live as long as their batch does: a critique takes many
times as long as reading the path again. What is prompt is data (`spec.JudgeSpec`). Critiques are
greedy, so they depend on neither batch nor budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from beamwright.errors import CapacityError, DeviceMemoryError, InputError, NotFiniteError
from beamwright.kv.segments import PathPart, Segment
from beamwright.models.decoder import padded_rows
from beamwright.models.load import LoadedModel
from beamwright.models.session import DecodeSession
from beamwright.models.tokenizer import PLACE
from beamwright.models.tree_model import PrefillRequest, TreeModel
from beamwright.tree import Node
from beamwright.verify.spec import JudgeSpec

_NOTE = "critique"


@dataclass
class _Critique:
    """A critique under way.

    prompt: its token ids. limit: most tokens that the critique may have. ended: the judge has ended
    its turn.
    """

    node: Node
    prompt: list[int]
    limit: int
    token_ids: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def stopped(self) -> bool:
        """True if no further token is written."""
        return self.ended or len(self.token_ids) >= self.limit


class JudgeVerifier:
    """Scores steps by what a chat model writes about them; the text is in `node.notes`.

    Steps that are empty leave no trace in a prompt. end_ids: tokens that end the judge's turn.

    Raises:
        InputError: if the checkpoint has no chat template, or it cannot write such a prompt.
    """

    probabilities = True
    beside_decoding = True

    def __init__(
        self, spec: JudgeSpec, model: LoadedModel, tree_model: TreeModel, name: str = "judge"
    ) -> None:
        if model.codec is None:
            raise ValueError("a judge needs a tokenizer")
        self.spec, self.name = spec, name
        self.default_aggregate: str = spec.aggregate
        self.tree_model = tree_model
        self._codec = codec = model.codec
        if codec.chat_template is None:
            raise InputError(
                f"--verifier {name}: a judge needs a chat template; its tokenizer has none"
            )
        if PLACE not in self._prompt("", PLACE):
            raise InputError(f"--verifier {name}: its chat template leaves the user's turn out")
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACE}]
        _, place, behind = self._render(turns).rpartition(PLACE)
        first = codec.encode(behind.lstrip())[:1] if place else []
        self.end_ids = codec.eos_ids | (codec.special_ids & frozenset(first))
        # Rows of the LM head beyond the tokenizer's have no text.
        self._num_tokens = min(tree_model.decoder.shape.vocab, codec.vocab_size)

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """A score per step.

        None for an empty step, one beyond the judge's context, and for a critique that is cut off
        or states no score in range; the last is counted as "judge_unparsed" in `node.usage`.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold one prompt and its critique.
        """
        rows: list[_Critique] = []
        for node in nodes:
            steps = [text for step in node.reply() if (text := _stripped(step))]
            judged = steps and node.ended if self.spec.scores == "ended_paths" else _stripped(node)
            if not judged:
                continue
            prompt = self._codec.encode(self._prompt(node.root.problem_text, self._written(steps)))
            room = self.tree_model.decoder.shape.context - len(prompt)
            if room > 0:
                rows.append(_Critique(node, prompt, min(self.spec.max_tokens, room)))
        for batch in self._batches(rows):
            self._write_all(batch)
        scores = {row.node: self._read(row) for row in rows}
        return [scores.get(node) for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""

    def _written(self, steps: Sequence[str]) -> str:
        before, _, after = self.spec.step.partition("{step}")
        return "".join(
            before.replace("{number}", str(number)) + text + after.replace("{number}", str(number))
            for number, text in enumerate(steps, start=1)
        )

    def _prompt(self, problem: str, steps: str) -> str:
        before, _, rest = self.spec.prompt.partition("{problem}")
        between, _, after = rest.partition("{steps}")
        turn = {"role": "user", "content": f"{before}{problem}{between}{steps}{after}"}
        return self._render([turn], add_generation_prompt=True)

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        if self.spec.system is not None:
            turns = [{"role": "system", "content": self.spec.system}, *turns]
        where = f"--verifier {self.name}"
        return self._codec.chat(turns, where, add_generation_prompt=add_generation_prompt)

    def _read(self, row: _Critique) -> float | None:
        text = self._codec.decode(row.token_ids).strip()
        score = self.spec.read_score(text) if row.ended else None
        row.node.notes[_NOTE] = text
        row.node.usage["verifier_prefilled"] += len(row.prompt)
        row.node.usage["verifier_generated"] += len(row.token_ids)
        if score is None:
            row.node.usage["judge_unparsed"] += 1
        return score

    # --- critiques ---------------------------------------------------------------------------

    def _batches(self, rows: list[_Critique]) -> Iterator[list[_Critique]]:
        """As many rows at a time as the budget holds with critiques of full length, one at least.

        A single row that does not fit takes block by block: its critique may be short.
        """

        def too_many(count: int) -> bool:
            grown = {Segment(): n for row in rows[:count] for n in (len(row.prompt), row.limit)}
            return not self.tree_model.store.fits({}, grown)

        while rows:
            count = 1 + bisect_left(range(2, len(rows) + 1), True, key=too_many)
            batch, rows = rows[:count], rows[count:]
            yield batch

    def _write_all(self, rows: list[_Critique]) -> None:
        """Write the critiques of a batch, half of it at a time where memory runs out.

        Raises:
            DeviceMemoryError: if there is none even for one.
        """
        try:
            self._write(rows)
            return
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise DeviceMemoryError("one critique cannot be written") from None
        for row in rows:
            row.node.usage["overrun"] += len(row.token_ids)
            row.token_ids, row.ended = [], False
        half = -(-len(rows) // 2)
        self._write_all(rows[:half])
        self._write_all(rows[half:])

    def _write(self, rows: list[_Critique]) -> None:
        store = self.tree_model.store
        prompts, answers = ([store.create() for _ in rows] for _ in range(2))
        try:
            with store.lease({}) as lease:
                lease.add(dict.fromkeys(prompts, 1))
                pairs = zip(rows, prompts, strict=True)
                hidden = self.tree_model.prefill(
                    [PrefillRequest((), segment, row.prompt, 0) for row, segment in pairs]
                )
                try:  # so that no row runs out of blocks
                    store.reserve({s: row.limit for row, s in zip(rows, answers, strict=True)})
                except CapacityError:
                    if len(rows) > 1:
                        raise
                lease.add(dict.fromkeys(answers, 1))
                paths = [(PathPart(segment, segment.length),) for segment in prompts]
                session = self.tree_model.open_session(paths, answers)
                try:
                    self._decode(rows, session, torch.cat([states[-1:] for states in hidden]))
                finally:
                    session.close()
        finally:
            for segment in (*prompts, *answers):
                store.free(segment)

    def _decode(self, rows: list[_Critique], session: DecodeSession, hidden: torch.Tensor) -> None:
        """Token by token until every row has stopped. hidden: [rows, hidden]."""
        decoder = self.tree_model.decoder
        spare = session.num_rows - len(rows)
        hidden = torch.cat([hidden, hidden[:1].expand(spare, -1)])
        present: list[_Critique | None] = [*rows, *([None] * spare)]  # None pads the batch
        starts = [len(row.prompt) for row in [*rows, *([rows[0]] * spare)]]
        positions = torch.tensor(starts, device=decoder.device)
        while True:
            likeliest = decoder.logits(hidden)[:, : self._num_tokens].max(-1)
            tokens = likeliest.indices
            going = self._append(present, tokens.tolist(), likeliest.values.tolist(), session)
            if not going:
                return
            if padded_rows(len(going)) < session.num_rows:
                session.arrange(going)
                spare = session.num_rows - len(going)
                present = [*(present[i] for i in going), *([None] * spare)]
                index = torch.tensor([*going, *[going[0]] * spare], device=decoder.device)
                tokens, positions = tokens[index], positions[index]
            hidden = session.forward(tokens, positions)
            # Rows that have stopped stay inside the context; what they decode is dropped.
            positions.add_(1).clamp_(max=decoder.shape.context - 1)

    def _append(
        self,
        present: Sequence[_Critique | None],
        tokens: Sequence[int],
        logits: Sequence[float],
        session: DecodeSession,
    ) -> list[int]:
        """Add a token to every row that goes on; returns those that still do.

        Raises:
            NotFiniteError: if the largest logit of one is no number.
        """
        going: list[int] = []
        done: list[int] = []
        for index, (row, token, logit) in enumerate(zip(present, tokens, logits, strict=True)):
            if row is None:
                continue
            if row.stopped:
                row.node.usage["overrun"] += 1
                continue
            if not math.isfinite(logit):
                place = f"problem {row.node.problem_id}, step {row.node.depth}"
                raise NotFiniteError(f"verifier {self.name}: NaN or infinite logits at {place}")
            row.token_ids.append(token)
            row.ended = token in self.end_ids
            (done if row.stopped else going).append(index)
        if done:
            session.drop(done)
        return going


def _stripped(node: Node) -> str:
    """A step's text without what only delimits it."""
    return node.step_text.lstrip("\n").rstrip()
