"""Model names and efforts: how a search is asked for by clients that know of none.

`NAME` is the server's own recipe, `NAME:beam` and so on each strategy, `NAME:plain` one sample:
for the titles and tags of chat UIs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from beamwright.errors import InputError
from beamwright.search import STRATEGIES, make_strategy
from beamwright.sections import SearchSettings
from beamwright.serve.errors import ApiError

PLAIN: Mapping[str, Any] = MappingProxyType(
    {"search": "best-of-n", "n": 1, "width": 1, "choose": "best", "max_rounds": 100_000}
)

EFFORTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "none": PLAIN,
        "minimal": PLAIN,
        "low": {"n": 4, "width": 2},
        "medium": {},
        "high": {"n": 64, "width": 4},
        "xhigh": {"n": 256, "width": 4},
    }
)
"""What `reasoning_effort` means: `medium` is the server's recipe."""


@dataclass(frozen=True)
class ModelNames:
    """The names that a server answers to. name: of its generator; search: its recipe."""

    name: str
    search: SearchSettings

    def ids(self) -> list[str]:
        """All of them, the recipe first; strategies that the recipe's n and width suit."""
        methods = [name for name in STRATEGIES if self._suits(name)]
        return [self.name, f"{self.name}:plain", *(f"{self.name}:{each}" for each in methods)]

    def options(self, model: str, effort: str | None) -> dict[str, Any]:
        """The search that is asked for.

        Raises:
            ApiError: 404 for a model, 400 for an effort that there is not.
        """
        if effort is not None and effort not in EFFORTS:
            known = ", ".join(EFFORTS)
            raise ApiError(400, f"reasoning_effort: {effort}; known: {known}", "reasoning_effort")
        name, _, method = model.rpartition(":") if model not in (self.name,) else (model, "", "")
        if model == self.name:
            found: Mapping[str, Any] = {}
        elif name == self.name and method == "plain":
            return dict(PLAIN)
        elif name == self.name and method in STRATEGIES:
            found = {"search": method}
        else:
            raise ApiError(
                404, f"the model {model!r} does not exist here", "model", "model_not_found"
            )
        more = EFFORTS[effort or "medium"]
        return {**found, **more} if more is not PLAIN else dict(PLAIN)

    def _suits(self, method: str) -> bool:
        settings = self.search.model_copy(update={"search": method})
        row = STRATEGIES[method]
        shared = {name: getattr(settings, name) for name in SearchSettings.model_fields}
        try:
            make_strategy(SearchSettings(**{**shared, "search": row.name}))
        except InputError:
            return False
        return True
