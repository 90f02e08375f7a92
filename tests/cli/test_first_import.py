import gc

import pytest

from beamwright.cli.output import first_import


@pytest.fixture
def frozen(monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(gc.isenabled()))
    return calls


def test_the_collector_rests_during_a_first_import_alone(frozen):
    with first_import("never.heard_of"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [False]
    with first_import("gc"):
        assert gc.isenabled()
    assert len(frozen) == 1


def test_a_collector_that_is_off_stays_off(frozen):
    gc.disable()
    try:
        with first_import("never.heard_of"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert not frozen
