"""Frozen settings and recipes. Knows names and ranges; no torch, no models.

Each section is a frozen pydantic model that rejects unknown keys. A recipe is a YAML file with the
same sections; command-line options override it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from beamwright.errors import InputError
from beamwright.registry import declared_options, did_you_mean
from beamwright.units import (
    Duration,
    Names,
    Rate,
    Select,
    Size,
    Split,
    StepLimits,
    StopStrings,
    Text,
    TextOrNone,
)
from beamwright.yaml_file import read_yaml

MOST_CANDIDATES = 2**16
"""Most candidates, and most children of a step: each has a node, a draw and a place in a batch.

Some KB of host memory each before the first token. Repeated sampling goes to 10,000 samples
(arXiv 2407.21787).
"""

ELSEWHERE = ("openai:", "vllm:")
"""What names of generators begin with that a server, or an engine of its own, runs (`remote`)."""

Explore = Literal["lockstep", "continuous", "decoupled"]
"""How several problems in flight share the device, see `runtime.admission` and `runtime.engine`."""

Speculation = Literal["off", "exact", "truncate", "auto"]
"""Whether children of finished steps are decoded before selection has chosen among those."""

Sparse = Literal[
    "off",
    "auto",
    "exact",
    "pages",
    "quest",
    "tova",
    "ahead",
    "ahead-pages",
    "window",
    "asyncspade",
    "algorithm-1",
    "harmonic",
    "last",
]
"""Which tokens of a long path decoding attends to, see `sparse.rule`."""

Victims = Literal["tree", "lru", "cost"]
"""Whose KV leaves the device first, see `schedule.eviction`."""

_LONGEST_SHOWN = 120
_OF_SEVERAL = ("base", "settings", "grid", "dataset")  # of `evaluate.recipes`


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OpenSection(Section):
    """A section that also holds options of what it names; the room that declares them checks them.

    They are in `model_extra`, under their names.
    """

    model_config = ConfigDict(frozen=True, extra="allow")


class ModelSettings(OpenSection):
    """Which models run, where and in what precision; options of a declared verifier."""

    model: Text = "bundled"
    verifier: TextOrNone = None
    system_prompt: str | None = None
    chat_template: TextOrNone = None
    tokenizer: TextOrNone = None
    model_key: TextOrNone = None
    device: str = "cpu"
    verifier_device: str | None = None
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    attention: Literal["auto", "reference", "dense", "tree", "triton-dense", "triton-tree"] = "auto"
    context: int | None = Field(None, ge=1, description="cap on the model's context, in tokens")
    weights: Literal["auto", "int8", "int4"] = "auto"
    verifier_weights: Literal["auto", "int8", "int4"] = "auto"
    deterministic: bool = False

    @property
    def is_random(self) -> bool:
        """The model is a shape with random weights, there to be measured."""
        return self.model.startswith("random:")

    @property
    def runs_elsewhere(self) -> bool:
        """The generator is a server's, or an engine's of its own (`remote`)."""
        return self.model.startswith(ELSEWHERE)

    @property
    def default_verifier(self) -> str:
        """What scores steps where none is given: the bundled one knows the bundled models."""
        if self.is_random:
            return "logprob"
        return "bundled" if self.model.partition(":")[0] == "bundled" else "none"

    @property
    def scorer(self) -> str:
        """The verifier, given or default."""
        return self.default_verifier if self.verifier is None else self.verifier


class SamplingSettings(Section):
    """How one token is drawn from the logits."""

    temperature: float = Field(0.8, ge=0.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    top_logprobs: int = Field(0, ge=0, le=20, description="likeliest tokens kept beside each")


class StepSettings(Section):
    """Where a step, and a path, ends."""

    delimiter: str = Field("\n\n", min_length=1)
    step_tokens: int | None = Field(None, ge=1, description="fixed steps instead of the delimiter")
    max_step_tokens: int = Field(256, ge=1)
    step_limits: StepLimits = Field(
        None, min_length=1, description="longest step 1, 2, ...; the last stands for the rest"
    )
    max_tokens: int | None = Field(None, ge=1, description="per path, after the prompt")
    ignore_eos: bool = False
    stop_strings: StopStrings = Field((), max_length=16, description="texts that end a path")


class SearchSettings(OpenSection):
    """Which strategy, how wide, and how the final answer is chosen; options of the strategy."""

    search: str | None = None
    n: int = Field(16, ge=1, le=MOST_CANDIDATES)
    width: int = Field(4, ge=1, le=MOST_CANDIDATES)
    max_rounds: int = Field(40, ge=1)
    filter_duplicates: bool = False
    aggregate: Literal["last", "min", "prod", "mean"] | None = None
    choose: Literal["best", "majority", "weighted"] | None = None
    compat: Literal["search-and-learn"] | None = None
    seed: int = Field(0, ge=0)


class StopSettings(OpenSection):
    """What ends a search early, with the best so far. The tree up to there is the same.

    stop: names of declared stops, whose options are beside it.
    """

    deadline: Duration = None
    token_budget: int | None = Field(None, ge=1, description="generated tokens")
    stop_votes: bool = False
    stop_score: float | None = Field(None, allow_inf_nan=False)
    stop: Names = None


class MemorySettings(Section):
    """One memory number, and its parts where a user wants to name them."""

    memory: Size = None
    kv_memory: Size = None
    host_memory: Size = None
    split: Split = "auto"


class ScheduleSettings(OpenSection):
    """How beams are arranged on the device: the time, and never the tree, but for one value.

    `speculation="truncate"` grows another tree, which depends on the time.
    """

    schedule: str = "auto"
    planner: Literal["ranges", "greedy"] = "ranges"
    inter_beam: bool = True
    balance: bool = True
    prefetch: bool = True
    reuse: bool = True
    evict: Literal["host", "recompute"] = "host"
    victims: Victims = "tree"
    link_bandwidth: Rate = None
    max_batch: int | None = Field(None, ge=1, description="most beams decoded together")
    batching: Literal["auto", "continuous", "grouped"] = "auto"
    explore: Explore = "continuous"
    min_problems: int | None = Field(None, ge=1, description="in flight, before others begin")
    executor: Literal["auto", "plain", "overlapped"] = "auto"
    speculation: Speculation = "auto"
    verify_ahead: Literal["slack", "never"] = "never"
    write_back: Literal["auto", "eager", "lazy"] = "auto"
    graphs: Literal["auto", "on", "off"] = "auto"
    score_cache: TextOrNone = None


class SparseSettings(Section):
    """Which tokens decoding attends to where paths are long. Changes the tree."""

    sparse: Sparse = "off"
    select: Select = Field(2048, description="tokens of each KV head, all, or a share of them")
    sparse_from: int = Field(4096, ge=0, description="tokens of a path up to which all are read")
    sparse_layers: int = Field(0, ge=0, description="first layers that read all")
    sparse_lag: int = Field(1, ge=1, description="tokens that a prediction looks ahead")
    sparse_window: int = Field(16, ge=1, description="queries that a prediction reads")
    sparse_frame: Literal["post", "pre"] = "post"
    sparse_correct: float | None = Field(None, gt=-1.0, le=1.0, allow_inf_nan=False)
    sparse_home: Literal["device", "host"] = "device"
    sparse_rank: Literal["auto", "inline", "thread"] = "auto"
    late: Literal["wait", "previous"] = "wait"


class Settings(Section):
    """Everything one run depends on; the same sections as a recipe file."""

    model: ModelSettings = ModelSettings()
    sampling: SamplingSettings = SamplingSettings()
    step: StepSettings = StepSettings()
    search: SearchSettings = SearchSettings()
    stop: StopSettings = StopSettings()
    memory: MemorySettings = MemorySettings()
    schedule: ScheduleSettings = ScheduleSettings()
    sparse: SparseSettings = SparseSettings()

    @classmethod
    def build(cls, recipe: str | os.PathLike[str] | None = None, **options: Any) -> Settings:
        """Settings from an optional recipe and flat options, which override it.

        A flat option belongs to the one section that has a field of its name; `None` means
        "not given". Raises InputError with one line on an unknown or impossible value.
        """
        sections: dict[str, dict[str, Any]] = load_recipe(Path(recipe)) if recipe else {}
        source = f"recipe {recipe}: " if recipe else ""
        owners = option_owners()
        for section, keys in sections.items():
            if section not in cls.model_fields:
                raise InputError(source + _no_section(section, owners))
            for name in keys:
                if owners.get(name) != section:
                    raise InputError(source + _unknown(name, owners, section))
        return cls._with(sections, options, source)

    def changed(self, **options: Any) -> Settings:
        """The same settings but for these flat options; `None` means "not given".

        Another strategy does not inherit the options of the present one. Raises InputError as
        `build`.
        """
        sections = {
            name: getattr(self, name).model_dump(exclude_unset=True)
            for name in type(self).model_fields
        }
        if options.get("search") not in (None, self.search.search):
            for name in self.search.model_extra or ():
                del sections["search"][name]
        return self._with(sections, options)

    @classmethod
    def _with(
        cls, sections: dict[str, dict[str, Any]], options: dict[str, Any], source: str = ""
    ) -> Settings:
        owners = option_owners()
        for name, value in options.items():
            if name not in owners:
                raise InputError(_unknown(name, owners))
            if value is not None:
                sections.setdefault(owners[name], {})[name] = value
        try:
            return cls.model_validate(sections)
        except ValidationError as error:
            raise InputError(source + describe_invalid(error)) from error


def option_owners() -> dict[str, str]:
    """The section of every option: fields of the sections, and what strategies and others declare.

    Strategies and schedules are known once their rooms are imported.
    """
    fields = {
        name: section
        for section, info in Settings.model_fields.items()
        for name in _fields_of(info)
    }
    return {**declared_options(), **fields}


def load_recipe(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a YAML recipe, not yet validated.

    Raises:
        InputError: if the file is missing, is not YAML, or is not a mapping of mappings.
    """
    content = read_yaml(path, "recipe")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"recipe {path}: expected sections such as 'search:', not a plain value")
    for section, keys in content.items():
        if section in Settings.model_fields and not isinstance(keys, dict):
            raise InputError(f"recipe {path}: section {section!r} must hold keys and values")
    return content


def _short(value: Any) -> str:
    """A value as an error shows it, whatever a file may hold in its place."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _fields_of(section: FieldInfo) -> Iterable[str]:
    return section.annotation.model_fields  # type: ignore[union-attr, no-any-return]


def _no_section(key: str, owners: dict[str, str]) -> str:
    """What is wrong with a key of a recipe that is no section."""
    if key in _OF_SEVERAL:
        return f"{key!r} makes it a recipe of several settings, for `beamwright eval --recipe`"
    if key in owners:
        return f"unknown section {key!r}: write it as `{owners[key]}: {{{key}: ...}}`"
    hint = did_you_mean(key, Settings.model_fields).rstrip()
    return f"unknown option {key!r}" + (f": {hint}" if hint else "")


def _unknown(name: str, owners: dict[str, str], section: str | None = None) -> str:
    """What is wrong with a name that no option has, or none of this section."""
    where = name if section is None else f"{section}.{name}"
    if section is not None and name in owners:
        return f"unknown option {where!r}: {name} belongs in section {owners[name]!r}"
    hint = did_you_mean(name, owners).rstrip()
    return f"unknown option {where!r}" + (f": {hint}" if hint else "")


def describe_invalid(error: ValidationError, where: str = "") -> str:
    """One line of what pydantic found. where: of the settings, what goes before the option."""
    first = error.errors()[0]
    place = where + ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown option {place!r}"
    names = [part for part in first["loc"] if isinstance(part, str)]  # numbers are list places
    option = (names or [place])[-1].replace("_", "-")
    if first["type"] == "value_error":  # of a parser above, whose words hold the value
        return f"{place} (--{option}): {first['ctx']['error']}"
    return f"{place} (--{option}): {first['msg']}, got {_short(first['input'])}"
