"""A server that most tests share, and one of a test's own."""

import pytest
from servers import make_predictor, running


@pytest.fixture(scope="session")
def predictor():
    return make_predictor()


@pytest.fixture(scope="session")
def server(predictor):
    with running(predictor) as server:
        yield server


@pytest.fixture
def serving():
    return running
