"""What other packages log while we work."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Whatever a logger would say of lesser things is left out."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
