"""Loads a checkpoint's weights into a `transformers` model, tensor by tensor.

The conversion mapping of `transformers` says how tensors are renamed and merged. Each weight is
converted to its final format before the next one is read. So the peak of memory is the loaded model
plus the experts of one layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from beamwright.errors import InputError, error_line
from beamwright.models.adapter import (
    Experts,
    ProjectionWeight,
    StoredEmbedding,
    projections_of,
)
from beamwright.models.decoder import Linear
from beamwright.models.formats import StoredWeights
from beamwright.models.formats.gguf import BlockLinear
from beamwright.models.formats.key_tables import check_tensor_sizes
from beamwright.models.formats.plain_files import RowReader
from beamwright.models.grouped import GroupedLinear, check_size, join_projections
from beamwright.models.linear import head_linear, quantise_linear
from beamwright.models.native import can_multiply
from beamwright.models.survey import Survey
from beamwright.models.weights import LoadOptions, check_finite, trim_heap
from beamwright.plan.costs import Storage

# Prefix of the names of a text model that is part of a multimodal one.
_TEXT_PREFIX = re.compile(r"^(model\.)?language_model\.(model\.)?")
_EXPERT_PROJECTIONS = {  # the projections in a file that make up one parameter of an experts module
    "gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",),
}  # fmt: skip
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def load_adapted(surveyed: Survey, stored: StoredWeights, placing: LoadOptions, where: str) -> None:
    """Load weights into the model that `survey` has built without weights.

    where: the checkpoint's path, for messages.

    Raises:
        InputError: for missing, unexpected, unreadable or wrongly shaped weights.
    """
    check_adapted(surveyed, stored, where, placing)
    model = surveyed.model
    _compute_buffers(model, placing.device)
    loader, layer = _Loader(surveyed, placing, where, stored), ""
    for target, read in loader.tensor_readers().items():
        at = _LAYER_NUMBER.search(target)
        if at is not None and at[1] != layer:
            _offload(surveyed, placing, layer)
            layer = at[1]
            trim_heap()
        for name, value in read().items():
            loader.store_weight(name, value)
    _offload(surveyed, placing, layer)
    model.requires_grad_(False)


def _offload(surveyed: Survey, placing: LoadOptions, layer: str) -> None:
    """Move the weights of a complete layer home, if it is offloaded. layer: its number, or ""."""
    if placing.offload is None or not layer:
        return
    module = surveyed.layers[int(layer)]
    made = (each.__dict__.get("beamwright_experts") for each in module.modules())
    experts = [each for each in made if each is not None]
    inside = [linears for each in experts for linears in each.projections]
    placing.offload.add(int(layer), projections_of(module), inside)
    for each in experts:
        each.bring = placing.offload.bring_experts(int(layer))


def check_adapted(
    surveyed: Survey, stored: StoredWeights, where: str, placing: LoadOptions
) -> None:
    """Check that a checkpoint has the tensors that the model needs. Only headers are read.

    Raises:
        InputError: if names or sizes differ (see `check_tensor_sizes`), or if tensors cannot be
            merged.
    """
    sizes: Any = SimpleNamespace(
        sizes=stored.sizes, tensor=lambda name: torch.empty(stored.sizes[name], device="meta")
    )
    unread = replace(placing, storage=Storage.PLAIN)
    loader, given = _Loader(surveyed, unread, where, sizes), dict[str, tuple[int, ...]]()
    for target, read in loader.tensor_readers().items():
        try:
            given |= {name: tuple(_unwrap_list(value).shape) for name, value in read().items()}
        except Exception as error:  # merging in `transformers` may raise anything
            raise InputError(
                f"model {where}: the weights for {target} do not fit together: config.json belongs "
                f"to another model, or a file is damaged ({error_line(error)})"
            ) from error
    left = {name: at for name, at in loader.left.items() if not loader.can_ignore(name)}
    given |= {name: stored.sizes[at] for name, at in left.items()}
    check_tensor_sizes(
        loader.required_sizes(given), given, f"model {where}", surveyed.body.config.model_type
    )


def _unwrap_list(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _compute_buffers(model: Any, device: str) -> None:
    """Let `transformers` compute buffers that no checkpoint holds, such as rotary frequencies."""
    kept = [(name, buffer) for name, buffer in model.named_non_persistent_buffers()]
    for name, buffer in kept:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    # Some buffers are computed by a parent of the module that owns them. So a module is initialised
    # if it or a module inside it has such buffers.
    for module in model.modules():
        inside = module.modules()
        module._is_hf_initialized = not any(each._non_persistent_buffers_set for each in inside)
    model.initialize_weights()
    for name, _ in kept:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        module._buffers[leaf] = module._buffers[leaf].to(device)


class _Loader:
    """Reader of a checkpoint's tensors, and writer of a model's parameters and buffers.

    left: tensors that the model does not have, from the renamed name to the name in the file.
    """

    def __init__(
        self, surveyed: Survey, placing: LoadOptions, where: str, stored: StoredWeights
    ) -> None:
        self._surveyed, self._placing, self._where, self._stored = surveyed, placing, where, stored
        model = surveyed.model
        self._wanted = model.state_dict()
        self._wide = tuple(model._get_dtype_plan(placing.dtype))
        self._tied = defaultdict[str, list[str]](list)
        for one, other in model.all_tied_weights_keys.items():
            self._tied[one].append(other)
            self._tied[other].append(one)
        head = model.get_output_embeddings()
        self._head = next((f"{n}.weight" for n, m in model.named_modules() if m is head), "")
        table = model.get_input_embeddings()
        self._embedding = next((f"{n}.weight" for n, m in model.named_modules() if m is table), "")
        self._rows: RowReader | None = None
        self._missing = set(self._wanted)
        self.left: dict[str, str] = {}

    def tensor_readers(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return one function for each tensor of the model, by name. Calling it reads the file.

        A function returns the values by their names in the model. A value is a tensor, or a
        projection that stays in the file's quantised format. If `transformers` merges tensors of
        the file into several of the model, a single function returns them all. Tensors that the
        model does not have are added to `left`.
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

        surveyed, stored, wanted = self._surveyed, self._stored, self._wanted
        model, merges = surveyed.model, dict[str, Any]()
        mapping = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        tensor_readers = dict[str, Callable[[], dict[str, Any]]]()
        for stored_name in sorted(stored.sizes, key=dot_natural_key):
            name = _TEXT_PREFIX.sub("", stored_name)
            for rules in ((renamings, converters), ([], [])):
                target, pattern = rename_source_key(name, *rules, surveyed.body_at, wanted)
                if target in wanted:
                    break
            if target not in wanted:
                self.left[target] = stored_name
            elif pattern is None:
                tensor_readers[target] = partial(self._read_unmerged, stored_name, target)
            else:
                merge = merges.setdefault(target, deepcopy(by_pattern[pattern]))
                merge.add_tensor(target, stored_name, pattern, partial(stored.tensor, stored_name))
                tensor_readers[target] = partial(
                    merge.convert, target, model=model, config=model.config
                )
        return tensor_readers

    def _read_unmerged(self, name: str, target: str) -> dict[str, Any]:
        storage, stored = self._placing.storage, self._stored
        ends = storage is Storage.BLOCKS and target in (self._embedding, self._head)
        if not ends and not (storage.is_stored and self._surveyed.quantises(target)):
            return {target: stored.tensor(name)}
        kept = stored.quantised_linear(name.removesuffix(".weight"))
        if ends and kept is not None:
            self._rows = stored.row_reader(name, self._wanted[target].dtype)
            kept = kept if can_multiply(kept) and self._rows is not None else None
        return {target: stored.tensor(name) if kept is None else kept}

    def can_ignore(self, name: str) -> bool:
        """Return whether a checkpoint may contain `name` although the model has no such weight."""
        surveyed, config = self._surveyed, self._surveyed.body.config
        patterns = surveyed.model._keys_to_ignore_on_load_unexpected or ()
        if any(re.search(each, name) for each in patterns) or name == self._head:
            return True
        at = _LAYER_NUMBER.search(name) if name.startswith(f"{surveyed.layers_at}.") else None
        if at is None:  # from another part of a multimodal model, or from a verifier's head
            return surveyed.is_part or self._placing.has_others
        further = getattr(config, "num_nextn_predict_layers", None) or 0
        return 0 <= int(at[1]) - len(surveyed.layers) < further

    def required_sizes(self, given: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the tensors that the checkpoint must have, by name.

        given: names of the tensors that the checkpoint has. A tensor that is tied to one of them
            may be missing.
        """
        ignored = self._surveyed.model._keys_to_ignore_on_load_missing or ()
        return {
            name: tuple(tensor.shape)
            for name, tensor in self._wanted.items()
            if name in given
            or not (
                any(other in given for other in self._tied[name])
                or any(re.search(pattern, name) for pattern in ignored)
                or (name == self._head and not self._placing.head)
            )
        }

    def store_weight(self, name: str, value: Any) -> None:
        """Store a value in the model as the weight `name`, and as tied weights that the file lacks.

        value: a tensor, or a projection in the file's quantised format.
        """
        value = _unwrap_list(value)
        self._place(name, value)
        for other in self._tied[name]:
            if other in self._missing:
                self._place(other, value)

    def _place(self, name: str, value: Any) -> None:
        self._missing.discard(name)
        path, _, leaf = name.rpartition(".")
        module, placing = self._surveyed.model.get_submodule(path), self._placing
        if name == self._head and not placing.head:
            return
        like, what = self._wanted[name], f"model {self._where}: weight {name}"
        if isinstance(value, GroupedLinear | BlockLinear):
            module._parameters.pop(leaf)
            if name == self._embedding:
                module.__dict__[leaf] = StoredEmbedding(self._rows, like, placing.device)
                return
            kept = value.check_and_place(tuple(like.shape), placing.device, what)
            module.__dict__[leaf] = self._product(kept, like)
            return
        check_size(tuple(value.shape), tuple(like.shape), what)
        wide = any(re.search(pattern.replace("*", ".*"), name) for pattern in self._wide)
        placed = value.to(device=placing.device, dtype=torch.float32 if wide else like.dtype)
        check_finite(placed, value, what)
        if name == self._head or name in self._surveyed.products:
            module._parameters.pop(leaf, None)
            if name == self._head:
                linear = head_linear(Linear(placed), placing.storage)
            else:
                quantised = placing.storage if self._surveyed.quantises(name) else Storage.PLAIN
                linear = quantise_linear(Linear(placed), quantised)
            module.__dict__[leaf] = self._product(linear, like)
        elif leaf in module._buffers:
            module._buffers[leaf] = placed
        else:
            setattr(module, leaf, torch.nn.Parameter(placed, requires_grad=False))
        if path in self._surveyed.experts and not any(each.is_meta for each in module.parameters()):
            self._convert_experts(module, path)

    def _product(self, linear: Linear, like: Tensor) -> ProjectionWeight:
        """Wrap a projection as the stand-in for a weight that is only used in matrix products."""
        placing = self._placing
        return ProjectionWeight(placing.pack(linear), like, placing.device, placing.tile_rows)

    def _convert_experts(self, module: Any, path: str) -> None:
        placing = self._placing

        def stored_projection(leaf: str, number: int) -> Linear | None:
            """Return the projection of expert `number` in the file's quantised format.

            None: `--weights` asks for another format, or the file has no tensors with the usual
            names of experts.
            """
            if not placing.storage.is_stored:
                return None
            names = [f"{path}.{number}.{name}" for name in _EXPERT_PROJECTIONS[leaf]]
            parts = [
                part for name in names if (part := self._stored.quantised_linear(name)) is not None
            ]
            what = f"model {self._where}: weight {path}.{number}"
            placed = [part.check_and_place(part.size, placing.device, what) for part in parts]
            return (
                placing.pack(join_projections([*placed], None))
                if len(parts) == len(names)
                else None
            )

        def convert(linear: Linear) -> Linear:
            return placing.pack(quantise_linear(linear, placing.storage))

        plain = placing.storage is Storage.PLAIN and placing.tile_rows is None
        on_card = torch.device(placing.device).type != "cpu"
        made = Experts(
            module,
            None if plain and on_card and placing.offload is None else convert,
            stored_projection,
            placing.tile_rows,
        )
        module.__dict__["beamwright_experts"] = made
