"""JudgeVerifier: a chat model writes a critique of a path; the score is read from what it wrote.

Prompts and critiques are in segments that live as long as their batch does: a critique takes many
times as long as reading the path again. What is prompt is data (`spec.JudgeSpec`). Critiques are
greedy, or drawn from streams that are a critique's own, so they depend on neither batch nor budget.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from beamwright.engine.noise import lineage_key, stack_keys
from beamwright.engine.sampling import RowSampling, Sampler
from beamwright.errors import CapacityError, DeviceMemoryError, InputError, NotFiniteError
from beamwright.kv.segments import PathPart, Segment, whole
from beamwright.models.decoder import padded_rows
from beamwright.models.load import LoadedModel
from beamwright.models.session import DecodeSession
from beamwright.models.tokenizer import PLACE
from beamwright.models.tree_model import PrefillRequest, TreeModel
from beamwright.tree import Node
from beamwright.verify.prm import token_id
from beamwright.verify.spec import JudgeSpec

_NOTE = "critique"


@dataclass(eq=False)
class _Critique:
    """A critique under way.

    asked: the prompt's text. prompt: its token ids. stops: see `JudgeSpec`. limit: most tokens that
    the critique may have. number: the step's. sample: its own, among the step's. ended: the
    judge has ended its turn, or said a stop.
    """

    node: Node
    asked: str
    prompt: list[int]
    stops: tuple[str, ...]
    limit: int
    number: int
    sample: int
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
        self.answers_each_step, self.sees = spec.turns == "each_step", spec.sees
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
        # Rows of the LM head beyond the tokenizer's have no text.
        self._num_tokens = min(tree_model.decoder.shape.vocab, codec.vocab_size)
        device, tile_rows = tree_model.decoder.device, tree_model.decoder.tile_rows
        self._sampler = Sampler(self._num_tokens, device, (), tile_rows)
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
        for batch in self._batches([*firsts]):
            self._write_all(batch)
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
        seen = [step for step in node.reply() if step.seen(self.sees)]
        path = [(step, text) for step in seen if (text := self._stripped(step))]
        ended_only = self.spec.scores == "ended_paths"
        if not (path and node.ended if ended_only else self._stripped(node)):
            return []
        said = [step.notes.get(_NOTE, "") for step, _ in path[:-1]]
        asked = self._prompt(node.root.problem_text, [text for _, text in path], said)
        prompt = self._codec.encode(asked)
        room = self.tree_model.decoder.shape.context - len(prompt) - self._most_behind
        stops = tuple(s.replace("{next}", str(len(path) + 1)) for s in self.spec.stops)
        limit = min(self.spec.max_tokens, room)
        samples = range(self.spec.samples if room > 0 else 0)
        return [_Critique(node, asked, prompt, stops, limit, len(path), each) for each in samples]

    def _stripped(self, node: Node) -> str:
        """A step's text without what only delimits it, or is to be left out."""
        return re.sub(self.spec.drop, "", node.step_text).lstrip("\n").rstrip()

    def _prompt(self, problem: str, texts: Sequence[str], said: Sequence[str]) -> str:
        """The conversation up to the critique. said: about the steps before, if those are turns."""
        before, _, rest = self.spec.prompt.partition("{problem}")
        between, _, after = rest.partition("{steps}")
        step, numbered = self.spec.step, enumerate(texts, start=1)
        steps = [step.replace("{number}", str(n)).replace("{step}", text) for n, text in numbered]
        first = 1 if self.spec.turns == "each_step" else len(steps)
        asked = f"{before}{problem}{between}{''.join(steps[:first])}{after}"
        turns = [{"role": "user", "content": asked}]
        for critique, asked in zip(said, steps[first:], strict=False):
            turns.append({"role": "assistant", "content": critique})
            turns.append({"role": "user", "content": asked})
        opening = self.spec.opening.replace("{number}", str(len(steps)))
        return self._render(turns, add_generation_prompt=True) + opening

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        if self.spec.system is not None:
            turns = [{"role": "system", "content": self.spec.system}, *turns]
        where = f"--verifier {self.name}"
        return self._codec.chat(turns, where, add_generation_prompt=add_generation_prompt)

    def _read(self, row: _Critique) -> tuple[str, float | None]:
        """What the judge said, with what was put into its mouth, and the critique's score."""
        text, score, usage = self._codec.decode(row.token_ids), None, row.node.usage
        ends = [at for stop in row.stops if (at := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
        usage["verifier_prefilled"] += len(row.prompt)
        usage["verifier_generated"] += len(row.token_ids)
        if self.spec.suffix is not None:
            score = self._weigh(row, row.asked + text + self.spec.suffix)
            word = self._codec.decode_raw([self._pair[(score or 0.0) >= 0.5]])
            opening = self.spec.opening.replace("{number}", str(row.number))
            text = f"{opening}{text}{self.spec.suffix}{word}{self.spec.closing}"
        else:
            text = text.strip()
            score = self.spec.read_score(text) if row.ended else None
        return text, score

    def _weigh(self, row: _Critique, text: str) -> float | None:
        """How likely the good token is against the bad one behind a text, which is read anew.

        So its tokens are those of the whole, as published: a suffix may merge with what it follows.
        """
        token_ids = self._codec.encode(text)
        if len(token_ids) > self.tree_model.decoder.shape.context:
            return None
        row.node.usage["verifier_prefilled"] += len(token_ids)
        segment = self.tree_model.store.create()
        try:
            request = PrefillRequest((), segment, token_ids, 0, read=(len(token_ids) - 1,))
            (hidden,) = self.tree_model.prefill([request])
        finally:
            self.tree_model.store.free(segment)
        logits = self.tree_model.decoder.logits(hidden)[0, self._pair]
        return float(logits.softmax(-1)[1])

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
                lease.add(whole(dict.fromkeys(prompts, 1)))
                pairs = zip(rows, prompts, strict=True)
                hidden = self.tree_model.prefill(
                    [PrefillRequest((), segment, row.prompt, 0) for row, segment in pairs]
                )
                try:  # so that no row runs out of blocks
                    store.reserve({s: row.limit for row, s in zip(rows, answers, strict=True)})
                except CapacityError:
                    if len(rows) > 1:
                        raise
                lease.add(whole(dict.fromkeys(answers, 1)))
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
        streams = [
            lineage_key(self.spec.seed, row.node.lineage, f"critique {row.sample}")
            for row in [*rows, *([rows[0]] * spare)]
        ]
        keys = stack_keys(streams, decoder.device)
        while True:
            logits = decoder.logits(hidden)[:, : self._num_tokens]
            likeliest = logits.max(-1)
            tokens = likeliest.indices
            if self.spec.sampling.temperature:
                how = RowSampling.of([self.spec.sampling] * len(present), decoder.device)
                tokens, _ = self._sampler.sample(logits, keys, positions, how)
            going = self._append(present, tokens.tolist(), likeliest.values.tolist(), session)
            if not going:
                return
            if padded_rows(len(going)) < session.num_rows:
                session.arrange(going)
                spare = session.num_rows - len(going)
                present = [*(present[i] for i in going), *([None] * spare)]
                index = torch.tensor([*going, *[going[0]] * spare], device=decoder.device)
                tokens, positions, keys = tokens[index], positions[index], keys[index]
            hidden = session.forward(tokens, positions)
            # Rows that have stopped stay inside the context; what they decode is dropped.
            positions.add_(1).clamp_(max=decoder.shape.context - 1)

    def _says_stop(self, row: _Critique) -> bool:
        """True if the newest tokens hold a stop; each adds a byte at least."""
        most = max((len(stop.encode()) for stop in row.stops), default=0)
        text = self._codec.decode(row.token_ids[-most:]) if most else ""
        return any(stop in text for stop in row.stops)

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
            row.ended = token in self.end_ids or self._says_stop(row)
            (done if row.stopped else going).append(index)
        if done:
            session.drop(done)
        return going
