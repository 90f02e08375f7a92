"""Links of both kinds, and the forests that attention is tested with."""

import pytest

from attention.conftest import make_forest  # noqa: F401 (a fixture)
from beamwright.kv.link import StreamLink
from beamwright.kv.streams import HostStreams
from streams import LateStreams


@pytest.fixture(params=["copier", "streams"])
def link(request):
    """Strided pieces by a thread, or contiguous ones that a card's streams copy when they must."""
    link = StreamLink(HostStreams() if request.param == "copier" else LateStreams())
    yield link
    link.close()
