import pytest

from octavo_server import ServerConfig

KEY = "sk-one"
ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/org/toy", "/tokenize", "/detokenize", "/version", "/openapi.json", "/metrics"]  # fmt: skip
TWISTED = ["//v1/models", "/v1/models/", "/V1/MODELS", "/v1//models", "/%76%31/models", "/health/../v1/models", "/health/", "/HEALTH", "//health",
           "/health/x", "/", "", "/docs", "/v1", "*"]  # fmt: skip


@pytest.fixture
def locked(make_api):
    return make_api(config=ServerConfig(api_key=(KEY, "sk-two")))


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "BREW"])
def test_A18_every_route_and_spelling_is_401_without_a_key(locked, method: str) -> None:
    for path in [*ROUTES, *TWISTED]:
        response = locked.request(method, f"http://test{path}" if path != "*" else "http://test/*", json={"prompt": "x"})
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        assert method == "HEAD" or response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer sk-on", "Bearer sk-one2", "Bearer  sk-one", "sk-one", "Basic sk-one", "Bearer sk-one,sk-two", "Bearer é"]
)  # fmt: skip
def test_wrong_headers_are_401(locked, header: str) -> None:
    response = locked.get("/v1/models", headers={"authorization": header.encode("latin-1")})
    assert response.status_code == 401


def test_two_headers_are_401(locked) -> None:
    headers = [("authorization", "Bearer sk-one"), ("authorization", "Bearer sk-one")]
    assert locked.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("key", [KEY, "sk-two"])
def test_each_key_opens(locked, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    assert locked.post("/v1/completions", {"prompt": "x"}, headers=headers).status_code == 200
    assert locked.get("/v1/no-such-route", headers=headers).status_code == 404


def test_health_is_open(locked) -> None:
    assert locked.get("/health").status_code == 200


def test_health_is_open_behind_a_root_path_and_nothing_else_is(make_api) -> None:
    api = make_api(config=ServerConfig(api_key=(KEY,)))
    transport_app = api.app

    async def rooted(scope, receive, send):
        await transport_app({**scope, "root_path": "/llm", "path": "/llm" + scope["path"]}, receive, send)

    api.app = rooted
    assert api.get("/health").status_code == 200
    assert api.get("/v1/models").status_code == 401
    assert api.get("/v1/models", headers={"authorization": "Bearer sk-one"}).status_code == 200


def test_tenants_do_not_share_cached_prefixes(locked) -> None:
    def cached(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        usage = locked.post("/v1/completions", {"prompt": [7] * 40, "max_tokens": 1}, headers=headers).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(KEY), cached(KEY), cached("sk-two"), cached("sk-two")] == [0, 32, 0, 32]


def test_openapi_names_the_key(locked, api) -> None:
    assert "securitySchemes" in locked.get("/openapi.json", headers={"authorization": "Bearer sk-one"}).text
    assert "securitySchemes" not in api.get("/openapi.json").text
