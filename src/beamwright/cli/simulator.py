"""Where the command line reaches the simulator; as in `engine`, imports wait until then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beamwright.cost import Layout, ModelCosts
    from beamwright.cost.model import Hardware
    from beamwright.runtime.simulation import ReplayTree, StepTree


def grow_tree(facts: Mapping[str, Any]) -> StepTree:
    """The tree of a made-up search with these settings, named as `beamwright simulate` does.

    Raises:
        InputError: if they do not go together.
    """
    from beamwright.runtime.simulation import SyntheticSearch, grow  # noqa: PLC0415

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
    tree: ReplayTree,
    models: tuple[ModelCosts, ModelCosts | None],
    kv_bytes: tuple[int, int],
    hardware: Hardware,
    layout: Layout,
    **settings: Any,
) -> dict[str, Any] | None:
    """One search under one schedule; None if it does not fit.

    models, kv_bytes: of generator and verifier. settings: of `Simulation`.
    """
    from beamwright.runtime.simulation import (  # noqa: PLC0415
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
