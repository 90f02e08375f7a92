"""A folder whose `tokenizer.json` and simple chat template are all there is to its tokenizer.

`transformers` adds nothing to such a folder but the time that importing it takes. What may be
added to (tokens by another file, a class with rules of its own, a template that calls functions) is
left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from beamwright.errors import InputError
from beamwright.models.json_file import is_panic, read_object

_MODEL_TYPES = ("llama", "qwen3")  # whose plain class `transformers` takes as it is named
_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_LARGEST_VOCAB = 100_000  # in larger ones it looks for a fault of some Mistral models
_ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_OTHER_FILES = (
    "added_tokens.json", "special_tokens_map.json", "chat_template.json", "tekken.json",
    "tokenizer.model", "tiktoken.model", "additional_chat_templates",
)  # fmt: skip

# What means the same in any environment: no calls, no tags of extensions, nothing but strings.
_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.For, nodes.If,
    nodes.CondExpr, nodes.Assign, nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Compare,
    nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Add, nodes.Concat,
    nodes.Filter, nodes.Call,
)  # fmt: skip
_NAMES = frozenset({"messages", "add_generation_prompt", "loop", "raise_exception", *_ROLES})

_Check = Callable[[Any], bool]
_CONFIG: Mapping[str, _Check] = MappingProxyType(
    {
        "tokenizer_class": lambda value: value in _CLASSES,
        "backend": lambda value: value == "tokenizers",
        "chat_template": lambda value: isinstance(value, str),
        "clean_up_tokenization_spaces": lambda value: isinstance(value, bool),  # not asked for
        "model_max_length": lambda value: isinstance(value, int | float),  # nothing is cut off
        "model_input_names": lambda value: isinstance(value, list),
        "padding_side": lambda value: value in ("left", "right"),
        "extra_special_tokens": lambda value: value in ([], {}),
        "is_local": lambda value: isinstance(value, bool),
        "local_files_only": lambda value: isinstance(value, bool),
        **dict.fromkeys(_ROLES, lambda value: value is None or isinstance(value, str)),
    }
)


class PlainTokenizer:
    """What is asked of a `transformers` tokenizer, under the same names.

    special_tokens: by role, `bos_token` and so on.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self._special = dict(special_tokens)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        return self._id("eos_token")

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Tokens beside the model's own, by id."""
        found: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def __call__(
        self,
        text: str | list[str],
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """`input_ids` and, if asked for, `offset_mapping`: of the text, or a list for each."""
        texts = [text] if isinstance(text, str) else text
        coded = self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        found: dict[str, list[Any]] = {"input_ids": [each.ids for each in coded]}
        if return_offsets_mapping:
            found["offset_mapping"] = [each.offsets for each in coded]
        return {key: value[0] if isinstance(text, str) else value for key, value in found.items()}

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Text of token ids, as it is."""
        assert not clean_up_tokenization_spaces
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Each token as the vocabulary writes it; None where there is none."""
        return [self.backend_tokenizer.id_to_token(each) for each in ids]

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
    ) -> str:
        """A conversation as text."""
        assert not tokenize
        text: str = self._template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **self._special
        )
        return text

    @cached_property
    def _template(self) -> Any:
        if self.chat_template is None:
            raise TemplateError("there is none")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        return environment.from_string(self.chat_template)

    def _id(self, role: str) -> int | None:
        token = self._special.get(role)
        found: int | None = None if token is None else self.backend_tokenizer.token_to_id(token)
        return found


def _raise(message: str) -> None:
    raise TemplateError(message)


def plain_tokenizer(folder: Path, chat_template: str | None = None) -> PlainTokenizer | None:
    """The tokenizer of a folder; None if it takes more, or something is wrong with it.

    chat_template: instead of the folder's.
    """
    if any((folder / name).exists() for name in _OTHER_FILES):
        return None
    try:
        written = read_object(folder / "tokenizer_config.json")
        config = read_object(folder / "config.json")
        template = _template_of(folder, written) if chat_template is None else chat_template
    except (InputError, OSError, ValueError):
        return None
    if not _is_known(written, config) or (template is not None and not is_simple(template)):
        return None
    special = {role: written[role] for role in _ROLES if written.get(role) is not None}
    return _checked(folder / "tokenizer.json", special, template)


def _is_known(written: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """True if tokenizer_config.json and config.json ask for nothing but tokenizer.json."""
    size = config.get("vocab_size")
    if config.get("model_type") not in _MODEL_TYPES or type(size) is not int:
        return False
    if not {"tokenizer_class"} <= written.keys() <= _CONFIG.keys() or size > _LARGEST_VOCAB:
        return False
    return all(_CONFIG[key](value) for key, value in written.items())


def _template_of(folder: Path, written: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    text: str | None = written.get("chat_template")
    return file.read_text(encoding="utf-8") if file.is_file() else text


def _checked(file: Path, special: Mapping[str, str], template: str | None) -> PlainTokenizer | None:
    """None where not every special token is in the file as one, or the file cuts texts off."""
    try:
        backend = Tokenizer.from_file(str(file))
    except BaseException as error:  # what it is about is said by `transformers`
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return None
    tokenizer = PlainTokenizer(backend, special, template)
    added = {each.content for each in tokenizer.added_tokens_decoder.values() if each.special}
    if backend.truncation is not None or backend.padding is not None:
        return None
    if len(tokenizer) > _LARGEST_VOCAB or not set(special.values()) <= added:
        return None
    return tokenizer


def is_simple(template: str) -> bool:
    """True if a chat template puts strings together and does nothing else.

    It renders alike in every Jinja environment that trims blocks: what environments add are
    functions, filters, variables and tags.
    """
    try:
        parsed = Environment(trim_blocks=True, lstrip_blocks=True).parse(template)
        everything = [parsed, *parsed.find_all(nodes.Node)]
    except (TemplateError, RecursionError, MemoryError, ValueError, OverflowError):
        return False  # said by whoever checks or renders it
    names = [node for node in everything if isinstance(node, nodes.Name)]
    known = _NAMES | {node.name for node in names if node.ctx == "store"}
    return all(map(_is_simple_node, everything)) and all(node.name in known for node in names)


def _is_simple_node(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter):
        return node.name == "trim" and not (node.args or node.kwargs)
    if isinstance(node, nodes.Call):
        return isinstance(node.node, nodes.Name) and node.node.name == "raise_exception"
    if isinstance(node, nodes.Getattr):
        return not node.attr.startswith("_")
    return isinstance(node, _NODES)
