"""`POST /v1/score`: what the verifier thinks of steps that a client gives; nothing is generated.

It goes the way of a search: the same queue and bounds, a place among the requests, a line on the
page. Scores come between iterations of the searches that are under way.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from beamwright.serve.body import ITEMS, parsed
from beamwright.serve.chat import Message, conversation
from beamwright.serve.endpoint import Endpoint
from beamwright.serve.errors import ApiError
from beamwright.serve.job import SearchJob, text_of

_MOST_STEPS = 1024
_Text = Annotated[str, Field(strict=True)]
_Path = Annotated[list[_Text], Field(max_length=_MOST_STEPS, fail_fast=True)]


class ScoreFields(BaseModel):
    """What is scored: a problem, or messages, and the steps of one path, or of several.

    delimiter: ends every step but the last of a path, where it does not stand there; without it the
    server's. A path ends with its last step.
    """

    model_config = ConfigDict(extra="allow")
    model: Annotated[str, Field(strict=True, min_length=1)] | None = None
    problem: _Text | None = None
    messages: Annotated[list[Message], ITEMS] | None = Field(None, min_length=1)
    steps: _Path | Annotated[list[_Path], ITEMS]
    delimiter: _Text | None = None
    aggregate: Literal["last", "min", "prod", "mean"] | None = None


class ScoreEndpoint(Endpoint):
    """Scores of given steps, one each, and of the paths that they make."""

    path, takes = "/v1/score", ScoreFields

    def read(self, body: dict[str, Any]) -> list[SearchJob]:
        """One job for all paths."""
        fields, limits = parsed(ScoreFields, body), self.queue.limits
        model = fields.model or self.queue.reader.name
        self.queue.reader.options(model)
        match fields.problem, fields.messages:
            case str() as problem, None:
                asked: Any = problem
            case None, list() as messages:
                asked = conversation(messages, "messages")
            case _:
                raise ApiError(400, "problem: give either it or messages", "problem")
        paths: list[list[str]] = [p for p in fields.steps if isinstance(p, list)]
        paths = paths or [[step for step in fields.steps if isinstance(step, str)]]
        if len(paths) > limits.n:
            raise ApiError(400, f"steps: {len(paths)} paths; at most {limits.n} here", "steps")
        about = {"problem": text_of(asked), "model": model, "method": "score", "n": len(paths)}
        options: dict[str, Any] = fields.model_dump(include={"aggregate", "delimiter"})
        param = "problem" if fields.messages is None else "messages"
        about |= {"width": 1, "seed": 0}
        options["deadline"] = limits.seconds
        return [SearchJob(model, asked, options, about, len(paths), param=param, paths=paths)]

    def whole(self) -> dict[str, Any]:
        """A score for each path, as vLLM has them, and for each of its steps; and what makes them
        doubtful."""
        (job,) = self.jobs
        solution = job.found
        read, written = solution.tokens.verifier_prefilled, solution.tokens.verifier_generated
        return {
            "id": job.id,
            "object": "list",
            "created": int(job.created_s),
            "model": job.model,
            "data": [
                {"index": index, "object": "score", "score": path.score, "scores": path.step_scores}
                for index, path in enumerate(solution.candidates)
            ],
            "warnings": list(solution.warnings),
            "usage": {
                "prompt_tokens": read,
                "completion_tokens": written,
                "total_tokens": read + written,
            },
        }
