"""OpenAI's chat completions and text completions: request fields, whole replies and chunks.

The events of a stream have no names and no `id:` or `retry:` fields, since OpenAI clients fail on
such events.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from beamwright.errors import InputError
from beamwright.serve import answers
from beamwright.serve.body import (
    INTEGRAL,
    ITEMS,
    ApiError,
    Count,
    Fields,
    Whole,
    api_error,
    parse_fields,
    read_arguments,
)
from beamwright.serve.endpoint import Endpoint, format_event
from beamwright.serve.job import ReplyText, SearchJob, strip_round_lines
from beamwright.solver.solution import Candidate
from beamwright.tree import Conversation, RawPrompt, StopReason

ROLE = {"role": "assistant", "content": ""}  # "" and not null: some clients display null as text

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # a thought's names in chat templates
_MOST_PROMPTS = 32
_PROMPTS = Field(max_length=_MOST_PROMPTS, fail_fast=True)
_Ids = Annotated[list[Whole], Field(fail_fast=True)]  # bounded by ServerLimits.values


class Part(BaseModel):
    """A part of a message's content; only parts with text are supported."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = Field(None, strict=True)


class Function(BaseModel):
    """A function that the model may call. Further fields are passed on to the chat template."""

    model_config = ConfigDict(extra="allow")
    name: str


class Tool(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class CalledFunction(BaseModel):
    """A function call of the model. arguments: an object, parsed from JSON for chat templates."""

    name: str
    arguments: Annotated[Any, BeforeValidator(read_arguments)] = {}


class ToolCall(BaseModel):
    """A tool call in an earlier message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message of a conversation. Further fields are passed on to the chat template."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], ITEMS] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], ITEMS] | None = None

    refusal: str | None = None

    @property
    def has_more(self) -> bool:
        """True if the message has a call, a thought or a refusal, so that it needs no content."""
        return any((self.tool_calls, self.reasoning_content, self.reasoning, self.refusal))


class ChatFields(Fields):
    """Fields of a chat completion request."""

    messages: Annotated[list[Message], ITEMS] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = Field(None, strict=True)
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20), INTEGRAL] | None = None
    tools: Annotated[list[Tool], ITEMS] | None = None
    tool_choice: Literal["auto", "none"] | None = None


class CompletionFields(Fields):
    """Fields of a text completion request.

    prompt: texts or token ids, which are continued without a chat template.
    logprobs, return_token_ids, include_stop_str_in_output: vLLM's fields, which request the
        log-probabilities and ids of the sampled tokens, and a text that includes the stop string
        that ended it. Beamwright itself sends them to a remote generator.
    """

    prompt: str | Annotated[list[str], _PROMPTS] | _Ids | Annotated[list[_Ids], _PROMPTS]
    logprobs: Annotated[int, Field(strict=True, ge=0, le=1), INTEGRAL] | None = None
    return_token_ids: bool | None = Field(None, strict=True)
    include_stop_str_in_output: bool | None = Field(None, strict=True)


def make_conversation(
    messages: list[Message], param: str, args: Mapping[str, Any] | None = None
) -> Conversation:
    """Convert messages to a conversation in the form that chat templates expect.

    param: name of the field with the messages, for errors. args: arguments of the chat template.

    Raises:
        ApiError: 400 for a message without content, an unsupported part, or wrong `args`.
    """
    shown = []
    for number, message in enumerate(messages):
        text, where = message.content, f"{param}[{number}].content"
        if text is None and (message.role != "assistant" or not message.has_more):
            raise ApiError(
                400, f"{where}: the field is missing", where, "missing_required_parameter"
            )
        if not isinstance(text, str):
            texts = []
            for i, part in enumerate(text or ()):
                where = f"{param}[{number}].content[{i}]"
                if part.type not in ("text", "input_text", "output_text") or part.text is None:
                    said = f"{where}: a part must be a text, not of type {part.type}"
                    raise ApiError(400, said, where, "unsupported")
                texts.append(part.text)
            text = "\n".join(texts)
        given = message.model_dump(exclude={"content"}, exclude_none=True)
        thoughts = [given.pop(name, "") for name in ("reasoning_content", "reasoning")]
        if thought := strip_round_lines(next(filter(None, thoughts), "")):
            given |= dict.fromkeys(_THOUGHTS, thought)
        shown.append({**given, "content": text})
    try:
        return Conversation(tuple(shown), template_args=args or {})
    except InputError as error:
        raise api_error(error, "chat_template_kwargs") from error


def _thought(text: str) -> dict[str, Any]:
    """Return a thought under both field names that clients read.

    vLLM and OpenRouter use `reasoning`; DeepSeek and llama-server use `reasoning_content`.
    """
    return {"reasoning": text, "reasoning_content": text}


class ChoicesEndpoint(Endpoint):
    """An endpoint whose replies have `choices`: the base of chat and text completions.

    kind, chunk: the value of the field `object` in a whole reply, and in a chunk of a stream.
    prefix: the prefix of the ids of replies.
    talks: True if replies have roles, and thoughts apart from the text.
    """

    kind: ClassVar[str]
    chunk: ClassVar[str]
    prefix: ClassVar[str]
    talks: ClassVar[bool] = False
    end = b"data: [DONE]\n\n"
    fields: Fields

    @abstractmethod
    def content(self, job: SearchJob, candidate: Candidate) -> dict[str, Any]:
        """Build the fields of one choice that hold its content, for a whole reply."""

    @abstractmethod
    def delta(self, said: dict[str, Any]) -> dict[str, Any]:
        """Build the fields of a chunk's choice that hold new content."""

    def reply_and_calls(
        self, job: SearchJob, candidate: Candidate
    ) -> tuple[ReplyText, list[dict[str, Any]]]:
        """Return a candidate's reply, split into thought and text, and its tool calls."""
        node = job.reply_nodes(candidate)[-1]
        return answers.raw_reply(node, self.queue.solver.codec, job.stops), []

    def logprobs(self, job: SearchJob, candidate: Candidate) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice; None if the request does not ask for them."""
        del job, candidate
        return None

    def build_reply(self) -> dict[str, Any]:
        """Build the reply to a request without a stream; choices are in the order of the jobs."""
        choices = [
            {
                "index": number * job.choices + index,
                "finish_reason": answers.finish_reason_of(candidate),
                "logprobs": self.logprobs(job, candidate),
                **self.content(job, candidate),
            }
            for number, job in enumerate(self.jobs)
            for index, candidate in enumerate(answers.choices_of(job))
        ]
        facts = [*map(self.facts, self.jobs)]
        return {
            **self._head(self.kind),
            "choices": choices,
            "usage": answers.usage_fields(self.jobs),
            "search": facts[0] if len(facts) == 1 else facts,
        }

    async def stream_events(self) -> AsyncIterator[bytes]:
        """Stream the jobs in order, each as soon as its text is final."""
        for number, job in enumerate(self.jobs):
            offset, sent = number * job.choices, ReplyText()
            if self.talks:
                yield self._chunk(offset, ROLE)
            async for _ in job.changes():
                for part in self._rounds(job, offset, thinks=self.talks and not any(sent)):
                    yield part
                before, sent = sent, job.told  # read `told` once: it may grow between two chunks
                for part in self._told(offset, before, sent):
                    yield part
            await job.solution()
            for part in self._ends(job, offset, sent):
                yield part
        if self._with_usage:
            yield format_event(
                {**self._head(self.chunk), "choices": [], "usage": answers.usage_fields(self.jobs)}
            )

    def _told(
        self, index: int, sent: ReplyText, now: ReplyText, logprobs: dict[str, Any] | None = None
    ) -> Iterator[bytes]:
        """Yield chunks with the parts of the thought and text in `now` that were not `sent` yet.

        logprobs: log-probabilities of the whole text, for its last chunk; None for no field.
        """
        if (new := answers.unsent_text(now.thought, sent.thought)) and self.fields.shows_thoughts:
            yield self._chunk(index, _thought(new))
        if (new := answers.unsent_text(now.said, sent.said)) or logprobs:
            yield self._chunk(index, {"content": new}, logprobs=logprobs)

    def _ends(self, job: SearchJob, offset: int, sent: ReplyText) -> Iterator[bytes]:
        """Yield the last chunks of a job: the rest of its first choice, its other choices, and
        the finish reason of each."""
        for index, candidate in enumerate(answers.choices_of(job), offset):
            if index > offset and self.talks:
                yield self._chunk(index, ROLE)
            now, calls = self.reply_and_calls(job, candidate)
            before = sent if index == offset else ReplyText()
            yield from self._told(index, before, now, self.logprobs(job, candidate))
            if calls:
                numbered = [{"index": number, **call} for number, call in enumerate(calls)]
                yield self._chunk(index, {"tool_calls": numbered})
            finish = "tool_calls" if calls else answers.finish_reason_of(candidate)
            facts = {"search": self.facts(job)} if index == offset else {}
            yield self._chunk(index, {}, finish, **facts)

    def _rounds(self, job: SearchJob, index: int, *, thinks: bool) -> Iterator[bytes]:
        """Yield a chunk for each round that was decided since the last call.

        A chunk has a readable line in the field of thoughts, and, if the request asks for `events`,
        the round's numbers for programs. With n of 1 there are no readable lines.
        thinks: True while no text was sent. After the first text, readable lines are left out,
            since clients show two separate texts if they receive reasoning in between.
        """
        thinks &= job.outcome is None and job.options.get("n") != 1 and self.fields.shows_thoughts
        rounds, job.rounds = job.rounds, []
        for summary in rounds:
            if thinks:
                yield self._chunk(index, _thought(str(summary)))
            if (self.fields.search or {}).get("events"):
                yield self._chunk(index, {}, search=vars(summary))

    def error_event(self, error: ApiError) -> bytes:
        """Build the event of an error in OpenAI's format."""
        return format_event(error.body)

    @property
    def _with_usage(self) -> bool:
        options = self.fields.stream_options
        return bool(options and options.include_usage)

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the fields that begin every reply and every chunk."""
        job = self.jobs[0]
        return {
            "id": self.prefix + job.number,
            "object": kind,
            "created": int(job.created_s),
            "model": job.model,
            "system_fingerprint": self.queue.fingerprint,
        }

    def _chunk(
        self,
        index: int,
        said: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, **self.delta(said), "finish_reason": finish, "logprobs": logprobs}
        unused = {"usage": None} if self._with_usage else {}
        return format_event({**self._head(self.chunk), "choices": [choice], **unused, **more})


class ChatEndpoint(ChoicesEndpoint):
    """`POST /v1/chat/completions`: the next message of a conversation, found by a search."""

    takes = ChatFields
    path, kind, chunk = "/v1/chat/completions", "chat.completion", "chat.completion.chunk"
    prefix, talks = "chatcmpl-", True
    fields: ChatFields
    _tools = False

    def make_jobs(self, body: dict[str, Any]) -> list[SearchJob]:
        """Turn the body into one search."""
        self.fields = fields = parse_fields(ChatFields, body)
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs: true", "top_logprobs")
        self.streamed = bool(fields.stream)
        self._tools = bool(fields.tools) and fields.tool_choice != "none"
        problem = make_conversation(fields.messages, "messages", fields.chat_template_kwargs)
        if self._tools:
            codec = self.queue.solver.codec
            if codec is None or not codec.takes_tools:
                said = "this model's chat template does not support tools; send tool_choice none"
                raise ApiError(400, f"tools: {said}", "tools", "unsupported")
            tools = tuple(tool.model_dump() for tool in fields.tools or ())
            problem = replace(problem, tools=tools)
        limit = fields.max_completion_tokens or fields.max_tokens
        top = (fields.top_logprobs or 0) if fields.logprobs else None
        return [self.queue.reader.make_job(fields, problem, limit, top_logprobs=top)]

    def content(self, job: SearchJob, candidate: Candidate) -> dict[str, Any]:
        """Build the message of a choice, and the finish reason if it has tool calls."""
        told, calls = self.reply_and_calls(job, candidate)
        message: dict[str, Any] = {"role": "assistant", "content": told.said, "refusal": None}
        if told.thought and self.fields.shows_thoughts:
            message |= _thought(told.thought)
        if not calls:
            return {"message": message}
        message |= {"content": told.said or None, "tool_calls": calls}
        return {"message": message, "finish_reason": "tool_calls"}

    def reply_and_calls(
        self, job: SearchJob, candidate: Candidate
    ) -> tuple[ReplyText, list[dict[str, Any]]]:
        """Return a candidate's reply and its tool calls; no calls if the request has no tools."""
        told = answers.split_reply(job.reply_nodes(candidate)[-1])
        said, calls = answers.split_tool_calls(told.said) if self._tools else (told.said, [])
        return told._replace(said=said), calls

    def logprobs(self, job: SearchJob, candidate: Candidate) -> dict[str, Any] | None:
        """Return each token with its bytes and log-probability; None without `logprobs`."""
        if not self.fields.logprobs:
            return None
        codec = self.queue.solver.codec
        pieces = [] if codec is None else codec.token_bytes
        content = answers.token_logprobs(job, candidate, pieces, self.fields.top_logprobs or 0)
        return {"content": content, "refusal": None}

    def delta(self, said: dict[str, Any]) -> dict[str, Any]:
        """Build the `delta` of a chunk's choice."""
        return {"delta": said}


class CompletionsEndpoint(ChoicesEndpoint):
    """`POST /v1/completions`: the continuation of each prompt."""

    takes = CompletionFields
    path, kind, chunk = "/v1/completions", "text_completion", "text_completion"
    prefix = "cmpl-"
    fields: CompletionFields

    def make_jobs(self, body: dict[str, Any]) -> list[SearchJob]:
        """Turn the body into one search per prompt."""
        self.fields = fields = parse_fields(CompletionFields, body)
        for name in ("logprobs", "return_token_ids", "include_stop_str_in_output"):
            if fields.stream and getattr(fields, name):
                raise ApiError(400, f"{name}: not supported with stream: true", name, "unsupported")
        self.streamed, prompt = bool(fields.stream), fields.prompt
        is_one = isinstance(prompt, str) or any(isinstance(token, int) for token in prompt)
        prompts: list[Any] = [prompt] if is_one else list(prompt)
        if not prompts:
            raise ApiError(400, f"prompt: must be 1 to {_MOST_PROMPTS} prompts", "prompt")
        given = (text if isinstance(text, str) else tuple(text) for text in prompts)
        reader, limit = self.queue.reader, fields.max_tokens
        # A remote generator returns the log-probability of the sampled token only, so do not
        # request those of other likely tokens.
        top = fields.logprobs if self.queue.solver.remote is None else None
        return [reader.make_job(fields, RawPrompt(each), limit, "prompt", top) for each in given]

    def content(self, job: SearchJob, candidate: Candidate) -> dict[str, Any]:
        """Build a choice's text, with the token ids and log-probabilities that are requested."""
        fields, codec = self.fields, self.queue.solver.codec
        text = self.reply_and_calls(job, candidate)[0].said
        steps = job.reply_nodes(candidate)
        ids = [token for step in steps for token in step.token_ids]
        if fields.include_stop_str_in_output and candidate.stop == StopReason.STOP_STRING and codec:
            drawn = codec.decode(ids)
            text += next((stop for stop in job.stops if drawn.startswith(text + stop)), "")
        more: dict[str, Any] = {"token_ids": ids} if fields.return_token_ids else {}
        if fields.logprobs is not None:
            pieces = [] if codec is None else codec.token_bytes
            more["logprobs"] = answers.completion_logprobs(job, candidate, pieces, text)
        return {"text": text, **more}

    def delta(self, said: dict[str, Any]) -> dict[str, Any]:
        """Build the new text of a chunk's choice."""
        return {"text": said.get("content", "")}
