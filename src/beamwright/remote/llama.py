"""llama-server's own protocol, `/completion`: token ids both ways, and how each text has ended.

Its OpenAI endpoint says neither. A request that is silent is sampled as a chat's (top-k 40, top-p
0.95, min-p 0.05, and whatever the server was started with), so all that can change a draw is said:
the samplers that there are here, in their order here, and no others.

It does not say how likely the tokens of a stop string were, nor those before the last of a
character. With `ignore_eos` it never draws the end, where others draw it and go on.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from beamwright.remote.completions import Dialect, count_of, ids_of, logprobs_of, text_of
from beamwright.remote.writer import Continuation, PromptRequest, Reply

OWNER = "llamacpp"  # of its models in `/v1/models`
CROWDED = "Context size has been exceeded"  # by all slots together, where they share one KV cache
_ENDS: Mapping[object, Literal["stop", "eos", "length"]] = {
    "word": "stop",
    "eos": "eos",
    "limit": "length",
}
_FIELDS = (
    "index", "content", "tokens", "stop_type", "stopping_word", "tokens_evaluated", "timings",
    "completion_probabilities",
)  # fmt: skip


@dataclass(frozen=True)
class LlamaServer(Dialect):
    """Of texts for one prompt, each takes one of the server's slots.

    context: tokens of a slot; None: not said.
    """

    token_bytes: int = 2048  # it says each token twice, and byte by byte
    token_ids: bool = True
    context: int | None = None

    @classmethod
    def of(cls, url: str, props: Any) -> LlamaServer:
        """As its `/props` say."""
        context = count_of(props, "default_generation_settings", "n_ctx")
        slots = count_of(props, "total_slots") or 1
        return cls(f"{url}/completion", most=slots, context=context or None)

    def body(self, model: str, prompt: PromptRequest) -> dict[str, Any]:
        """See `Dialect`."""
        sampling = prompt.sampling
        return {
            "model": model,
            "prompt": list(prompt.token_ids),
            "n_predict": prompt.max_tokens,
            "n_cmpl": prompt.count,
            "stop": list(prompt.stops),
            "seed": prompt.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or 0.0,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            **{"repeat_penalty": 1.0, "dynatemp_range": 0.0, "mirostat": 0, "min_keep": 0},
            **{"logit_bias": [], "grammar": "", "ignore_eos": prompt.ignore_eos},
            **{"n_probs": 1, "post_sampling_probs": False, "return_tokens": True},
            **{"cache_prompt": True, "stream": False, "response_fields": _FIELDS},
        }

    def reply_of(self, key: Hashable, answer: Any, stops: Sequence[str]) -> Reply:
        """See `Dialect`."""
        del stops  # it says which
        every = answer if isinstance(answer, list) else [answer]
        texts = sorted(every, key=lambda text: int(text["index"]))
        first = texts[0]
        cached = count_of(first, "timings", "cache_n")  # `tokens_cached` counts what it will have
        read = count_of(first, "tokens_evaluated")
        return Reply(key, [_written(text) for text in texts], read, cached)


def _written(said: Mapping[str, Any]) -> Continuation:
    ended = _ENDS.get(said["stop_type"])
    if ended is None:
        raise ConnectionAbortedError(f"a text ended for the reason {said['stop_type']!r}")
    ids, text = ids_of(said["tokens"]), text_of(said["content"])
    if not ids:
        raise ValueError("it does not say which tokens it drew")
    if ended == "stop":  # it is cut off
        text += text_of(said["stopping_word"])
    values = [each["logprob"] for each in said.get("completion_probabilities") or ()]
    return Continuation(text, ids, logprobs_of(values), ended)
