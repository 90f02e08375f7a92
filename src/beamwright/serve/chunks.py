"""The chunks of a streamed answer: text that is final, rounds as reasoning, and an end in any case.

No `id:` or `retry:` field, no named event: clients of OpenAI's fail on them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.serve.desk import Job, RoundSummary
from beamwright.serve.errors import told_error
from beamwright.serve.reply import Answer, ReplyFormat, answers, search_facts, usage
from beamwright.serve.stream import event
from beamwright.solver.solution import Solution

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Chunks:
    """The chunks of some searches, one behind the other, each as far as it is decided.

    pieces: bytes of token ids. with_usage, with_search: what was asked for beside the text.
    """

    jobs: Sequence[Job]
    shape: ReplyFormat
    fingerprint: str
    pieces: Sequence[bytes]
    with_usage: bool
    with_search: bool

    async def events(self) -> AsyncIterator[bytes]:
        """Ends with `[DONE]`, be it behind an error."""
        try:
            if self.shape.chat:
                yield self._role(0)
            found: list[Sequence[Answer]] = []
            for number, job in enumerate(self.jobs):
                async for each in self._job(job, number * job.ask.choices, found):
                    yield each
            if self.with_usage:
                yield self._event([], usage=usage(self.jobs, found))
        except Exception as error:
            yield event(told_error(error, self.jobs[0].id).body)
        finally:
            for job in self.jobs:
                job.cancel()
        yield DONE

    async def _job(
        self, job: Job, offset: int, found: list[Sequence[Answer]]
    ) -> AsyncIterator[bytes]:
        """One search, whose choices are numbered from there. found: its answers go there."""
        sent = ""
        async for _ in job.changes():
            for each in self._rounds(job, offset, thinks=not sent):
                yield each
            if new := job.text[len(sent) :]:
                sent = job.text
                yield self._chunk(offset, {"content": new})
        solution = await job.solution()
        found.append(answers(job, solution, self.pieces))
        for each in self._answers(job, solution, found[-1], offset, sent):
            yield each

    def _rounds(self, job: Job, index: int, *, thinks: bool) -> Iterator[bytes]:
        """What was decided since: for people, where there is a search to tell of, and programs.

        thinks: no text has gone out. Clients that get reasoning between two pieces of a text show
        two texts, cut anywhere.
        """
        rounds, job.rounds = job.rounds, []
        thinks &= self.shape.chat and job.outcome is None and not job.ask.is_plain
        for each in rounds:
            if thinks:
                said = told(each)
                yield self._chunk(index, {"reasoning": said, "reasoning_content": said})
            if self.with_search:
                yield self._chunk(index, {}, search=vars(each))

    def _answers(
        self, job: Job, solution: Solution, mine: Sequence[Answer], offset: int, sent: str
    ) -> Iterator[bytes]:
        """What is left of the first, all of the others, and how each has ended."""
        for answer in mine:
            index = offset + answer.index
            if answer.index and self.shape.chat:
                yield self._role(index)
            text = answer.behind("" if answer.index else sent)
            if text or answer.tokens:
                yield self._event([self.shape.piece(index, {"content": text}, answer)])
            if answer.calls:
                calls = [{"index": number, **call} for number, call in enumerate(answer.calls)]
                yield self._chunk(index, {"tool_calls": calls})
            end = {**self.shape.piece(index, {}), "finish_reason": answer.finish}
            facts = {} if answer.index else {"search": search_facts(job, solution, mine)}
            yield self._event([end], **facts)

    def _role(self, index: int) -> bytes:
        # A text from the start: some clients show a null.
        return self._chunk(index, {"role": "assistant", "content": ""})

    def _chunk(self, index: int, delta: Mapping[str, Any], **more: Any) -> bytes:
        return self._event([self.shape.piece(index, delta)], **more)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = self.shape.head(self.jobs[0], self.fingerprint, chunk=True)
        unused = {"usage": None} if self.with_usage else {}
        return event({**head, "choices": choices, **unused, **more})


def told(found: RoundSummary) -> str:
    """A round in a line, for people."""
    best = "" if found.best is None else f", best score {found.best:.3f}"
    ended = f", {found.finished} finished" if found.finished else ""
    return (
        f"Round {found.number}: {found.candidates} candidates, {found.kept} kept{ended}{best}, "
        f"{found.tokens} tokens so far.\n"
    )
