"""What the program says is what is pinned (see golden.py)."""

import pytest

import golden

CASES = [(name, case) for name, (cases, _) in golden.GOLDENS.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_it_is_as_pinned(name, case):
    _, find = golden.GOLDENS[name]
    pinned, tolerance = golden.pinned(name)[case], golden.tolerance_of(name)
    found = list(golden.differences(find(case), pinned, **tolerance))
    assert not found, "if that is meant, run: python tests/support/golden.py\n" + "\n".join(found)


@pytest.mark.parametrize("name", golden.GOLDENS)
def test_every_case_is_pinned(name):
    assert set(golden.pinned(name)) == set(golden.GOLDENS[name][0])


@pytest.mark.parametrize(
    ("found", "pinned", "places"),
    [
        ({"a": 1, "b": [1.0, None]}, {"a": 1, "b": [1.0 + 1e-13, None]}, []),
        ({"a": 1}, {"a": 2}, ["/a"]),
        ({"a": 1}, {"a": 1.0}, ["/a"]),
        ({"a": 1, "c": 0}, {"a": 1, "b": 0}, ["/b", "/c"]),
        ({"a": [1, 2.0]}, {"a": [1, 2.0 + 1e-9]}, ["/a/1"]),
        ({"a": [1]}, {"a": [1, 2]}, ["/a"]),
        ({"a": None}, {"a": {}}, ["/a"]),
    ],
)
def test_what_differs_is_named(found, pinned, places):
    assert [line.split(":")[0] for line in golden.differences(found, pinned)] == places
