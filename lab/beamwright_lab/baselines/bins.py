"""FlashTTS's SelectSPEC (section 4.1.1), `--foresight bins`: speculation by the last scores.

The scores of the beams' previous steps are divided into `width` bins of equal size; bin 1 is the
best. A beam in bin j may get width - j + 1 speculative children.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.protocols import Prospect
from beamwright.search.prospects import FORESIGHTS, best_first, can_be_extended, ranks
from beamwright.tree import Node


def by_bins(beams: Sequence[Node], width: int, max_depth: int | None = None) -> list[Prospect]:
    """Return the beams to speculate on, best first, each with at most width - j + 1 children."""
    shares = ranks([None if beam.parent is None else beam.parent.score for beam in beams])
    branches = [min(width, 1 + int(share * width)) for share in shares]
    return best_first(
        Prospect(beam, most, potential=most)
        for beam, most in zip(beams, branches, strict=True)
        if can_be_extended(beam, max_depth)
    )


FORESIGHTS["bins"] = by_bins
