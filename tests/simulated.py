"""The search that tests of the simulator share: OPT-6.7B in 16 bits on an RTX 4090."""

from beamwright.cost import ModelCosts
from beamwright.hardware import find_profile
from beamwright.models.named_shapes import NAMED_SHAPES
from beamwright.simulator import SyntheticSearch, grow

GIB = 2**30
CARD = find_profile("rtx-4090")
MODEL = ModelCosts.of(NAMED_SHAPES["opt-6.7b"], 2)
SEARCH = SyntheticSearch(16, 2, 128, 256, 32)
TREE = grow(SEARCH)
