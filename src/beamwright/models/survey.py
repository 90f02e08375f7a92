"""Finds out how a `transformers` model is built, by running it once on the meta device.

A forward pass of a few tokens without weights shows what each layer passes to attention: heads,
window, soft cap, and the layer that owns the KV. It also shows the states that layers keep, the
weights that only `F.linear` reads, and the modules that are experts. So no family needs code here,
and all sizes are known before weights are loaded.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from beamwright.errors import error_line
from beamwright.models.linear import quiet_import
from beamwright.models.recurrent_layers import check_stateless, find_cache_modules, find_states
from beamwright.models.shape import BuiltSizes, LayerGroup, ModelShape, NoDecoderError, StatePart

# Name under which Beamwright's attention and experts are registered in `transformers`.
NAME = "beamwright"

_SURVEY = "beamwright-survey"
_LEAST_VERSION = (5, 23)
_TOKENS = 8
# Functions that mix tokens: a layer calling one must use our attention or keep a known state.
_MIXES = {
    *("conv1d", "cumsum", "matmul", "__matmul__", "bmm", "baddbmm", "einsum", "roll"),
    "scaled_dot_product_attention",
}
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True)
class AttentionCall:
    """The arguments with which one layer called attention."""

    key: Tensor  # layers that share KV pass the same tensor
    heads: int
    kv_heads: int
    head_dim: int
    mask: Any  # a mask function, which says which tokens a token attends to
    softcap: float | None


@dataclass
class Survey:
    """A `transformers` model on the meta device, and what its forward pass has shown."""

    model: Any
    body: Any  # the model without its LM head
    body_at: str  # the body's name in the model
    layers_at: str  # the name of the list of layers
    is_part: bool = False  # the model is the text part of a larger model
    calls: dict[int, AttentionCall] = field(default_factory=dict)  # by layer
    recurrent: dict[str, tuple[StatePart, ...]] = field(default_factory=dict)  # by module name
    products: frozenset[str] = frozenset()  # names of the weights that only `F.linear` reads
    experts: dict[str, int] = field(default_factory=dict)  # experts per token, by module name

    @property
    def layers(self) -> torch.nn.ModuleList:
        """The model's layers."""
        layers = self.model.get_submodule(self.layers_at)
        assert isinstance(layers, torch.nn.ModuleList)
        return layers

    def quantises(self, name: str) -> bool:
        """Return whether `--weights` quantises the weight `name`.

        These are projections in layers, except routers, gates and those with one output per head.
        """
        if name not in self.products or not name.startswith(f"{self.layers_at}."):
            return False
        at = name.rpartition(".")[0]
        module = self.model.get_submodule(at)
        counts = {1, *(self.model.get_submodule(each).num_experts for each in self.experts)}
        states = self.recurrent.get(at.rpartition(".")[0], ())
        counts |= {part.size[0] for part in states if part.kind == "recurrent"}  # heads
        return isinstance(module, torch.nn.Linear) and module.out_features not in counts


# --- our attention and experts among those of transformers ------------------------------------


def bind(model: torch.nn.Module, attend: Callable[..., Any], experts: Callable[..., Any]) -> None:
    """Set the functions that compute a model's attention and experts.

    Each module stores both, because `transformers` gives `_attend` and `_experts` only a module.
    """
    for module in model.modules():
        module.__dict__["beamwright"] = (attend, experts)


def _attend(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, None]:
    return module.beamwright[0](module, *args, **kwargs), None


def _experts(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.beamwright[1](module, *args, **kwargs)


class _Mask:
    """A mask function of `transformers`, which says which tokens a token attends to.

    Gemma 4 slices a mask to the rows it needs. A survey needs all rows, so it gets the whole mask.
    """

    def __init__(self, sees: Callable[..., Any]) -> None:
        self._sees = sees

    def __call__(self, *places: Any) -> Any:
        return self._sees(*places)

    def __getitem__(self, rows: Any) -> _Mask:
        return self


def _register() -> None:
    """Register Beamwright's attention, masks and experts in `transformers`.

    Raises:
        NoDecoderError: if the installed `transformers` is too old.
    """
    installed = version("transformers")
    if tuple(int(part) for part in installed.split(".")[:2]) < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        raise NoDecoderError(
            f"Beamwright's own decoder does not support it, and --decoder transformers needs "
            f"transformers {least}, not {installed}: pip install 'transformers>={least}'"
        )
    from transformers import AttentionInterface  # noqa: PLC0415 (slow import)
    from transformers.integrations.moe import ExpertsInterface  # noqa: PLC0415 (slow import)
    from transformers.masking_utils import AttentionMaskInterface  # noqa: PLC0415 (slow import)

    for name in (NAME, _SURVEY):
        AttentionInterface.register(name, _attend)
    # `transformers` passes masks only to attention names with a registered mask function. From a
    # mask, the survey learns which tokens a token attends to.
    AttentionMaskInterface.register(_SURVEY, lambda mask_function, **_: _Mask(mask_function))
    ExpertsInterface.register(NAME, _experts)


# --- the survey ------------------------------------------------------------------------------


def survey_model(config: Any, dtype: torch.dtype = torch.bfloat16) -> Survey:
    """Build a config's model on the meta device, run it there, and return what the run shows.

    Raises:
        NoDecoderError: if `transformers` has no causal model for the config, or if Beamwright's
            attention views cannot compute its layers.
    """
    with quiet_import():  # `transformers` imports torchao if it is installed
        _register()
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise NoDecoderError(_refusal(text, "it has an encoder"))
    try:
        with quiet_import():
            surveyed = _build(text, dtype)
            with torch.inference_mode():
                _run(surveyed)
            surveyed.is_part = text is not config
            # Remove meta tensors that the pass has left in modules, such as `long_inv_freq`.
            for module in surveyed.model.modules():
                kept = {n: v for n, v in vars(module).items() if not isinstance(v, Tensor)}
                module.__dict__ = kept
    except NoDecoderError:
        raise
    except Exception as error:  # the code of a family may raise anything
        why = f"a trial run of its layers failed ({error_line(error)})"
        # Falcon chooses a class by the attention's name; its error then contains `_SURVEY`.
        why = "it computes attention itself" if _SURVEY in why else why
        raise NoDecoderError(_refusal(text, why)) from error
    if not surveyed.calls:
        raise NoDecoderError(_refusal(text, "no layer has attention"))
    surveyed.body.config._attn_implementation = NAME
    return surveyed


def _refusal(config: Any, why: str) -> str:
    return f"architecture {config.model_type!r} is not supported: {why}"


def _build(config: Any, dtype: torch.dtype) -> Survey:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (slow import)

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise NoDecoderError(_refusal(config, "transformers has no causal model for its text part"))
    for rope in _ropes(config):
        if rope.get("rope_type") == "dynamic" and "alpha" not in rope:
            rope["rope_type"] = "default"  # both are equal up to max_position_embeddings
    options = {"attn_implementation": _SURVEY, "experts_implementation": NAME, "dtype": dtype}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options).eval()
    embedding = model.get_input_embeddings()
    name, body = next(
        (name, child) for name, child in model.named_children() if embedding in child.modules()
    )
    layers_at = next(
        f"{name}.{at}"
        for at, module in body.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
    )
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise NoDecoderError(_refusal(config, "its forward function takes no position_ids"))
    return Survey(model, body, name, layers_at)


def _run(surveyed: Survey) -> None:
    """Run a few tokens through the model, and record in `surveyed` what each layer calls."""
    chosen: dict[torch.nn.Module, int] = {}
    attending = set[torch.nn.Module]()

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in surveyed.calls or key.shape[2] != query.shape[2]:
            what = type(module).__name__
            raise NoDecoderError(f"{what} does not attend once per layer to the layer's tokens")
        (_, heads, tokens, width), (_, kv_heads, _, narrow) = query.shape, value.shape
        sizes = heads, kv_heads, max(width, narrow)
        surveyed.calls[layer] = AttentionCall(key, *sizes, attention_mask, given.get("softcap"))
        attending.add(module)
        return query.new_empty(1, tokens, heads, narrow)

    def experts(module: Any, hidden: Tensor, index: Tensor, _: Any) -> Tensor:
        chosen[module] = index.shape[-1]
        return torch.empty_like(hidden)

    bind(surveyed.model, attend, experts)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    places = torch.arange(_TOKENS, device="meta")[None]
    # A padding mask tells the model that no sequences are packed. The model reads the mask's
    # values, so the mask cannot be on the meta device.
    mask = torch.ones(1, _TOKENS, dtype=torch.long)
    with _Uses(surveyed.model, surveyed.layers) as seen:
        surveyed.body(ids, attention_mask=mask, position_ids=places, use_cache=False)
    surveyed.products = frozenset(name for name, used in seen.uses.items() if used == {F.linear})
    named = dict(surveyed.model.named_modules())
    surveyed.experts = {name: chosen[module] for name, module in named.items() if module in chosen}
    for (layer, name), call in seen.cached.items():
        module = surveyed.layers[layer].get_submodule(name)
        if attending.intersection(module.modules()):
            check_stateless(module, call)
        elif parts := find_states(module, layer, call):
            at = ".".join(filter(None, (surveyed.layers_at, str(layer), name)))
            surveyed.recurrent[at] = parts
    kept = {parts[0].layer for parts in surveyed.recurrent.values()}
    for layer, mixing in seen.mixing.items():
        if layer not in surveyed.calls and layer not in kept:
            raise NoDecoderError(f"layer {layer} mixes tokens outside attention ({mixing})")
    if len(kept) < len(surveyed.recurrent):
        raise NoDecoderError("layers with several recurrent modules are not supported")


class _Uses(TorchFunctionMode):
    """Recorder of the functions and modules that a model calls in a forward pass.

    uses: for each parameter's name, the functions that read the parameter.
    mixing: for each layer's number, a function of `_MIXES` that the layer called.
    cached: the arguments of modules with a cache argument, by layer and name within the layer.
    """

    def __init__(self, model: torch.nn.Module, layers: torch.nn.ModuleList) -> None:
        self._names = {id(each): name for name, each in model.named_parameters()}
        self.uses: dict[str, set[Any]] = defaultdict(set)
        self.mixing: dict[int, str] = {}
        self.cached: dict[tuple[int, str], inspect.BoundArguments] = {}
        self._layer: int | None = None
        self._hooks = [
            layer.register_forward_pre_hook(partial(self._enter, number))
            for number, layer in enumerate(layers)
        ]
        self._hooks += [
            module.register_forward_pre_hook(partial(self._note, (number, name)), with_kwargs=True)
            for number, layer in enumerate(layers)
            for name, module in find_cache_modules(layer).items()
        ]

    def _enter(self, number: int, *_: Any) -> None:
        self._layer = number

    def _note(self, at: tuple[int, str], module: Any, args: Any, kwargs: Any) -> None:
        self.cached[at] = inspect.signature(module.forward).bind(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        called = getattr(func, "__name__", "")
        if self._layer is not None and called in _MIXES:
            self.mixing[self._layer] = called
        if called != "__get__":  # reading an attribute, such as a shape, does not use the weight
            for place, value in enumerate((*args, *(kwargs or {}).values())):
                name = self._names.get(id(value))
                if name is not None and (func is not F.linear or place == 1):
                    self.uses[name].add(func)
        return func(*args, **(kwargs or {}))


# --- a shape ---------------------------------------------------------------------------------


def shape_of(surveyed: Survey, max_context: int | None) -> ModelShape:
    """Make the `ModelShape` of a surveyed model, for paths of at most `max_context` tokens.

    Raises:
        NoDecoderError: if the model's layers cannot share one attention view.
    """
    config, embedding = surveyed.body.config, surveyed.model.get_input_embeddings().weight
    limit = next((getattr(config, n) for n in _CONTEXTS if getattr(config, n, None)), max_context)
    if limit is None:
        raise NoDecoderError(
            f"{config.model_type}: config.json has no context length; pass --context N"
        )
    context = limit if max_context is None else min(limit, max_context)
    calls, depth = surveyed.calls, len(surveyed.layers)
    if len({call.heads for call in calls.values()}) > 1:
        raise NoDecoderError(f"{config.model_type}: layers have different numbers of heads")
    _check_rotary(config, context)
    shared, groups = _groups(calls, context, getattr(config, "attention_chunk_size", None))
    inner = getattr(config, "intermediate_size", None) or 4 * embedding.shape[1]
    head, first = surveyed.model.get_output_embeddings(), groups[0]
    plain = len(first.layers) == depth and first.window is None and first.softcap is None
    return ModelShape(
        architecture=config.model_type,
        hidden=embedding.shape[1],
        layers=depth,
        heads=max(call.heads for call in calls.values()),
        kv_heads=max(group.kv_heads for group in groups),
        head_dim=max(group.head_dim for group in groups),
        intermediate=max(inner) if isinstance(inner, list) else inner,
        vocab=embedding.shape[0],
        context=context,
        full_context=limit,
        tied=head is not None and head.weight is embedding,
        groups=() if plain else groups,
        shared=shared,
        states=tuple(part for parts in surveyed.recurrent.values() for part in parts),
        built=_sizes(surveyed),
    )


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return all dictionaries of rotary parameters in a config; some have one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _check_rotary(config: Any, context: int) -> None:
    """Check that rotary frequencies do not depend on the longest path of a batch.

    Raises:
        NoDecoderError: if they do.
    """
    for each in _ropes(config):
        most = each.get("original_max_position_embeddings") or config.max_position_embeddings
        if each.get("rope_type") == "longrope" and context > most:
            raise NoDecoderError(
                f"rope type 'longrope' changes with the longest path in a batch: use "
                f"--context {most} or less"
            )


def _groups(
    calls: dict[int, AttentionCall], context: int, chunk: int | None
) -> tuple[tuple[tuple[int, int], ...], tuple[LayerGroup, ...]]:
    """Return the values of `shared` and `groups` of a `ModelShape`.

    Layers with the same key tensor share KV. Owners of KV are grouped by sizes, window, soft cap.

    chunk: in chunked attention, tokens attend only within chunks of this many tokens; else None.
        Only contexts of at most one chunk are supported: for them, this is full attention.
    """
    owners: dict[int, int] = {}
    shared, members = [], defaultdict(list)
    for number, call in sorted(calls.items()):
        if (owner := owners.setdefault(id(call.key), number)) != number:
            shared.append((number, owner))
            continue
        try:
            window = window_of(call.mask, context)
        except RuntimeError as error:  # the mask reads other tensors, which are on the meta device
            if context > (chunk or 0):
                limit = f"needs --context {chunk} or less" if chunk else "is not supported"
                raise NoDecoderError(f"chunked attention {limit}") from error
            window = None
        alike = (call.kv_heads, call.head_dim, window, call.softcap)
        members[alike].append(number)
    return tuple(shared), tuple(LayerGroup(tuple(at), *alike) for alike, at in members.items())


def window_of(mask: Any, context: int) -> int | None:
    """Return the sliding window of a mask function, in tokens including the current one.

    None: a token attends to all tokens up to itself.

    Raises:
        NoDecoderError: if the mask is neither causal nor a sliding window.
    """
    places, seen = torch.arange(context), []
    for place in {context - 1, context - 2, context // 2}:
        if place < 0 or mask is None:
            continue
        sees = torch.as_tensor(mask(0, 0, torch.tensor(place), places)).expand(context)
        count = int(sees.sum())
        if not count or not bool(sees[place + 1 - count : place + 1].all()):
            raise NoDecoderError("attention must be causal or have a sliding window")
        seen.append((place, count))
    windows = {count for place, count in seen if count <= place}
    if len(windows) > 1 or any(count > most for most in windows for _, count in seen):
        raise NoDecoderError("chunked attention is not supported")
    return windows.pop() if windows else None


def _sizes(surveyed: Survey) -> BuiltSizes:
    named = dict(surveyed.model.named_parameters())
    total = sum(each.numel() for each in named.values())
    matrices = Counter(tuple(x.shape[:2]) for name, x in named.items() if surveyed.quantises(name))
    idle = experts = num_experts = 0
    for name, taken in surveyed.experts.items():
        module = surveyed.model.get_submodule(name)
        num_experts += module.num_experts
        for each in module.parameters(recurse=False):
            idle += each.numel() * (module.num_experts - taken) // module.num_experts
            if each.dim() == 3:
                experts += each.numel()
                rows, columns = each.shape[:0:-1] if module.is_transposed else each.shape[1:]
                matrices[(rows, columns)] += module.num_experts
    head, table = surveyed.model.get_output_embeddings(), surveyed.model.get_input_embeddings()
    own = 0 if head is None or head.weight is table.weight else head.weight.numel()
    sizes = tuple((*size, n) for size, n in matrices.items())
    by_layer = tuple(sum(each.numel() for each in layer.parameters()) for layer in surveyed.layers)
    return BuiltSizes(total, total - idle, own, sizes, by_layer, experts, num_experts)
