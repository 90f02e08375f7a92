"""What other libraries say is held back while they are imported, and no longer."""

import logging
import warnings

import pytest

from beamwright.checks.model import check_parity
from beamwright.models.linear import quiet_import
from beamwright.sections import ModelSettings


def test_parity_prints_nothing(write_family, capfd):
    folder, _ = write_family("llama-odd")
    capfd.readouterr()
    from transformers.utils import logging as shown

    drew_bars = shown.is_progress_bar_enabled()
    check_parity(ModelSettings(model=str(folder)))
    assert capfd.readouterr() == ("", "")
    assert shown.is_progress_bar_enabled() == drew_bars


def test_remarks_are_held_back_for_the_import_only(caplog):
    logger = logging.getLogger("torchao.some.part")
    with quiet_import():
        logger.warning("Failed to load")
        warnings.warn("deprecated", stacklevel=1)
        logging.getLogger("beamwright").warning("ours")
    logger.warning("later")
    assert [record.message for record in caplog.records] == ["ours", "later"]
    with pytest.warns(UserWarning, match="deprecated"):
        warnings.warn("deprecated", stacklevel=1)


def test_levels_come_back_after_an_error():
    logger = logging.getLogger("torchao")
    level = logger.level
    with pytest.raises(ImportError), quiet_import():
        raise ImportError
    assert logger.level == level
