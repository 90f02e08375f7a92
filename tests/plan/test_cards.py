import pytest

from beamwright.plan.cards import CARDS, card_of_device
from beamwright.plan.machines import NAMED_PROFILES

GIB = 2**30


@pytest.mark.parametrize(
    ("device_name", "memory_gib", "name"),
    [
        ("NVIDIA GeForce RTX 3060", 11.8, "rtx-3060"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.6, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("Tesla T4", 14.6, "t4"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H200", 139.8, "h200"),
        # Another chip, or another amount of memory, is another card.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 15.6, None),
        ("NVIDIA GeForce RTX 3070 with Max-Q Design", 7.8, None),
        ("NVIDIA GeForce RTX 3060", 7.8, None),
        ("NVIDIA GeForce RTX 4060 Ti", 7.7, "rtx-4060-ti-8gb"),
        ("NVIDIA GeForce RTX 4070", 11.7, "rtx-4070"),
        ("NVIDIA GeForce RTX 4070 Ti", 11.7, "rtx-4070-ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.7, "rtx-4070-ti-super"),
        ("NVIDIA GeForce RTX 3080 Ti", 11.7, "rtx-3080-ti"),
        ("NVIDIA GeForce RTX 5080 Ti", 15.6, None),
        ("AMD Radeon RX 7900 XTX", 24, "rx-7900-xtx"),
        ("AMD Radeon", 15.6, None),
    ],
)
def test_a_card_by_what_cuda_calls_it(device_name, memory_gib, name):
    found = card_of_device(device_name, round(memory_gib * GIB))
    assert (found and found.name) == name


def test_every_card_names_its_source_and_is_a_profile():
    for name, card in CARDS.items():
        assert card.source
        assert NAMED_PROFILES[name].device_memory_bytes == card.memory_bytes
        assert card.flops(2) >= card.flops(4)


def test_the_int4_kernel_needs_bfloat16():
    without = {name for name, card in CARDS.items() if not card.has_int4_kernel}
    assert without == {"t4", *(name for name in CARDS if name.startswith("rx-"))}


def test_the_cards_are_reckoned_alike():
    """Of GeForce cards, 16-bit products run at twice the rate of float32."""
    for name, card in CARDS.items():
        if name.startswith("rtx-"):
            assert card.tflops == pytest.approx(2 * card.float32_tflops, rel=0.01), name
