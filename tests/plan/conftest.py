"""OPT-6.7B in 16 bits, the LBS paper's machine, and its workload."""

from dataclasses import replace

import pytest

from beamwright.plan.costs import ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.plan.workload import Workload


@pytest.fixture
def opt():
    parameters = 6_658_473_984
    return ModelCosts(32, parameters, 2 * parameters, 512 * 1024, 32, 128, 2)


@pytest.fixture
def gpu():
    return find_profile("rtx-4090")


@pytest.fixture
def paper():
    """The paper's workload: 128 + 1920 tokens, width 2."""

    def make(num_beams=64, step_tokens=32, **changes):
        return replace(Workload(num_beams, 2, 128, 1920, step_tokens), **changes)

    return make
