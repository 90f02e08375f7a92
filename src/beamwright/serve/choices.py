"""Replies with `choices`, as chats and completions have them: whole, or in chunks.

Chunks have no `id:` or `retry:` field, no named event: clients of OpenAI's fail on them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

from beamwright.serve.answers import Answer, AnswerToken, search_facts, usage
from beamwright.serve.endpoint import Endpoint, F, ReplyStream, event
from beamwright.serve.errors import ApiError
from beamwright.serve.job import SearchJob

LEAST_LOGPROB = -9999.0  # OpenAI's for what has no probability


class ChoicesEndpoint(Endpoint[F]):
    """An endpoint whose replies have choices. kind, chunk: what they call themselves; prefix: of
    ids. talks: there are roles, and thoughts beside the text."""

    kind: ClassVar[str]
    chunk: ClassVar[str]
    prefix: ClassVar[str]
    talks: ClassVar[bool] = False

    @abstractmethod
    def logprobs(self, tokens: Sequence[AnswerToken] | None) -> dict[str, Any] | None:
        """As `choices[].logprobs` has them."""

    @abstractmethod
    def content(self, answer: Answer) -> dict[str, Any]:
        """What a choice says, whole."""

    @abstractmethod
    def delta(self, said: dict[str, Any]) -> dict[str, Any]:
        """What a choice of a chunk says."""

    def head(self, job: SearchJob, kind: str) -> dict[str, Any]:
        """What every object begins with."""
        return {
            "id": self.prefix + job.number,
            "object": kind,
            "created": int(job.created_s),
            "model": job.model,
            "system_fingerprint": self.queue.fingerprint,
        }

    def whole(self, fields: F, jobs: Sequence[SearchJob]) -> dict[str, Any]:
        """Every job's choices behind those of the one before."""
        del fields
        answers = [self.answers(job) for job in jobs]
        choices = [
            {
                "index": number * jobs[0].choices + answer.index,
                **self.content(answer),
                "finish_reason": answer.finish,
                "logprobs": self.logprobs(answer.tokens),
            }
            for number, some in enumerate(answers)
            for answer in some
        ]
        facts = [search_facts(job, some) for job, some in zip(jobs, answers, strict=True)]
        return {
            **self.head(jobs[0], self.kind),
            "choices": choices,
            "usage": usage(jobs, answers),
            "search": facts[0] if len(facts) == 1 else facts,
        }

    def stream(self, fields: F, jobs: Sequence[SearchJob]) -> ChoiceChunks:
        """The searches one behind the other, each as far as it is decided."""
        options = fields.stream_options
        with_usage = bool(options and options.include_usage)
        return ChoiceChunks(self, jobs, with_usage, bool((fields.search or {}).get("events")))


class ChoiceChunks(ReplyStream):
    """The chunks of some searches. with_usage, with_search: what was asked for beside the text."""

    end = b"data: [DONE]\n\n"

    def __init__(
        self,
        endpoint: ChoicesEndpoint[Any],
        jobs: Sequence[SearchJob],
        with_usage: bool,
        with_search: bool,
    ) -> None:
        super().__init__(jobs)
        self._endpoint, self._with_usage, self._with_search = endpoint, with_usage, with_search

    def failed(self, error: ApiError) -> bytes:
        """In OpenAI's shape."""
        return event(error.body)

    async def parts(self) -> AsyncIterator[bytes]:
        """All chunks."""
        answers: list[list[Answer]] = []
        for number, job in enumerate(self.jobs):
            offset, sent = number * job.choices, ""
            if self._endpoint.talks:
                yield self._role(offset)
            async for _ in job.changes():
                for part in self._rounds(job, offset, thinks=not sent):
                    yield part
                if new := job.text[len(sent) :]:
                    sent = job.text
                    yield self._chunk(offset, {"content": new})
            await job.solution()
            answers.append(self._endpoint.answers(job))
            for part in self._answers(job, answers[-1], offset, sent):
                yield part
        if self._with_usage:
            yield self._event([], usage=usage(self.jobs, answers))

    def _rounds(self, job: SearchJob, index: int, *, thinks: bool) -> Iterator[bytes]:
        """What was decided since: for people, where there is a search to tell of, and programs.

        thinks: no text has gone out. Clients that get reasoning between two pieces of a text show
        two texts, cut anywhere.
        """
        rounds, job.rounds = job.rounds, []
        thinks &= self._endpoint.talks and job.outcome is None and not job.is_plain
        for summary in rounds:
            if thinks:
                said = str(summary)
                yield self._chunk(index, {"reasoning": said, "reasoning_content": said})
            if self._with_search:
                yield self._chunk(index, {}, search=vars(summary))

    def _answers(
        self, job: SearchJob, answers: Sequence[Answer], offset: int, sent: str
    ) -> Iterator[bytes]:
        """What is left of the first, all of the others, and how each has ended."""
        for answer in answers:
            index = offset + answer.index
            if answer.index and self._endpoint.talks:
                yield self._role(index)
            text = answer.behind("" if answer.index else sent)
            if text or answer.tokens:
                yield self._event([self._choice(index, {"content": text}, answer.tokens)])
            if answer.calls:
                calls = [{"index": number, **call} for number, call in enumerate(answer.calls)]
                yield self._chunk(index, {"tool_calls": calls})
            end = {**self._choice(index, {}), "finish_reason": answer.finish}
            facts = {} if answer.index else {"search": search_facts(job, answers)}
            yield self._event([end], **facts)

    def _role(self, index: int) -> bytes:
        # A text from the start: some clients show a null.
        return self._chunk(index, {"role": "assistant", "content": ""})

    def _chunk(self, index: int, said: dict[str, Any], **more: Any) -> bytes:
        return self._event([self._choice(index, said)], **more)

    def _choice(
        self, index: int, said: dict[str, Any], tokens: Sequence[AnswerToken] | None = None
    ) -> dict[str, Any]:
        logprobs = self._endpoint.logprobs(tokens)
        delta = self._endpoint.delta(said)
        return {"index": index, **delta, "finish_reason": None, "logprobs": logprobs}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = self._endpoint.head(self.jobs[0], self._endpoint.chunk)
        unused = {"usage": None} if self._with_usage else {}
        return event({**head, "choices": choices, **unused, **more})
