"""The one reader of YAML: recipes, grids, verifiers, judges. Data only, and of bounded size.

A few lines of aliases can stand for billions of values, and tags for Python objects. Tags are
refused by the safe loader; here the file, and what its aliases stand for, are bounded as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from beamwright.errors import InputError
from beamwright.files import read_regular

MOST_BYTES = 256 * 1024
MOST_VALUES = 20_000


def read_yaml(file: Path, whose: str) -> Any:
    """What a YAML file holds; mappings have text as keys. whose: what an error names it by.

    Raises:
        InputError: if it cannot be read, is not YAML, or is too large.
    """
    where = f"{whose} {file}"
    try:
        content = read_regular(file, MOST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: cannot be read ({error})") from error
    if len(content) > MOST_BYTES:
        raise InputError(f"{where}: larger than {MOST_BYTES // 1024} KiB")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > MOST_VALUES:
            raise InputError(f"{where}: more than {MOST_VALUES:,} values (aliases count in full)")
        found = loader.construct_document(node)
        _check_keys(found, where)
    except RecursionError as error:
        raise InputError(f"{where}: not YAML (nested too deeply)") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        # Dates that are none and numbers of thousands of digits are ValueErrors.
        raise InputError(f"{where}: not YAML ({' '.join(str(error).split())})") from error
    return found


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below a node, itself included, each as often as it is written or referred to.

    Raises:
        yaml.YAMLError: for a node that holds itself.
    """
    if id(node) not in known:
        known[id(node)] = -1  # until all below is counted
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        known[id(node)] = 1 + sum(_num_values(part, known) for part in parts)
    if known[id(node)] < 0:
        raise yaml.YAMLError("an alias is inside what it refers to")
    return known[id(node)]


def _check_keys(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise InputError(f"{where}: the key {key!r:.80} is no text; write it in quotes")
            _check_keys(each, where)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_keys(each, where)
