"""Who gets in, and what he learns: keys, salts of the prefix cache, and the log.

Protects that nobody gets in without a key, that no tenant learns what another has asked, that no
page of another site finds a way in, and that the log holds nothing of a prompt.
"""

import logging

import httpx
import openai
import pytest

from tests.servers import make_llm, serving


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("radix", [False, True])
def test_by_default_no_tenant_learns_what_another_has_asked(radix):
    """The cached tokens of a prompt tell whether somebody has asked it: what a clock would tell
    too, for each is a token that was not computed."""
    secret, kind = "my password is 1234", "radix" if radix else "hash"
    tenants = ("red", "blue")

    def ask(server, key: str, **more) -> int:
        return cached(
            server.post("/v1/completions", key=key, prompt=secret, model="tiny", max_tokens=1,
                        **more))

    with serving(make_llm(prefix_cache=kind), keys=tenants) as server:
        assert [ask(server, key) for key in ("red", "red", "blue", "blue")] == [0, 16, 0, 16]
        # One key may part its own users further.
        assert [ask(server, "red", cache_salt=salt) for salt in ("a", "b", "a")] == [0, 0, 16]
        assert ask(server, "blue", cache_salt="a") == 0
    with serving(make_llm(prefix_cache=kind), keys=tenants, share_prefixes=True) as server:
        assert [ask(server, key) for key in ("red", "blue")] == [0, 16]
        assert ask(server, "blue", cache_salt="a") == 0
    with serving(make_llm(prefix_cache=kind)) as server:
        assert [cached(server.complete(secret)) for _ in range(2)] == [0, 16]


def test_nobody_gets_in_without_a_key():
    with serving(keys=["first", "sécond"]) as server:
        for key in ("first", "sécond"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200
            assert httpx.get(server.url + "/metrics", headers=headers).status_code == 200
        for sent in (None, "Bearer", "Bearer firs", "Bearer first2", "Basic first", "first",
                     "Bearer first,first", "Bearer \xff"):
            headers = {} if sent is None else {"Authorization": sent.encode("latin-1")}
            for path in ("/v1/models", "/v1/nothing", "/metrics", "/openapi.json", "//"):
                answer = httpx.get(server.url + path, headers=headers)
                assert answer.status_code == 401, (sent, path)
                assert answer.json()["error"]["code"] == "invalid_api_key"
            answer = httpx.post(server.url + "/v1/completions",
                                content=b'{"model": "tiny", "prompt": "a"}',
                                headers=headers | {"Content-Type": "application/json"})
            assert answer.status_code == 401
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/").status_code == 200  # asks for a key
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="no").models.list()


def test_a_page_of_another_site_finds_no_way_in():
    """Its name made to point here: the Host is still its own. No answer allows other origins."""
    with serving(local_only=True) as server:
        for host, status in (("evil.example", 403), ("evil.example:80", 403),
                             ("127.0.0.1.evil", 403), ("localhost", 200), ("LOCALHOST:9", 200),
                             ("127.0.0.1", 200), ("[::1]:8000", 200), ("[::1]", 200)):
            answer = httpx.get(server.url + "/v1/models",
                               headers={"Host": host, "Origin": "http://evil.example"})
            assert answer.status_code == status, host
            assert "access-control-allow-origin" not in answer.headers
        asked = httpx.options(
            server.url + "/v1/completions",
            headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"})
        assert asked.status_code >= 400 and "access-control-allow-origin" not in asked.headers


# ── the log ───────────────────────────────────────────────────────────────────────────────────────


def test_the_log_holds_nothing_of_a_prompt_unless_asked_to(caplog):
    caplog.set_level(logging.DEBUG)

    def talk(server) -> str:
        caplog.clear()
        server.chat("a secret")
        server.complete("a secret", stream=True)
        server.chat("a secret", stop=["a secret", 5])
        server.chat("a secret" * 100)
        httpx.get(server.url + "/a%0Asecret?secret=1")
        server.wait_until_empty()
        return "\n".join(record.getMessage() for record in caplog.records
                         if not record.name.startswith(("httpx", "httpcore")))

    with serving() as server:
        said = talk(server)
        assert "secret" not in said.replace("/a\\nsecret", "") and "6 generated" in said
    with serving(log_prompts=True) as server:
        assert talk(server).count("a secret") >= 2
