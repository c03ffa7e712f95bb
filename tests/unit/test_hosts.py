"""Host headers that pass for ours and are not. The guarded bugs: an address at the beginning of a
foreign name, and what a lenient reader cuts off or takes for a name without a dot."""

import pytest

from foretoken.server.hosts import host_name, is_own

OWN = {
    "localhost": "localhost", "LocalHost:8000": "localhost", "localhost.": "localhost",
    "localhost:": "localhost", "app.localhost:80": "app.localhost", "foretoken": "foretoken",
    "my_server-1:8000": "my_server-1", "127.0.0.1:8000": "127.0.0.1", "10.0.0.7": "10.0.0.7",
    "[::1]": "::1", "[::1]:8000": "::1", "[FE80::1]": "fe80::1", "[::ffff:10.0.0.1]:1":
    "::ffff:10.0.0.1", "127.0.0.1.": "127.0.0.1", "2130706433": "2130706433",
}  # fmt: skip
FOREIGN = (
    "evil.example", "evil.example:8000", "evil.example.", "localhost.evil.example",
    "127.0.0.1.evil.example", "127.1.evil", "1.2.3", "127.0.0.01", "0x7f.0.0.1",
    "notlocalhost.example", "evil.localhost.example", "foretoken.local",
)  # fmt: skip
MALFORMED = (
    "[::1].evil.example", "[::1]evil.example", "[::1]:80.evil.example", "[::1", "::1", "::1]",
    "[evil.example]", "[127.0.0.1]", "[]", "[:]", "[::1]]", "[[::1]]", "[::1%.evil.example]",
    "[fe80::1%25eth0]", "[::1]:80:80", "localhost:80:80", "localhost:80.evil.example",
    "localhost:evil.example", "localhost:123456", "localhost:-1", "localhost: 80",
    "localhost evil.example", "localhost,evil.example", "localhost, evil.example",
    "localhost/evil.example", "localhost\\evil.example", "localhost?.evil.example",
    "localhost#.evil.example", "localhost@evil.example", "user@localhost", "evil%2eexample",
    "evil\u3002example", "evil\xa1\xa3example", "\uff4cocalhost", "\u212aelvin", "lo\xadcalhost",
    "localhost\x00.evil.example", "localhost\n", "localhost\t", " localhost", "localhost ",
    ".", "..", ".evil.example", "evil..example", "localhost..", ":", ":80", "*.example",
    "http://localhost", "a" * 64, "::1:evil.example", "localhost;evil.example", '"localhost"',
)  # fmt: skip


@pytest.mark.parametrize("host", OWN)
def test_own(host: str) -> None:
    assert host_name(host) == OWN[host] and is_own(host, ())


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign(host: str) -> None:
    assert not is_own(host, ("127.0.0.1", "llm.example", "*.llm.example"))


@pytest.mark.parametrize("host", MALFORMED)
def test_malformed(host: str) -> None:
    """Nothing allows it but the word for all: not the same text, nor what it seems to be below."""
    assert host_name(host) is None
    assert not is_own(host, (host, "*.evil.example", "*.example", "::1", "localhost"))
    assert is_own(host, ("*",))


def test_allowed_names_are_read_as_those_of_requests_are() -> None:
    for allowed in ("LLM.example", "llm.example:443", "llm.example."):
        assert is_own("llm.example:8000", (allowed,)) and not is_own("xllm.example", (allowed,))
    for host in ("a.llm.example", "A.b.LLM.example.:1"):
        assert is_own(host, ("*.llm.example",)) and not is_own(host, ("llm.example",))
    assert not is_own("llm.example", ("*.llm.example",))
    assert not is_own("allm.example", ("*.llm.example", "*.")) and is_own("", ())
