"""`beamwright simulate --engines`: simulate serving engines on the same tree, for comparison."""

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
    "Engines, separated by commas: vllm, vllm-offload, sglang, sglang-hicache (with a host tier, "
    "write-through), sglang-write-back, clairvoyant (a lower bound), or none. In all of them each "
    "step is a new request and shared KV is stored once. They support no verifier. Default: the "
    f"first five, if --schedules and --verifier are not given, up to {_CHEAP_TOKENS:,} tokens.",
    "NAMES",
)


def named_engines(names: str | None) -> tuple[str, ...] | None:
    """Return the engines that --engines names; None if it is not given.

    Raises:
        InputError: if a name is unknown.
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
            raise InputError(f"--engines {names}: unknown engine {name!r}. {hint}")
    return found


def engines_beside(
    case: Case, named: Sequence[str] | None, *, all_schedules: bool, has_verifier: bool
) -> tuple[Sequence[str], str | None]:
    """Return the engines to simulate, and the reason if the default ones are left out.

    named: the result of `named_engines`. all_schedules: no schedule is left out by --schedules.

    Raises:
        InputError: if an engine is named and there is a verifier.
    """
    from beamwright_lab.simulator.engines import FAIR

    if named and has_verifier:
        raise InputError(f"--engines {','.join(named)}: engines support no verifier")
    if named is not None or not all_schedules:
        return named or (), None
    if has_verifier:
        return (), "they support no verifier"
    num_tokens = sum(node.tokens for node in case.tree.nodes)
    if num_tokens > _CHEAP_TOKENS:
        usual = ",".join(FAIR)
        return (), f"{num_tokens:,} tokens take minutes; use --engines {usual}"
    return FAIR, None
