import gc

from beamwright.cli.output import first_import


def test_the_collector_rests_during_a_first_import_alone(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with first_import("never.heard_of"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [False]
    with first_import("gc"):
        assert gc.isenabled()
    assert len(frozen) == 1
