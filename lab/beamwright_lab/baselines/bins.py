"""FlashTTS's SelectSPEC (section 4.1.1), `--foresight bins`: who is speculated by the score before.

The last scores of a round's beams are divided into `width` bins of equal size; a step whose score
lies in bin j, the best one being 1, may get width - j + 1 children ahead of selection.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.protocols import Prospect
from beamwright.search.prospects import FORESIGHTS, best_first, can_be_extended, ranks
from beamwright.tree import Node


def by_bins(beams: Sequence[Node], width: int, max_depth: int | None = None) -> list[Prospect]:
    """SelectSPEC as published: M_i = width - j + 1 children by the bin of the score before."""
    shares = ranks([None if beam.parent is None else beam.parent.score for beam in beams])
    branches = [min(width, 1 + int(share * width)) for share in shares]
    return best_first(
        Prospect(beam, most, potential=most)
        for beam, most in zip(beams, branches, strict=True)
        if can_be_extended(beam, max_depth)
    )


FORESIGHTS["bins"] = by_bins
