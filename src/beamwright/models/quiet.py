"""Imports without what libraries say about machines other than this one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_import() -> Iterator[None]:
    """No warnings, and none in torchao's log: libraries for other machines, deprecated calls."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """transformers loads without drawing a bar."""
    from transformers.utils import logging as shown  # noqa: PLC0415 (slow import)

    was_enabled = shown.is_progress_bar_enabled()
    shown.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            shown.enable_progress_bar()
