import pytest

from capsroute.data.mnist import DigitArrays, load_mnist


@pytest.fixture(scope="session")
def mnist() -> DigitArrays:
    return load_mnist()
