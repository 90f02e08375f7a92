"""What stands between a server and its client: packed replies, redirects, proxies, logins."""

import gzip
import json
import zlib
from base64 import b64encode
from urllib.parse import unquote

import pytest

from beamwright import Solver
from beamwright.errors import InputError, UnavailableError
from scripted_server import choice, refuses, said, sent, speaking

PACKED = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}
ONE = json.dumps(said(choice("x"))[1]).encode()


@pytest.mark.parametrize("encoding", PACKED)
def test_a_proxy_that_packs_replies_is_read_and_is_no_bomb(reply_to, encoding):
    for content, status, words in (
        (ONE, 200, "None"),
        (b'{"error": "it is overloaded"}', 400, "it is overloaded"),
        (b" " * 10**7, 200, "the reply has more than 70,240 bytes"),
    ):
        packed = sent(PACKED[encoding](content), status, content_encoding=encoding)
        reply, server = reply_to(lambda body, packed=packed: packed)
        assert words in str(reply.error)
    assert set(server.accepts) == {"identity"}


@pytest.mark.parametrize("method", [301, 302, 303, 307, 308])
def test_a_redirect_is_followed_or_its_target_told(reply_to, codec, method):
    with speaking(codec, then=lambda body: said(choice("x"))) as target:
        where = f"{target.url}/completions"
        reply, _ = reply_to(lambda body: (method, {}, {"location": where}))
    if method in (307, 308):
        assert [each.text for each in reply.written] == ["x"]
    else:
        assert f"the server redirects to {where}" in str(reply.error)


# --- what stands between ---------------------------------------------------------------------

PROXIES = ("all_proxy", "http_proxy", "https_proxy", "no_proxy")


@pytest.mark.parametrize(
    ("name", "proxy", "words"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9", "of the environment; NO_PROXY=127.0.0.1"),
        ("all_proxy", "socks://127.0.0.1:9", "proxy socks5://127.0.0.1:9"),
        ("http_proxy", "http://127.0.0.1:9", "through the proxy http://127.0.0.1:9 of"),
        ("http_proxy", "http://me:s3cret@127.0.0.1:9", "through the proxy http://127.0.0.1:9 of"),
        ("http_proxy", "127.0.0.1:9", "through the proxy http://127.0.0.1:9 of"),
        ("all_proxy", "odd://127.0.0.1:9", "proxy odd://127.0.0.1:9"),
        ("https_proxy", "http://127.0.0.1:9", None),
    ],
)
@pytest.mark.parametrize("around", [None, "127.0.0.1", "*", "localhost,127.0.0.1"])
def test_a_proxy_is_named_and_gone_around(
    codec, source_of, monkeypatch, name, proxy, words, around
):
    for each in PROXIES:
        monkeypatch.delenv(each, raising=False)
        monkeypatch.delenv(each.upper(), raising=False)
    monkeypatch.setenv(name, proxy)
    if around:
        monkeypatch.setenv("no_proxy", around)
    with speaking(codec) as server:
        if around or words is None:
            assert source_of(server).name == "m"
            return
        with pytest.raises(InputError) as error:
            source_of(server)
    assert words in str(error.value)
    assert "protocol" not in str(error.value)
    assert "s3cret" not in str(error.value)


# --- the login -------------------------------------------------------------------------------

LOGINS = ["me:s3cret", "me:s3%63ret", "s3cret", "me:s3c@r/et"]


@pytest.mark.parametrize("login", LOGINS)
def test_a_login_in_the_url_goes_to_the_server_and_nowhere_else(codec, generator_folder, login):
    def answer(body):
        return refuses(f"wrong: {login} {unquote(login)}", 401)

    with speaking(codec, then=answer) as server:
        model = f"openai:{server.url.replace('//', f'//{login}@')}#m"
        given = {"verifier": "none", "search": "majority", "n": 2, "max_tokens": 8}
        with Solver(model=model, tokenizer=str(generator_folder), **given) as solver:
            with pytest.raises(UnavailableError) as failed:
                solver.solve("a")
            server.answer = lambda body: said(choice("1"), choice("2"))
            shown = [repr(solver), solver.settings.model_dump_json(), str(failed.value)]
            shown.append(json.dumps(solver.solve("a", seed=3).to_json()))
        with pytest.raises(InputError) as error:
            Solver(model=model + "n", tokenizer=str(generator_folder), **given)
    basic = b64encode(unquote(login if ":" in login else f"{login}:").encode()).decode()
    assert set(server.keys) == {f"Basic {basic}"}
    for line in (*shown, str(error.value)):
        assert not [each for each in ("s3cret", "s3c@r", "s3%63ret", basic) if each in line]


def test_a_key_in_a_query_is_refused_unseen(generator_folder):
    with pytest.raises(InputError, match="--model-key") as error:
        Solver(model="openai:http://127.0.0.1:9/v1?key=s3cret#m", tokenizer=str(generator_folder))
    assert "s3cret" not in str(error.value)
