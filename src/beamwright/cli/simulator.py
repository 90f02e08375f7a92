"""Where the command line reaches the simulator; as in `engine`, imports wait until then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from beamwright.errors import CapacityError

if TYPE_CHECKING:
    from beamwright.cost import Layout, ModelCosts
    from beamwright.cost.model import Hardware
    from beamwright.tree import RecordedTree


def grow_tree(facts: Mapping[str, Any]) -> RecordedTree:
    """The tree of a made-up search with these settings, named as `beamwright simulate` does.

    Raises:
        InputError: if they do not go together.
    """
    from beamwright.simulator import SyntheticSearch, grow  # noqa: PLC0415

    search = SyntheticSearch(
        num_beams=facts["n"],
        width=facts["width"],
        prompt_tokens=facts["prompt"],
        generate_tokens=facts["generate"],
        step_tokens=facts["step_tokens"],
        step_sigma=facts["step_spread"],
        search=facts["search"],
        survival=facts["survival"],
        seed=facts["seed"],
        options=facts["options"],
    )
    return grow(search)


def simulate_search(
    tree: RecordedTree,
    models: tuple[ModelCosts, ModelCosts | None],
    kv_bytes: tuple[int, int],
    hardware: Hardware,
    layout: Layout,
    **settings: Any,
) -> dict[str, Any] | None:
    """One search under one schedule; None if it does not fit.

    models, kv_bytes: of generator and verifier. settings: of `Simulation`.
    """
    from beamwright.simulator import (  # noqa: PLC0415
        RooflineCosts,
        Simulation,
        VerifierCase,
        simulate_if_fits,
    )

    generator, scorer = models
    verifier = None
    if scorer is not None:
        costs = RooflineCosts.of(scorer, hardware, layout)
        verifier = VerifierCase(scorer, costs, kv_bytes[1])
    result = simulate_if_fits(
        Simulation(
            tree,
            generator,
            RooflineCosts.of(generator, hardware, layout),
            kv_budget_bytes=kv_bytes[0],
            verifier=verifier,
            **settings,
        )
    )
    return None if result is None else asdict(result)


def known_engines() -> tuple[str, ...]:
    """The names of all engines, bounds included."""
    from beamwright.simulator import ENGINES  # noqa: PLC0415

    return tuple(ENGINES)


def fair_engines() -> tuple[str, ...]:
    """The names of the engines that exist."""
    from beamwright.simulator import FAIR  # noqa: PLC0415

    return FAIR


def has_host_tier(name: str) -> bool:
    """Whether this engine moves KV across the link."""
    from beamwright.simulator import ENGINES  # noqa: PLC0415

    return ENGINES[name].host_tier


def simulate_on_engine(
    name: str, tree: RecordedTree, model: ModelCosts, kv_bytes: int, hardware: Hardware
) -> dict[str, Any] | None:
    """One search on one engine, with both ways to read KV; None if it does not fit."""
    from beamwright.simulator import EngineCase, simulate_engine  # noqa: PLC0415

    try:
        by_row, once = simulate_engine(EngineCase(tree, model, hardware, kv_bytes), name)
    except CapacityError:
        return None
    return {"by_row": asdict(by_row), "once": asdict(once)}
