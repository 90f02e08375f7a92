"""Frozen settings, recipes and byte sizes. Knows names and ranges; no torch, no models.

Each section is a frozen pydantic model that rejects unknown keys. A recipe is a YAML file with the
same sections; command-line options override it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from beamwright.errors import InputError
from beamwright.yaml_file import read_yaml

_LONGEST_SHOWN = 120
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `7GiB`, `512MiB`, `4GB` or a plain number of bytes.

    Raises:
        InputError: if the text is not a size, or is not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        num_bytes = text
    else:
        match = _SIZE.match(str(text))
        if match is None or match[2].upper() not in _UNITS:
            raise InputError(f"{text!r} is not a size: write 7GiB, 512MiB or 4GB")
        num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if num_bytes <= 0:
        raise InputError(f"a size must be positive, not {text!r}")
    return num_bytes


def _size_or_none(value: Any) -> Any:
    if value is None:
        return None
    try:
        return parse_size(value)
    except InputError as error:
        raise ValueError(str(error)) from error


def _rate_or_none(value: Any) -> Any:
    return _size_or_none(value.removesuffix("/s") if isinstance(value, str) else value)


def _numbers_or_none(value: Any) -> Any:
    """`64,64,2048` as numbers."""
    return value.split(",") if isinstance(value, str) else value


_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_duration(text: str | float) -> float:
    """Seconds of a duration such as `30s`, `2m`, `1h` or a plain number of seconds.

    Raises:
        InputError: if the text is not a duration, or is not positive.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        match = _DURATION.match(str(text))
        if match is None or match[2].lower() not in _SECONDS:
            raise InputError(f"{text!r} is not a duration: write 30s, 2m or 1h")
        seconds = float(match[1]) * _SECONDS[match[2].lower()]
    if not 0 < seconds < float("inf"):
        raise InputError(f"a duration must be positive, not {text!r}")
    return seconds


def _duration_or_none(value: Any) -> Any:
    if value is None:
        return None
    try:
        return parse_duration(value)
    except InputError as error:
        raise ValueError(str(error)) from error


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Text = Annotated[str, BeforeValidator(_path_as_text)]
"""A text that may be a path; a `Path` will do."""
TextOrNone = Annotated[str | None, BeforeValidator(_path_as_text)]
StepLimit = Annotated[int, Field(ge=1)]
StepLimits = Annotated[tuple[StepLimit, ...] | None, BeforeValidator(_numbers_or_none)]
Size = Annotated[int | None, BeforeValidator(_size_or_none)]
Rate = Annotated[int | None, BeforeValidator(_rate_or_none)]
"""Bytes per second, such as `16GB/s`."""
Duration = Annotated[float | None, BeforeValidator(_duration_or_none)]
"""Seconds, such as `30s`, `2m` or `1h`."""


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(Section):
    """Which models run, where and in what precision."""

    model: Text = "bundled"
    verifier: TextOrNone = None
    system_prompt: str | None = None
    chat_template: TextOrNone = None
    device: str = "cpu"
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
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)


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


class SearchSettings(Section):
    """Which strategy, how wide, and how the final answer is chosen."""

    search: str | None = None
    n: int = Field(16, ge=1)
    width: int = Field(4, ge=1)
    max_rounds: int = Field(40, ge=1)
    filter_duplicates: bool = False
    aggregate: Literal["last", "min", "prod", "mean"] | None = None
    choose: Literal["best", "majority", "weighted"] | None = None
    compat: Literal["search-and-learn"] | None = None
    branching: Literal["softmax", "linear"] | None = None
    score_temperature: float | None = Field(None, gt=0.0)
    ess: float | None = Field(None, ge=0.0, le=1.0)
    lookahead: int | None = Field(None, ge=1)
    revisions: int | None = Field(None, ge=1)
    critique_prompt: str | None = Field(None, min_length=1)
    revision_prompt: str | None = Field(None, min_length=1)
    warmup: int | None = Field(None, ge=1)
    keep: float | None = Field(None, gt=0.0, le=1.0)
    exploration: float | None = Field(None, ge=0.0, allow_inf_nan=False)
    nodes: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)


class StopSettings(Section):
    """What ends a search early, with the best so far. The tree up to there is the same."""

    deadline: Duration = None
    token_budget: int | None = Field(None, ge=1, description="generated tokens")
    stop_votes: bool = False
    stop_score: float | None = Field(None, allow_inf_nan=False)


class MemorySettings(Section):
    """One memory number, and its parts where a user wants to name them."""

    memory: Size = None
    kv_memory: Size = None
    host_memory: Size = None


class ScheduleSettings(Section):
    """How beams are arranged on the device. Never changes the tree, only the time."""

    schedule: Literal["auto", "in-gpu", "layerwise", "locality"] = "auto"
    planner: Literal["ranges", "greedy"] = "ranges"
    inter_beam: bool = True
    balance: bool = True
    prefetch: bool = True
    reuse: bool = True
    evict: Literal["host", "recompute"] = "host"
    link_bandwidth: Rate = None
    max_batch: int | None = Field(None, ge=1, description="most beams decoded together")
    graphs: Literal["auto", "on", "off"] = "auto"


class Settings(Section):
    """Everything one run depends on; the same sections as a recipe file."""

    model: ModelSettings = ModelSettings()
    sampling: SamplingSettings = SamplingSettings()
    step: StepSettings = StepSettings()
    search: SearchSettings = SearchSettings()
    stop: StopSettings = StopSettings()
    memory: MemorySettings = MemorySettings()
    schedule: ScheduleSettings = ScheduleSettings()

    @classmethod
    def build(cls, recipe: str | os.PathLike[str] | None = None, **options: Any) -> Settings:
        """Settings from an optional recipe and flat options, which override it.

        A flat option belongs to the one section that has a field of its name; `None` means
        "not given". Raises InputError with one line on an unknown or impossible value.
        """
        sections: dict[str, dict[str, Any]] = load_recipe(Path(recipe)) if recipe else {}
        owners = {
            name: section
            for section, info in cls.model_fields.items()
            for name in _fields_of(info.annotation)
        }
        for name, value in options.items():
            if name not in owners:
                raise InputError(f"unknown option {name!r}")
            if value is not None:
                sections.setdefault(owners[name], {})[name] = value
        try:
            return cls.model_validate(sections)
        except ValidationError as error:
            raise InputError(_one_line(error, recipe)) from error


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


def _fields_of(annotation: Any) -> list[str]:
    return list(annotation.model_fields)


def _one_line(error: ValidationError, recipe: str | os.PathLike[str] | None) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    source = f"recipe {recipe}: " if recipe else ""
    if first["type"] == "extra_forbidden":
        return f"{source}unknown option {where!r}"
    names = [part for part in first["loc"] if isinstance(part, str)]  # numbers are list places
    option = names[-1].replace("_", "-")
    if first["type"] == "value_error":  # of a parser above, whose words hold the value
        return f"{source}{where} (--{option}): {first['ctx']['error']}"
    return f"{source}{where} (--{option}): {first['msg']}, got {_short(first['input'])}"
