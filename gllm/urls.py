"""What a Redis URL says: which server, or who knows which server, and with which options.

| scheme | leads to |
| --- | --- |
| `redis://`, `rediss://` (TLS), `unix://` | one server |
| `sentinel://h1:26379,h2:26379/service/db`, `redis+sentinel://`, `rediss+sentinel://` (TLS) | the service's primary |
| `redis+cluster://h1:6379,h2:6379`, `rediss+cluster://` (TLS) | the node of a cluster that has the queue's slot |

User and password before the hosts are those of the Redis servers; sentinels have `sentinel_username` and
`sentinel_password` among the options. All other options are redis-py's.
"""

import re
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

Kind = Literal["server", "sentinel", "cluster"]

SCHEMES = {
    "redis": "server",
    "rediss": "server",
    "unix": "server",
    "sentinel": "sentinel",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}
PORTS = {"server": 6379, "sentinel": 26379, "cluster": 6379}
MAX_PORT = 65535
IN_PASSWORDS = " (in a password / ? # @ are written %2F %3F %23 %40)"

_URL = re.compile(
    r"[^:]*://(?:(?P<user>[^/?#]*)@)?(?P<hosts>[^/?#@]*)(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?(?:#.*)?"
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Za-z:.%]+\]|[^:\[\]\s]+)(?::(?P<port>[0-9]+))?")
_SERVICE = re.compile(r"/(?P<service>[^/]+)(?:/(?P<db>[0-9]*))?")
_PASSWORDS = re.compile(r"(?P<user>://[^:@/]*:).*(?=@)|(?P<key>[?&][a-z_]*password=)[^&#]*")


class Address(NamedTuple):
    """A server's place in the network."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Target(NamedTuple):
    """`url` is a plain one with all options of the Redis servers, in which the host is only right for one server.

    `addresses`: of the sentinels, or of some nodes of the cluster. `user`: how sentinels know us.
    """

    kind: Kind
    url: str
    addresses: list[Address]
    service: str
    user: dict[str, str]


def target_of(url: str) -> Target:
    """Take a Redis URL apart. Raises ValueError, whose message holds no password."""
    scheme = url.partition("://")[0].lower()
    if scheme not in SCHEMES or "://" not in url:
        raise ValueError(f"one of the schemes {', '.join(name + '://' for name in SCHEMES)} expected")
    if scheme == "unix":
        return Target("server", url, [], "", {})
    kind: Kind = SCHEMES[scheme]  # type: ignore[assignment]
    parts = _URL.fullmatch(url)
    if parts is None or (kind != "server" and "@" in (parts["user"] or "")):
        raise ValueError(f"user:password@host:port… expected{IN_PASSWORDS}")
    addresses = _addresses(parts["hosts"], kind)
    if kind == "server":
        _database(parts["path"] or "")
        return Target(kind, url, addresses, "", {})
    service, db = _service(parts["path"] or "") if kind == "sentinel" else ("", _no_database(parts["path"] or ""))
    options, user = _options(parts["query"] or "")
    plain = "rediss" if scheme.startswith("rediss") else "redis"
    host = addresses[0].host
    place = f"[{host}]:{addresses[0].port}" if ":" in host else str(addresses[0])
    credentials = f"{parts['user']}@" if parts["user"] else ""
    return Target(kind, f"{plain}://{credentials}{place}/{db}{options}", addresses, service, user)


def redact(url: str) -> str:
    """The URL with its passwords hidden, for logs and messages."""
    return _PASSWORDS.sub(lambda match: (match["user"] or match["key"]) + "***", url)


def _addresses(hosts: str, kind: Kind) -> list[Address]:
    if kind == "server" and not hosts:
        return []
    if kind == "server" and "," in hosts:
        raise ValueError("one host expected; several are for sentinel:// and redis+cluster://")
    return [_address(text, PORTS[kind]) for text in hosts.split(",")]


def _address(text: str, default_port: int) -> Address:
    match = _HOST.fullmatch(text)
    if match is None:
        raise ValueError(f"host or host:port expected{IN_PASSWORDS}")
    port = int(match["port"] or default_port)
    if not 1 <= port <= MAX_PORT:
        raise ValueError(f"port: 1 to {MAX_PORT} expected, not {port}")
    return Address(unquote(match["host"].strip("[]")), port)


def _database(path: str) -> None:
    if not re.fullmatch(r"(?:/[0-9]*)?", path):
        raise ValueError("/ and the number of a database expected behind the host")


def _service(path: str) -> tuple[str, int]:
    match = _SERVICE.fullmatch(path)
    if match is None:
        raise ValueError("sentinel://host:port,…/service or …/service/db expected")
    return unquote(match["service"]), int(match["db"] or 0)


def _no_database(path: str) -> int:
    if path not in ("", "/", "/0"):
        raise ValueError("a cluster has database 0 only")
    return 0


def _options(query: str) -> tuple[str, dict[str, str]]:
    """The options of the Redis servers as a query again, and those of the sentinels."""
    pairs = parse_qsl(query, keep_blank_values=True)
    user = {name.removeprefix("sentinel_"): value for name, value in pairs if name.startswith("sentinel_")}
    if unknown := set(user) - {"username", "password"}:
        raise ValueError(f"unknown option 'sentinel_{min(unknown)}'")
    rest = [(name, value) for name, value in pairs if not name.startswith("sentinel_")]
    return f"?{urlencode(rest)}" if rest else "", user
