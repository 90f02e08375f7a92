"""search-and-learn's YAML file as a recipe of this project. Knows names, runs nothing.

    python -m beamwright_lab.search_and_learn_recipe beam_search.yaml > recipe.yaml
    beamwright eval --recipe recipe.yaml --plugin lab/beamwright_lab/search_and_learn.py

Where a key is left out, search-and-learn's own default stands, not ours. What changes no result
here, or has no counterpart, is listed with the reason; what would change what is measured and
cannot be kept is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from beamwright.config import load_recipe
from beamwright.errors import InputError

_APPROACHES = {"best_of_n": "best-of-n", "beam_search": "search-and-learn", "dvts": "dvts"}

_DEFAULTS: dict[str, Any] = {
    "approach": "best_of_n",
    "model_path": "meta-llama/Llama-3.2-1B-Instruct",
    "prm_path": "RLHFlow/Llama3.1-8B-PRM-Deepseek-Data",
    "n": 4,
    "beam_width": 4,
    "num_iterations": 40,
    "temperature": 0.8,
    "top_p": 1.0,
    "max_tokens": 2048,
    "agg_strategy": "last",
    "seed": 42,
    "filter_duplicates": False,
    "dataset_name": "HuggingFaceH4/MATH-500",
    "dataset_config": None,
    "dataset_split": "test",
}

# key: option, where the value stays as it is
_SAME = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "agg_strategy": "aggregate",
}
_TREE_ONLY = {"beam_width": "width", "num_iterations": "max_rounds"}

_IGNORED = {
    "prm_batch_size": "batches follow from the memory",
    "gpu_memory_utilization": "--memory says it in bytes",
    "output_dir": "--out says it",
    "num_proc": "there are no data workers",
    "push_to_hub": "results stay on this machine",
    "hub_dataset_id": "results stay on this machine",
    "overwrite_hub_revision": "results stay on this machine",
    "apply_voting": "every vote is always reported",
    "sort_completed": "the answer is chosen by score, whatever the order",
    "lookahead": "its scores do not use the rollouts; --search lookahead does",
}
_FOREIGN_ONLY = ("model_path", "prm_path", "custom_chat_template", "num_samples", "dataset_end")
_OTHERS = ("system_prompt", "dataset_start", "search_batch_size", "load_in_4bit", "load_in_8bit")
_KNOWN = frozenset([*_DEFAULTS, *_IGNORED, *_FOREIGN_ONLY, *_OTHERS])


@dataclass(frozen=True)
class Translation:
    """options: flat options of `Settings`, dataset: of `eval`. notes: a line about each key."""

    options: dict[str, Any]
    dataset: str
    notes: tuple[str, ...]

    def recipe(self) -> str:
        """YAML for `--recipe`, the notes in front."""
        notes = "".join(f"# {note}\n" for note in self.notes)
        return notes + yaml.safe_dump({"dataset": self.dataset, "base": self.options})


def translate(content: Mapping[str, Any], where: str) -> Translation:
    """Options that do what search-and-learn does with these keys. where: how errors begin.

    Raises:
        InputError: for an unknown key, or a value that nothing here corresponds to.
    """
    for key in content:
        if key not in _KNOWN:
            raise InputError(f"{where}: unknown key {key!r} (read as search-and-learn's)")
    return _Translator(content, where).translation()


class _Translator:
    """Collects options and notes while the keys are read, one kind at a time."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self._content = content
        self._values = {**_DEFAULTS, **content}
        self._where = where
        self._options: dict[str, Any] = {}
        self._notes: list[str] = []

    def translation(self) -> Translation:
        self._search()
        self._lengths()
        self._models()
        self._prompt()
        self._range()
        for key, reason in _IGNORED.items():
            if key in self._content:
                self._ignore(key, reason)
        dataset = self._dataset()
        return Translation(self._options, dataset, tuple(self._notes))

    def _search(self) -> None:
        approach = self._values["approach"]
        if not isinstance(approach, str) or approach not in _APPROACHES:
            known = ", ".join(_APPROACHES)
            raise InputError(f"{self._where}: approach {approach!r} (there are {known})")
        self._set("approach", "search", _APPROACHES[approach])
        for key, option in _SAME.items():
            self._set(key, option, self._values[key])
        if approach == "best_of_n":
            for key in (*_TREE_ONLY, "filter_duplicates"):
                if key in self._content:
                    self._ignore(key, "best_of_n does not use it")
            return
        for key, option in _TREE_ONLY.items():
            self._set(key, option, self._values[key])
        if approach == "beam_search":
            self._set("filter_duplicates", "filter_duplicates", self._values["filter_duplicates"])
        elif "filter_duplicates" in self._content:
            self._ignore("filter_duplicates", "dvts does not use it")

    def _lengths(self) -> None:
        """max_tokens bounds one call of the generator: a whole path, or one step of a tree."""
        limit = self._number("max_tokens")
        self._set("max_tokens", "max_step_tokens", limit)
        if self._values["approach"] == "best_of_n":
            self._set("max_tokens", "max_tokens", limit)
            # A path is one call there, so no number of steps may end it earlier here.
            self._options["max_rounds"] = limit

    def _models(self) -> None:
        for key, option in (("model_path", "model"), ("prm_path", "verifier")):
            name = str(self._values[key])
            hub = name.count("/") == 1 and name[0] not in "./~" and not Path(name).is_dir()
            self._set(key, option, f"hf:{name}" if hub and ":" not in name else name)
        for key in ("load_in_4bit", "load_in_8bit"):
            if self._content.get(key):
                raise InputError(f"{self._where}: {key} has no counterpart; see --dtype")
            if key in self._content:
                self._ignore(key, "off, as here")

    def _prompt(self) -> None:
        if "system_prompt" in self._content:
            self._set("system_prompt", "system_prompt", self._content["system_prompt"])
        else:
            self._notes.append(
                "system_prompt: not given; the default here stands, not search-and-learn's"
            )
        template = self._content.get("custom_chat_template")
        if isinstance(template, str) and template.lower() != "none":
            self._set("custom_chat_template", "chat_template", template)
        elif "custom_chat_template" in self._content:
            self._ignore("custom_chat_template", "none: the model's own")
        else:
            self._notes.append(
                "custom_chat_template: not given; the model's own stands, not search-and-learn's"
            )

    def _dataset(self) -> str:
        name, config, split = (
            self._values[key] for key in ("dataset_name", "dataset_config", "dataset_split")
        )
        folder = Path(str(name))
        if folder.exists():
            asked = folder.is_dir() and "dataset_split" in self._content
            dataset = f"{name}@{split}" if asked and split else str(name)
        else:
            dataset = f"hf:{name}" + (f"/{config}" if config else "")
            dataset += f"@{split}" if split else ""
        for key in ("dataset_name", "dataset_config", "dataset_split"):
            if key in self._content or key == "dataset_name":
                self._note(key, f"DATASET {dataset}, unless the command line names one")
        return dataset

    def _range(self) -> None:
        if self._content.get("dataset_start"):
            raise InputError(f"{self._where}: dataset_start has no counterpart; cut the file")
        if "dataset_start" in self._content:
            self._ignore("dataset_start", "from the first problem, as here")
        for key in ("num_samples", "dataset_end"):
            if self._content.get(key) is not None:
                self._note(key, f"give --limit {self._number(key)}, the least of these")
            elif key in self._content:
                self._ignore(key, "all problems, as here")
        if "search_batch_size" in self._content:
            number = self._number("search_batch_size")
            self._note("search_batch_size", f"give --in-flight {number}")

    def _number(self, key: str) -> int:
        value = self._values[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{self._where}: {key} must be a whole number from 1, got {value!r}")
        return value

    def _set(self, key: str, option: str, value: Any) -> None:
        self._options[option] = value
        flag = option.replace("_", "-")
        if isinstance(value, bool):
            self._note(key, f"--{flag}" if value else f"--no-{flag}")
        else:
            shown = repr(value) if isinstance(value, str) and "\n" in value else str(value)
            self._note(key, f"--{flag} {shown}")

    def _note(self, key: str, meaning: str) -> None:
        source = "" if key in self._content else " (default)"
        self._notes.append(f"{key}{source}: {meaning}")

    def _ignore(self, key: str, reason: str) -> None:
        self._notes.append(f"{key}: ignored ({reason})")


def main() -> None:
    (file,) = sys.argv[1:]
    try:
        print(translate(load_recipe(Path(file)), file).recipe(), end="")
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
