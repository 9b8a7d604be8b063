"""What a Redis URL says, and what of it may be shown."""

import pytest

from gllm.urls import Address, redact, target_of


@pytest.mark.parametrize(
    "url",
    ["redis://h:1/3?protocol=3", "rediss://ann:p%40ss@h", "redis://", "redis://[::1]:7/0", "unix:///run/r.sock?db=1"],
)
def test_url_of_one_server_is_left_to_redis_py(url: str) -> None:
    target = target_of(url)
    assert (target.kind, target.url) == ("server", url)


@pytest.mark.parametrize(
    ("url", "plain", "addresses", "service", "user"),
    [
        ("sentinel://s/main", "redis://s:26379/0", [("s", 26379)], "main", {}),
        ("redis+sentinel://s:1,t:2/main/5", "redis://s:1/5", [("s", 1), ("t", 2)], "main", {}),
        ("rediss+sentinel://s/a%2Fb/", "rediss://s:26379/0", [("s", 26379)], "a/b", {}),
        ("SENTINEL://[::1]:7,[fe80::2]/m", "redis://[::1]:7/0", [("::1", 7), ("fe80::2", 26379)], "m", {}),
        (
            "sentinel://ann:p%40s@s/main?sentinel_username=bob&sentinel_password=a%26b&ssl_cert_reqs=none",
            "redis://ann:p%40s@s:26379/0?ssl_cert_reqs=none",
            [("s", 26379)],
            "main",
            {"username": "bob", "password": "a&b"},
        ),
    ],
)
def test_url_names_sentinels_service_and_both_users(
    url: str, plain: str, addresses: list[tuple[str, int]], service: str, user: dict[str, str]
) -> None:
    target = target_of(url)
    assert target == ("sentinel", plain, [Address(*address) for address in addresses], service, user)


@pytest.mark.parametrize("path", ["", "/", "/0"])
def test_url_names_some_nodes_of_a_cluster(path: str) -> None:
    target = target_of(f"rediss+cluster://:pw@a,b:7000{path}?client_name=x")
    assert target.kind == "cluster"
    assert target.url == "rediss://:pw@a:6379/0?client_name=x"
    assert target.addresses == [Address("a", 6379), Address("b", 7000)]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "one of the schemes redis://, rediss://, unix://, sentinel://.* expected"),
        ("redis", "one of the schemes"),
        ("redis+unix://h", "one of the schemes"),
        ("redis://h:99999", "port: 1 to 65535 expected, not 99999"),
        ("redis://h:0", "port: 1 to 65535"),
        ("redis://h:port", "host or host:port expected"),
        ("redis://a,b/0", "one host expected; several are for sentinel:// and redis[+]cluster://"),
        ("redis://h/main", "the number of a database expected"),
        ("sentinel://s", "sentinel://host:port,…/service or …/service/db expected"),
        ("sentinel://s/", "/service"),
        ("sentinel://s/main/x", "/service"),
        ("sentinel:///main", "host or host:port expected"),
        ("sentinel://s,,t/main", "host or host:port expected"),
        ("sentinel://s/main?sentinel_db=1", "unknown option 'sentinel_db'"),
        ("redis+cluster://h/3", "a cluster has database 0 only"),
        ("redis+cluster://a:1;b:2", "host or host:port expected"),
        ("redis://:geh/eim@h:1/0", "%2F"),
        ("redis://:geh?eim@h:1/0", "host or host:port expected"),
        ("sentinel://:geheim@s:1,:geheim@t:1/main", "user:password@host:port… expected"),
    ],
)
def test_url_that_is_none_is_refused_without_its_password(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        target_of(url)
    assert "geh" not in str(caught.value)
    assert "eim" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:pw@h:1/0", "redis://:***@h:1/0"),
        ("redis://ann:p%40w@h/0", "redis://ann:***@h/0"),
        ("redis://ann:p@w@h/0", "redis://ann:***@h/0"),
        ("rediss://ann:a:b@h/0?ssl_cert_reqs=none", "rediss://ann:***@h/0?ssl_cert_reqs=none"),
        ("rediss://h/0?ssl_password=pw&ssl_keyfile=k", "rediss://h/0?ssl_password=***&ssl_keyfile=k"),
        ("redis://:a/b?c@h/0", "redis://:***@h/0"),
        ("unix:///run/r.sock?db=1&password=pw", "unix:///run/r.sock?db=1&password=***"),
        ("sentinel://h:1,i:2/main", "sentinel://h:1,i:2/main"),
        (
            "sentinel://ann:pw@h:1,i:2/main/0?sentinel_username=bob&sentinel_password=pw#x",
            "sentinel://ann:***@h:1,i:2/main/0?sentinel_username=bob&sentinel_password=***#x",
        ),
        ("redis+cluster://:pw@a:1,b:2", "redis+cluster://:***@a:1,b:2"),
        ("sentinel://u:pw@a:1,v:pw@b:2/m", "sentinel://u:***@b:2/m"),
    ],
)
def test_url_is_shown_without_its_passwords(url: str, shown: str) -> None:
    assert redact(url) == shown
