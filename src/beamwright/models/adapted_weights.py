"""A checkpoint's weights into a model of `transformers`, tensor by tensor.

Names and merges are `transformers`' own (its conversion mapping). Each weight is brought into the
form that stays before the next is read, so that memory peaks at the result and one layer's experts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from beamwright.errors import InputError
from beamwright.models.adapter import Product
from beamwright.models.decoder import Linear
from beamwright.models.experts import Experts
from beamwright.models.formats import StoredWeights
from beamwright.models.grouped import GroupedLinear, check_size, joined
from beamwright.models.linear import quantise_linear
from beamwright.models.survey import Survey
from beamwright.models.weights import Placing, check_finite, give_back
from beamwright.plan.costs import Storage

_INSIDE = re.compile(r"^(model\.)?language_model\.(model\.)?")  # the text part of another model
_OF_EXPERTS = {
    "gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",),
}  # fmt: skip
_LAYER = re.compile(r"\.(\d+)\.")


def fill(found: Survey, stored: StoredWeights, placing: Placing, where: str) -> None:
    """Give a surveyed model its weights. where: the checkpoint, for messages.

    Raises:
        InputError: for missing, unexpected, unreadable or wrongly shaped weights, naming one.
    """
    model = found.model
    _make_buffers(model, placing.device)
    loader, layer = _Loader(found, placing, where, stored), ""
    for target, read in loader.reads().items():
        at = _LAYER.search(target)
        if at is not None and at[1] != layer:
            layer = at[1]
            give_back()
        for name, value in read().items():
            loader.put(name, value)
    loader.check_missing()
    model.requires_grad_(False)


def _make_buffers(model: Any, device: str) -> None:
    """What no checkpoint holds, such as rotary frequencies, as `transformers` computes it."""
    kept = [(name, buffer) for name, buffer in model.named_non_persistent_buffers()]
    for name, buffer in kept:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    for module in model.modules():  # some are made by a module that theirs is inside of
        inside = module.modules()
        module._is_hf_initialized = not any(each._non_persistent_buffers_set for each in inside)
    model.initialize_weights()
    for name, _ in kept:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        module._buffers[leaf] = module._buffers[leaf].to(device)


class _Loader:
    """Puts weights where a model's modules look for them."""

    def __init__(self, found: Survey, placing: Placing, where: str, stored: StoredWeights) -> None:
        self._found, self._placing, self._where, self._stored = found, placing, where, stored
        model = found.model
        self._wanted = model.state_dict()
        self._wide = tuple(model._get_dtype_plan(placing.dtype))
        self._tied = defaultdict[str, list[str]](list)
        for one, other in model.all_tied_weights_keys.items():
            self._tied[one].append(other)
            self._tied[other].append(one)
        head = model.get_output_embeddings()
        self._head = next((f"{n}.weight" for n, m in model.named_modules() if m is head), "")
        self._missing = set(self._wanted)

    def reads(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """What brings each of the model's tensors, merged ones together; by the first one's name.

        A call of it returns tensors, or a projection in its file's form, by the model's names.
        """
        from transformers.conversion_mapping import (  # noqa: PLC0415 (slow import)
            get_model_conversion_mapping,
        )
        from transformers.core_model_loading import (  # noqa: PLC0415 (slow import)
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        found, stored, wanted = self._found, self._stored, self._wanted
        model, merges = found.model, dict[str, Any]()
        mapping = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        reads = dict[str, Callable[[], dict[str, Any]]]()
        for stored_name in sorted(stored.names(), key=dot_natural_key):
            name = _INSIDE.sub("", stored_name)
            for rules in ((renamings, converters), ([], [])):
                target, pattern = rename_source_key(name, *rules, found.body_at, wanted)
                if target in wanted:
                    break
            if target not in wanted:
                self._check_unexpected(target)
            elif pattern is None:
                reads[target] = partial(self._plain, stored_name, target)
            else:
                merge = merges.setdefault(target, deepcopy(by_pattern[pattern]))
                merge.add_tensor(target, stored_name, pattern, partial(stored.tensor, stored_name))
                reads[target] = partial(merge.convert, target, model=model, config=model.config)
        return reads

    def _plain(self, name: str, target: str) -> dict[str, Any]:
        as_stored = self._placing.storage is Storage.STORED and self._found.quantises(target)
        kept = self._stored.linear(name.removesuffix(".weight")) if as_stored else None
        return {target: self._stored.tensor(name) if kept is None else kept}

    def _check_unexpected(self, name: str) -> None:
        """Heads, other modalities and layers behind the last are left out, nothing of a layer."""
        found = self._found
        number = name.removeprefix(f"{found.layers_at}.").partition(".")[0]
        inside = (
            number.isdigit() and int(number) < len(found.layers) and not name.endswith("inv_freq")
        )
        patterns = found.model._keys_to_ignore_on_load_unexpected or ()
        if inside and not any(re.search(pattern, name) for pattern in patterns):
            kind = found.body.config.model_type
            raise InputError(
                f"model {self._where}: weight {name} is not one of a {kind} with this config"
            )

    def put(self, name: str, value: Any) -> None:
        """A tensor, or a projection, by its name; and wherever it is tied to."""
        value = value[0] if isinstance(value, list) else value
        self._place(name, value)
        for other in self._tied[name]:
            if other in self._missing:
                self._place(other, value)

    def check_missing(self) -> None:
        """
        Raises:
            InputError: if a weight has not come.
        """
        patterns = self._found.model._keys_to_ignore_on_load_missing or ()
        missing = self._missing - (set() if self._placing.head else {self._head})
        for name in sorted(missing):
            if not any(re.search(pattern, name) for pattern in patterns):
                raise InputError(f"model {self._where}: weight {name} is missing")

    def _place(self, name: str, value: Any) -> None:
        self._missing.discard(name)
        path, _, leaf = name.rpartition(".")
        module, placing = self._found.model.get_submodule(path), self._placing
        if name == self._head and not placing.head:
            return
        if isinstance(value, GroupedLinear):
            size = tuple(self._wanted[name].shape)
            kept = value.placed(size, placing.device, f"model {self._where}: weight {name}")
            self._keep(module, leaf, placing.pack(kept), name)
            return
        placed = self._cast(name, value)
        if name == self._head:
            self._keep(module, leaf, placing.pack(Linear(placed)), name)
        elif name in self._found.products:
            quantised = placing.storage if self._found.quantises(name) else Storage.PLAIN
            self._keep(module, leaf, placing.pack(quantise_linear(Linear(placed), quantised)), name)
        elif leaf in module._buffers:
            module._buffers[leaf] = placed
        else:
            setattr(module, leaf, torch.nn.Parameter(placed, requires_grad=False))
        if path in self._found.experts and not any(each.is_meta for each in module.parameters()):
            self._keep_experts(module, path)

    def _cast(self, name: str, value: Tensor) -> Tensor:
        placing, like = self._placing, self._wanted[name]
        what = f"model {self._where}: weight {name}"
        check_size(tuple(value.shape), tuple(like.shape), what)
        wide = any(re.search(pattern.replace("*", ".*"), name) for pattern in self._wide)
        placed = value.to(device=placing.device, dtype=torch.float32 if wide else like.dtype)
        check_finite(placed, value, what)
        return placed

    def _keep(self, module: Any, leaf: str, linear: Linear, name: str) -> None:
        """A product's weight: our projection stands in its place."""
        module._parameters.pop(leaf, None)
        placing = self._placing
        module.__dict__[leaf] = Product(
            linear, self._wanted[name], placing.device, placing.tile_rows
        )

    def _keep_experts(self, module: Any, path: str) -> None:
        placing = self._placing

        def kept(leaf: str, number: int) -> Linear | None:
            """A projection of one expert in its file's form, where it is called as usual."""
            if placing.storage is not Storage.STORED:
                return None
            names = [f"{path}.{number}.{name}" for name in _OF_EXPERTS[leaf]]
            parts = [part for name in names if (part := self._stored.linear(name)) is not None]
            what = f"model {self._where}: weight {path}.{number}"
            placed = [part.placed(part.size, placing.device, what) for part in parts]
            return placing.pack(joined([*placed], None)) if len(parts) == len(names) else None

        def convert(linear: Linear) -> Linear:
            return placing.pack(quantise_linear(linear, placing.storage))

        plain = placing.storage is Storage.PLAIN and placing.tile_rows is None
        on_card = torch.device(placing.device).type != "cpu"
        made = Experts(module, None if plain and on_card else convert, kept, placing.tile_rows)
        module.__dict__["beamwright_experts"] = made
