"""JudgeVerifier: a chat model writes a critique of a path; the score is read from what it wrote.

The prompt up to the last step is prefilled once, on the tree (`path_kv`). What follows it and the
critique are in segments that live as long as the batch does. What is prompt is data
(`spec.JudgeSpec`). Critiques are greedy, so they depend on neither batch nor budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from beamwright.errors import CapacityError, DeviceMemoryError, InputError, NotFiniteError
from beamwright.kv.segments import Path, PathPart, Segment, copies_needed
from beamwright.models.decoder import padded_rows
from beamwright.models.load import LoadedModel
from beamwright.models.session import DecodeSession
from beamwright.models.tokenizer import PLACE, TextCodec
from beamwright.models.tree_model import PrefillRequest, TreeModel
from beamwright.tree import Node, by_root
from beamwright.verify.path_kv import OWNER, PathKV
from beamwright.verify.spec import JudgeSpec

_NOTE = "critique"


class JudgePrompts:
    """Writes and encodes prompts. Steps that are empty leave no trace.

    end_ids: tokens that end the judge's turn.

    Raises:
        InputError: if the checkpoint has no chat template, or it cannot write such a prompt.
    """

    def __init__(self, spec: JudgeSpec, codec: TextCodec, name: str) -> None:
        self._spec, self._codec, self._name = spec, codec, f"--verifier {name}"
        if codec.chat_template is None:
            raise InputError(f"{self._name}: a judge needs a chat template; its tokenizer has none")
        self._frame("")
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACE}]
        _, place, behind = self._render(turns, add_generation_prompt=False).rpartition(PLACE)
        first = codec.encode(behind.lstrip())[:1] if place else []
        self.end_ids = codec.eos_ids | (codec.special_ids & frozenset(first))

    def encode_prefix(self, problem: str) -> list[int]:
        """Token ids of the text before the first step."""
        return self._codec.encode(self._frame(problem)[0])

    def encode(self, problem: str, nodes: Sequence[Node]) -> list[tuple[list[int], int] | None]:
        """Prompts about the paths that end in these nodes; None for one that is not judged.

        Each is its token ids, and how many of them reach up to and with the last step.
        """
        head, tail = self._frame(problem)
        judged = [node for node in nodes if self._is_judged(node)]
        written = [head + self._steps(node) for node in judged]
        prompts: dict[Node, tuple[list[int], int]] = {}
        if judged:
            coded = self._codec.encode_with_offsets([text + tail for text in written])
            for node, text, ids, spans in zip(judged, written, *coded, strict=True):
                inside = (i for i, (_, end) in enumerate(spans) if end > len(text))
                # At least one token is left to forward: its state writes the first of the answer.
                prompts[node] = ids, min(next(inside, len(spans)), len(ids) - 1)
        return [prompts.get(node) for node in nodes]

    def _is_judged(self, node: Node) -> bool:
        if self._spec.scores == "ended_paths":
            return node.ended and any(_stripped(step) for step in node.reply())
        return bool(_stripped(node))

    def _steps(self, node: Node) -> str:
        before, _, after = self._spec.step.partition("{step}")
        texts = [text for step in node.reply() if (text := _stripped(step))]
        return "".join(
            before.replace("{number}", str(number)) + text + after.replace("{number}", str(number))
            for number, text in enumerate(texts, start=1)
        )

    def _frame(self, problem: str) -> tuple[str, str]:
        """The text before the first step, and behind the last one."""
        before, _, rest = self._spec.prompt.partition("{problem}")
        between, _, after = rest.partition("{steps}")
        turns = [{"role": "user", "content": f"{before}{problem}{between}{PLACE}{after}"}]
        head, place, tail = self._render(turns, add_generation_prompt=True).rpartition(PLACE)
        if not place:
            raise InputError(f"{self._name}: its chat template leaves the user's turn out")
        return head, tail

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        if self._spec.system is not None:
            turns = [{"role": "system", "content": self._spec.system}, *turns]
        return self._codec.chat(turns, self._name, add_generation_prompt=add_generation_prompt)


def _stripped(node: Node) -> str:
    """A step's text without what only delimits it."""
    return node.step_text.lstrip("\n").rstrip()


@dataclass
class _Critique:
    """A critique under way.

    path: KV of the prompt up to the last step. question: tokens of the prompt behind it, from
    position `start` on. limit: most tokens that the critique may have. ended: the judge has ended
    its turn.
    """

    node: Node
    path: Path
    question: list[int]
    start: int
    limit: int
    token_ids: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def stopped(self) -> bool:
        """True if no further token is written."""
        return self.ended or len(self.token_ids) >= self.limit


class JudgeVerifier:
    """Scores steps by what a chat model writes about them; the text is in `node.notes`.

    Raises:
        InputError: if the checkpoint has no usable chat template.
    """

    probabilities = True
    beside_decoding = True

    def __init__(
        self, spec: JudgeSpec, model: LoadedModel, tree_model: TreeModel, name: str = "judge"
    ) -> None:
        if model.codec is None:
            raise ValueError("a judge needs a tokenizer")
        self.spec = spec
        self.name = name
        self.default_aggregate: str = spec.aggregate
        self.tree_model = tree_model
        self._codec: TextCodec = model.codec
        self._prompts = JudgePrompts(spec, model.codec, name)
        self._kv = PathKV(tree_model, self._prompts.encode_prefix)
        # Rows of the LM head beyond the tokenizer's have no text.
        self._num_tokens = min(tree_model.decoder.shape.vocab, model.codec.vocab_size)

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """A score per step.

        None for an empty step, one beyond the judge's context, and for a critique that is cut off
        or states no score in range; the last is counted as "judge_unparsed" in `node.usage`.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold the new tokens and one critique.
        """
        trees = by_root(nodes)
        self._kv.begin(list(trees))
        rows: list[_Critique] = []
        requests: list[PrefillRequest | None] = []
        for root, below in trees.items():
            prompts = self._prompts.encode(root.problem_text, below)
            for node, prompt in zip(below, prompts, strict=True):
                requests.append(self._request(node, prompt))
                room = self._room(prompt)
                if prompt is not None and room > 0:
                    token_ids, kept = prompt
                    path, limit = node.handles[OWNER].path, min(self.spec.max_tokens, room)
                    rows.append(_Critique(node, path, token_ids[kept:], kept, limit))
        self.tree_model.prefill([request for request in requests if request is not None])
        for batch in self._batches(rows):
            self._write_all(batch)
        scores = {row.node: self._read(row) for row in rows}
        return [scores.get(node) for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes."""
        self._kv.release(nodes)

    def restore(self, nodes: Sequence[Node]) -> None:
        """No critique is written again."""
        self._kv.restore(nodes, self._requests)

    def _requests(self, root: Node, nodes: Sequence[Node]) -> Iterable[PrefillRequest | None]:
        return map(self._request, nodes, self._prompts.encode(root.problem_text, nodes))

    def _request(self, node: Node, prompt: tuple[list[int], int] | None) -> PrefillRequest | None:
        """What must be computed for this node's path; its handle is in place afterwards."""
        if prompt is None or self._room(prompt) <= 0:
            self._kv.nothing_to_read(node)
            return None
        token_ids = prompt[0][: prompt[1]]
        return self._kv.extend(node, token_ids, self._kv.num_shared(node, token_ids))

    def _room(self, prompt: tuple[list[int], int] | None) -> int:
        """Tokens of critique that the context has places for."""
        return 0 if prompt is None else self.tree_model.decoder.shape.context - len(prompt[0])

    def _read(self, row: _Critique) -> float | None:
        text = self._codec.decode(row.token_ids).strip()
        score = self.spec.read_score(text) if row.ended else None
        row.node.notes[_NOTE] = text
        row.node.usage["verifier_prefilled"] += len(row.question)
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
            several = rows[:count]
            grown = {Segment(): n for row in several for n in (len(row.question), row.limit)}
            return not self.tree_model.store.fits(self._needs(several), grown)

        while rows:
            count = 1 + bisect_left(range(2, len(rows) + 1), True, key=too_many)
            batch, rows = rows[:count], rows[count:]
            yield batch

    def _needs(self, rows: Sequence[_Critique]) -> dict[Segment, int]:
        """Device copies of each segment that these rows' paths read."""
        per_beam = self.tree_model.backend.copies_per_beam
        return copies_needed((row.path for row in rows), per_beam=per_beam)

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
        questions, answers = ([store.create() for _ in rows] for _ in range(2))
        try:
            with store.lease(self._needs(rows)) as lease:
                lease.add(dict.fromkeys(questions, 1))
                requests = [
                    PrefillRequest(row.path, segment, row.question, row.start)
                    for row, segment in zip(rows, questions, strict=True)
                ]
                hidden = self.tree_model.prefill(requests)
                try:  # so that no row runs out of blocks
                    store.reserve({s: row.limit for row, s in zip(rows, answers, strict=True)})
                except CapacityError:
                    if len(rows) > 1:
                        raise
                paths = [(*r.path, PathPart(r.segment, r.segment.length)) for r in requests]
                lease.add(dict.fromkeys(answers, 1))
                session = self.tree_model.open_session(paths, answers)
                try:
                    self._decode(rows, session, torch.cat([states[-1:] for states in hidden]))
                finally:
                    session.close()
        finally:
            for segment in (*questions, *answers):
                store.free(segment)

    def _decode(self, rows: list[_Critique], session: DecodeSession, hidden: torch.Tensor) -> None:
        """Token by token until every row has stopped. hidden: [rows, hidden]."""
        decoder = self.tree_model.decoder
        spare = session.num_rows - len(rows)
        hidden = torch.cat([hidden, hidden[:1].expand(spare, -1)])
        present: list[_Critique | None] = [*rows, *([None] * spare)]  # None pads the batch
        starts = [row.start + len(row.question) for row in [*rows, *([rows[0]] * spare)]]
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
            row.ended = token in self._prompts.end_ids
            (done if row.stopped else going).append(index)
        if done:
            session.drop(done)
        return going
