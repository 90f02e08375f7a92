"""VllmSource: texts from vLLM's engine, loaded here (extra `vllm`).

It batches and keeps KV as it always does. Requests are added while others run, and every wait is so
many of its steps.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from beamwright.errors import InputError, UnavailableError, line_of
from beamwright.io import extra
from beamwright.remote.writer import Continuation, PromptRequest, Reply
from beamwright.sections import ModelSettings


class VllmSource:
    """A `TextSource` over `vllm.LLM`'s engine.

    options: of `vllm.LLM`. settings: their precision and context are its own where they are given.

    Raises:
        UnavailableError: if vLLM is not installed; InputError: if it cannot load the model.
    """

    most: int | None = None
    token_ids = True

    def __init__(self, folder: Path, options: Mapping[str, Any], settings: ModelSettings) -> None:
        needs = "--model vllm:... needs vLLM: pip install vllm"
        self._vllm, _ = extra("vllm", needs), extra("vllm.sampling_params", needs)
        given = {
            "enable_prefix_caching": True,
            "generation_config": "vllm",  # or a checkpoint's own sampling would come in
            "dtype": settings.dtype,
            "max_model_len": settings.context,
            **options,
        }
        try:
            self._engine: Any = self._vllm.LLM(str(folder), **given).llm_engine
            context = int(self._engine.vllm_config.model_config.max_model_len)
        except Exception as error:  # whatever it finds wrong with a model, or an option
            raise InputError(f"--model {settings.model}: {line_of(error)}") from error
        self.context: int | None = context
        self._numbers = count()
        self._keys: dict[str, Hashable] = {}
        self._refused: list[Reply] = []

    def ask(self, key: Hashable, prompt: PromptRequest) -> None:
        """See `TextSource`."""
        name, sampling = str(next(self._numbers)), prompt.sampling
        params = self._vllm.SamplingParams(
            n=prompt.count,
            seed=prompt.seed,
            max_tokens=prompt.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            min_p=sampling.min_p or 0.0,
            stop=list(prompt.stops),
            stop_token_ids=list(prompt.stop_ids),
            include_stop_str_in_output=True,
            ignore_eos=prompt.ignore_eos,
            logprobs=0,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        try:
            tokens = self._vllm.TokensPrompt(prompt_token_ids=list(prompt.token_ids))
            self._engine.add_request(name, tokens, params)
            self._keys[name] = key
        except Exception as error:  # of several kinds: too long a prompt, an unknown token
            self._refused.append(_failed(key, line_of(error)))

    def wait(self, timeout_s: float) -> list[Reply]:
        """See `TextSource`. It computes as long as that."""
        replies, self._refused = self._refused, []
        until = time.monotonic() + timeout_s
        try:
            while not replies and self._keys and time.monotonic() < until:
                done = [output for output in self._engine.step() if output.finished]
                replies = [self._reply(each) for each in done if each.request_id in self._keys]
        except Exception as error:  # the engine is dead: nothing is answered any more
            keys, self._keys = list(self._keys.values()), {}
            replies = [_failed(key, line_of(error)) for key in keys]
        return replies

    def cancel(self, key: Hashable) -> None:
        """See `TextSource`."""
        for name in [name for name, known in self._keys.items() if known is key]:
            del self._keys[name]
            self._engine.abort_request([name])

    def close(self) -> None:
        """Its memory is given back when the process ends."""
        for key in list(self._keys.values()):
            self.cancel(key)

    def _reply(self, output: Any) -> Reply:
        key = self._keys.pop(output.request_id)
        reasons = {text.finish_reason for text in output.outputs}
        if not reasons <= {"stop", "length"}:
            return _failed(key, f"a text ended by {reasons}")
        written = [_written(text) for text in sorted(output.outputs, key=lambda text: text.index)]
        return Reply(key, written, len(output.prompt_token_ids), output.num_cached_tokens)


def _written(output: Any) -> Continuation:
    ids = tuple(output.token_ids)
    logprobs = zip(ids, output.logprobs or (), strict=False)
    values = tuple(float(likeliest[token].logprob) for token, likeliest in logprobs)
    if output.finish_reason == "length":
        return Continuation(output.text, ids, values, "length")
    by_string = isinstance(output.stop_reason, str)
    return Continuation(output.text, ids, values, "stop" if by_string else "eos")


def _failed(key: Hashable, why: str) -> Reply:
    return Reply(key, error=UnavailableError(f"vLLM: {why}"))
