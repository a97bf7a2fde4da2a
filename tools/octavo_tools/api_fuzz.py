"""Schema-driven fuzzing of the HTTP API: requests made from `/openapi.json`, right and wrong ones; no answer may be a 5xx or fail to come.

Needs schemathesis. In CI a few hundred cases run in process; at night ten thousand against a real server.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase

ROUNDS = 5  # of requests, until there are as many as asked for


@dataclasses.dataclass
class Findings:
    """What came back: answers by status, and in words every 5xx and every one that did not come."""

    statuses: Counter[int] = dataclasses.field(default_factory=Counter)
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_cases(self) -> int:
        """Requests made."""
        return sum(self.statuses.values())


def of_app(app: Any) -> Any:
    """The schema of an ASGI application, called in process."""
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def of_url(url: str) -> Any:
    """The schema of a running server."""
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def fuzz(schema: Any, num_cases: int, *, seed: int = 0, **arguments: Any) -> Findings:
    """Make about so many requests, the same share for each operation; those with bodies get four times as many.

    Args:
        arguments: Of every call, as `timeout`.
    """
    operations = [result.ok() for result in schema.get_all_operations()]
    findings = Findings()
    for again in range(ROUNDS):
        missing = num_cases - findings.num_cases - len(findings.failures)
        if missing <= 0:
            break
        # A route without parameters has few requests to make; what it leaves over goes to those that take a body.
        asked = [operation for operation in operations if not again or operation.method.upper() == "POST"]
        weights = [4 if operation.method.upper() == "POST" else 1 for operation in asked]
        for operation, weight in zip(asked, weights, strict=True):
            _fuzz_one(operation, max(1, missing * weight // sum(weights)), seed + again, findings, arguments)
    return findings


def _fuzz_one(operation: Any, most: int, seed: int, findings: Findings, arguments: dict[str, Any]) -> None:
    modes = list(schemathesis.GenerationMode)
    for share, mode in enumerate(modes):
        count = most // len(modes) + (share < most % len(modes))

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=max(1, count),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            try:
                answer = case.call(**arguments)
            except requests.RequestException as error:
                findings.failures.append(f"{case.as_curl_command()}\n-> no answer: {error}")
                return
            findings.statuses[answer.status_code] += 1
            if answer.status_code >= 500:
                findings.failures.append(f"{case.as_curl_command()}\n-> {answer.status_code} {answer.text[:500]}")

        try:
            one()
        except hypothesis.errors.Unsatisfiable:
            continue  # an operation without parameters has no wrong form
