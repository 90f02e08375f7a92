"""JudgeVerifier: a chat model writes a critique of a path; the score is read from what it wrote.

The prompt up to the last step is prefilled once, on the tree (`path_kv`). What follows it and the
critique are in segments that live as long as the batch does. What is prompt is data
(`spec.JudgeSpec`). Critiques are greedy, so they depend on neither batch nor budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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


@dataclass(frozen=True)
class PathPrompt:
    """A path's whole prompt. num_kept: tokens up to and with the last step."""

    token_ids: list[int]
    num_kept: int


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
        self.end_ids = codec.eos_ids | self._end_of_turn()

    def encode_prefix(self, problem: str) -> list[int]:
        """Token ids of the text before the first step."""
        return self._codec.encode(self._frame(problem)[0])

    def encode(self, problem: str, nodes: Sequence[Node]) -> list[PathPrompt | None]:
        """Prompts about the paths that end in these nodes; None for one that is not judged."""
        head, tail = self._frame(problem)
        judged = [node for node in nodes if self._is_judged(node)]
        written = [head + self._steps(node) for node in judged]
        prompts: dict[Node, PathPrompt] = {}
        if judged:
            coded = self._codec.encode_with_offsets([text + tail for text in written])
            for node, text, ids, spans in zip(judged, written, *coded, strict=True):
                inside = (i for i, (_, end) in enumerate(spans) if end > len(text))
                before = next(inside, len(spans))
                # At least one token is left to forward: its state writes the first of the answer.
                prompts[node] = PathPrompt(ids, min(before, len(ids) - 1))
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

    def _end_of_turn(self) -> frozenset[int]:
        """The special token behind the assistant's turns, if there is one."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACE}]
        _, place, behind = self._render(turns, add_generation_prompt=False).rpartition(PLACE)
        first = self._codec.encode(behind.lstrip())[:1] if place else []
        return self._codec.special_ids & frozenset(first)

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        if self._spec.system is not None:
            turns = [{"role": "system", "content": self._spec.system}, *turns]
        return self._codec.chat(turns, self._name, add_generation_prompt=add_generation_prompt)


def _stripped(node: Node) -> str:
    """A step's text without what only delimits it."""
    return node.step_text.lstrip("\n").rstrip()


@dataclass
class _Critique:
    """A critique under way. path: KV of the prompt's tokens up to `prompt.num_kept`.

    limit: most tokens that it may have. ended: the judge has ended its turn.
    """

    node: Node
    prompt: PathPrompt
    path: Path
    limit: int
    token_ids: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def question(self) -> list[int]:
        """Tokens behind the last step: what is prompt about it."""
        return self.prompt.token_ids[self.prompt.num_kept :]

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
        for root, mine in trees.items():
            prompts = self._prompts.encode(root.problem_text, mine)
            for node, prompt in zip(mine, prompts, strict=True):
                requests.append(self._request(node, prompt))
                if prompt is not None and self._fits_context(prompt):
                    rows.append(self._row(node, prompt))
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

    # --- paths -------------------------------------------------------------------------------

    def _requests(self, root: Node, nodes: Sequence[Node]) -> Iterable[PrefillRequest | None]:
        return map(self._request, nodes, self._prompts.encode(root.problem_text, nodes))

    def _request(self, node: Node, prompt: PathPrompt | None) -> PrefillRequest | None:
        """What must be computed for this node's path; its handle is in place afterwards."""
        if prompt is None or not self._fits_context(prompt):
            self._kv.nothing_to_read(node)
            return None
        token_ids = prompt.token_ids[: prompt.num_kept]
        return self._kv.extend(node, token_ids, self._kv.num_shared(node, token_ids))

    def _fits_context(self, prompt: PathPrompt) -> bool:
        """True if there is room for a token of critique."""
        return len(prompt.token_ids) < self.tree_model.decoder.shape.context

    def _row(self, node: Node, prompt: PathPrompt) -> _Critique:
        room = self.tree_model.decoder.shape.context - len(prompt.token_ids)
        return _Critique(node, prompt, node.handles[OWNER].path, min(self.spec.max_tokens, room))

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
        while rows:
            sizes = range(2, len(rows) + 1)
            too_many = bisect_left(sizes, 1, key=lambda n: int(not self._fits_budget(rows[:n])))
            batch, rows = rows[: too_many + 1], rows[too_many + 1 :]
            yield batch

    def _fits_budget(self, rows: Sequence[_Critique]) -> bool:
        grown = {Segment(): n for row in rows for n in (len(row.question), row.limit)}
        return self.tree_model.store.fits(self._needs(rows), grown)

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
        """Write the critiques of a batch."""
        store = self.tree_model.store
        with (
            self._segments(len(rows)) as questions,
            self._segments(len(rows)) as answers,
            store.lease(self._needs(rows)) as lease,
        ):
            lease.add(dict.fromkeys(questions, 1))
            requests = [
                PrefillRequest(row.path, segment, row.question, row.prompt.num_kept)
                for row, segment in zip(rows, questions, strict=True)
            ]
            hidden = self.tree_model.prefill(requests)
            self._reserve(rows, answers)
            paths = [(*r.path, PathPart(r.segment, r.segment.length)) for r in requests]
            lease.add(dict.fromkeys(answers, 1))
            session = self.tree_model.open_session(paths, answers)
            try:
                self._decode(rows, session, torch.cat([states[-1:] for states in hidden]))
            finally:
                session.close()

    @contextmanager
    def _segments(self, count: int) -> Iterator[list[Segment]]:
        """Segments that are freed at the end, whatever happens."""
        store = self.tree_model.store
        made: list[Segment] = []
        try:
            for _ in range(count):
                made.append(store.create())
            yield made
        finally:
            for segment in made:
                store.free(segment)

    def _reserve(self, rows: Sequence[_Critique], answers: Sequence[Segment]) -> None:
        """Take the blocks that the critiques may fill, so that no row runs out of them."""
        wanted = {segment: row.limit for row, segment in zip(rows, answers, strict=True)}
        if len(rows) > 1:
            self.tree_model.store.reserve(wanted)
            return
        with suppress(CapacityError):
            self.tree_model.store.reserve(wanted)

    def _decode(self, rows: list[_Critique], session: DecodeSession, hidden: torch.Tensor) -> None:
        """Token by token until every row has stopped. hidden: [rows, hidden]."""
        decoder = self.tree_model.decoder
        spare = session.num_rows - len(rows)
        hidden = torch.cat([hidden, hidden[:1].expand(spare, -1)])
        present: list[_Critique | None] = [*rows, *([None] * spare)]  # None pads the batch
        starts = [len((row or rows[0]).prompt.token_ids) for row in present]
        positions = torch.tensor(starts, device=decoder.device)
        while True:
            likeliest = decoder.logits(hidden)[:, : self._num_tokens].max(-1)
            tokens = likeliest.indices
            self._check(present, likeliest.values.tolist())
            going = self._append(present, tokens.tolist(), session)
            if not going:
                return
            if padded_rows(len(going)) < session.num_rows:
                session.arrange(going)
                present = [present[i] for i in going]
                spare = session.num_rows - len(going)
                present += [None] * spare
                index = torch.tensor([*going, *[going[0]] * spare], device=decoder.device)
                tokens, positions = tokens[index], positions[index]
            hidden = session.forward(tokens, positions)
            # Rows that have stopped stay inside the context; what they decode is dropped.
            positions.add_(1).clamp_(max=decoder.shape.context - 1)

    def _check(self, present: Sequence[_Critique | None], logits: Sequence[float]) -> None:
        """Raises NotFiniteError if the largest logit of a row that goes on is no number."""
        for row, logit in zip(present, logits, strict=True):
            if row is not None and not row.stopped and not math.isfinite(logit):
                place = f"problem {row.node.problem_id}, step {row.node.depth}"
                raise NotFiniteError(f"verifier {self.name}: NaN or infinite logits at {place}")

    def _append(
        self, present: Sequence[_Critique | None], tokens: Sequence[int], session: DecodeSession
    ) -> list[int]:
        """Add a token to every row that goes on; returns those that still do."""
        going: list[int] = []
        done: list[int] = []
        for index, (row, token) in enumerate(zip(present, tokens, strict=True)):
            if row is None:
                continue
            if row.stopped:
                row.node.usage["overrun"] += 1
                continue
            row.token_ids.append(token)
            row.ended = token in self._prompts.end_ids
            (done if row.stopped else going).append(index)
        if done:
            session.drop(done)
        return going
