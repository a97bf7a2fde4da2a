"""Requests made from `/openapi.json`, right and wrong ones: no answer is a 5xx. Ten thousand of them run in `tools/nightly`."""

import pytest

pytest.importorskip("schemathesis")
api_fuzz = pytest.importorskip("octavo_tools.api_fuzz")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_three_hundred_requests_made_from_the_schema_are_never_a_server_error(make_api) -> None:
    api = make_api(card={"max_model_len": 24})
    findings = api_fuzz.fuzz(api_fuzz.of_app(api.app), 400)
    assert not findings.failures, findings.failures[0]
    assert findings.num_cases >= 300
    assert findings.statuses[200] > 10
    assert findings.statuses[400] > 50
