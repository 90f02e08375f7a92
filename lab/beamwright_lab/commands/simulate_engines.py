"""`beamwright simulate --engines`: serving engines beside the schedules, on the same tree."""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.cli.options import option
from beamwright.errors import InputError
from beamwright.registry import did_you_mean
from beamwright_lab.commands.simulate_case import Case

_CHEAP_TOKENS = 2**18  # 128 beams of 2,048 tokens: seconds; 512 beams take minutes
_NONE = "none"

ENGINES_OPTION = option(
    None,
    "With commas between: vllm, vllm-offload, sglang, sglang-hicache (with a host tier, by "
    "default write-through), sglang-write-back, clairvoyant (a bound), or none. By their rules "
    "each step is a prompt of its own and shared KV is held once; they know no verifier. "
    "Default: the first five, beside all schedules, without a verifier, up to "
    f"{_CHEAP_TOKENS:,} tokens.",
    "NAMES",
)


def named_engines(names: str | None) -> tuple[str, ...] | None:
    """The engines that --engines names; None if it is not given.

    Raises:
        InputError: if there is no such engine.
    """
    if names is None:
        return None
    if names.strip() == _NONE:
        return ()
    from beamwright_lab.simulator.engines import ENGINES

    found = tuple(dict.fromkeys(each.strip() for each in names.split(",")))
    for name in found:
        if name not in ENGINES:
            hint = (
                f"{did_you_mean(name, dict.fromkeys(ENGINES))}Known: {', '.join(ENGINES)}, or none"
            )
            raise InputError(f"--engines {names}: no engine {name!r}. {hint}")
    return found


def engines_beside(
    case: Case, named: Sequence[str] | None, *, all_schedules: bool, has_verifier: bool
) -> tuple[Sequence[str], str | None]:
    """The engines to simulate, and why the usual ones are left out.

    named: what `named_engines` found. all_schedules: --schedules leaves none out.

    Raises:
        InputError: if an engine is named beside a verifier.
    """
    from beamwright_lab.simulator.engines import FAIR

    if named and has_verifier:
        raise InputError(f"--engines {','.join(named)}: their rules know no verifier, leave it out")
    if named is not None or not all_schedules:
        return named or (), None
    if has_verifier:
        return (), "their rules know no verifier"
    num_tokens = sum(node.tokens for node in case.tree.nodes)
    if num_tokens > _CHEAP_TOKENS:
        usual = ",".join(FAIR)
        return (), f"{num_tokens:,} tokens take minutes; --engines {usual} simulates them"
    return FAIR, None
