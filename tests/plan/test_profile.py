from dataclasses import replace

import pytest

from beamwright.plan.machines import NAMED_PROFILES

RTX_4090 = NAMED_PROFILES["rtx-4090"]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_every_rate_is_finite_and_positive(value):
    with pytest.raises(ValueError, match="device_bandwidth"):
        replace(RTX_4090, device_bandwidth=value)


def test_a_share_is_at_most_the_whole():
    with pytest.raises(ValueError, match="link_share"):
        replace(RTX_4090, link_share=1.01)
    assert replace(RTX_4090, link_share=1.0).link_share == 1.0
