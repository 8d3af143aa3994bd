"""The API fuzzed by its own description: whatever comes, no 500 and nothing undocumented."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from servers import make_predictor, running

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
OPERATIONS = [
    ("/predict", "POST", RIGHT),
    ("/predict", "POST", WRONG),
    ("/explain", "POST", RIGHT),
    ("/explain", "POST", WRONG),
    ("/model", "GET", RIGHT),  # these two take nothing that could be wrong
    ("/health", "GET", RIGHT),
]


@pytest.fixture(scope="module")
def api():
    with running(make_predictor()) as server:
        yield schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")


@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_whatever_is_sent_is_answered_as_described(api, path, method, mode):
    sent = []

    @settings(
        max_examples=100,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def fuzz(case):
        response = case.call()
        sent.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    fuzz()
    assert sent and max(sent) < 500


def test_every_operation_is_fuzzed(api):
    described = {(found.ok().path, found.ok().method.upper()) for found in api.get_all_operations()}
    assert described == {(path, method) for path, method, _ in OPERATIONS}
