"""Other packages' logs, quieted while we call them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Inside, the logger says nothing that is less than an error."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
