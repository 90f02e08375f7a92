"""The ratchet: no room of wheel, lab or tests grows beyond `house.toml`."""

import house


def test_no_room_is_larger_than_its_limit():
    limits = house.read_limits()
    measured = house.measure_rooms()
    grown = [
        f"{name}/{room}: {size} statements and files, the limit is {limits[name].get(room)}"
        for name, rooms in measured.items()
        for room, size in rooms.items()
        if any(now > most for now, most in zip(size, limits[name].get(room, [0, 0]), strict=True))
    ]
    assert not grown, "make it smaller, or move what another room can spare (tests/house.toml)"


def test_limits_add_up_to_no_more_than_the_start_and_its_grants():
    limits = house.read_limits()
    total = sum(size for name in house.HOUSES for size, _ in limits[name].values())
    assert total <= limits["start"] + sum(limits["grants"].values())


def test_a_parallel_assignment_counts_each_target_and_docstrings_count_nothing():
    source = '"""Words."""\nif True:\n    a, b = 1, 2\n    c, d = pair\n'
    assert house.count_statements(source) == 4
