"""The command configures logging for its whole process; tests share theirs with others."""

import logging

import pytest


@pytest.fixture(autouse=True)
def _restored_logging():
    logger = logging.getLogger("ister")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
