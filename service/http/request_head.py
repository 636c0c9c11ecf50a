"""What RFC 9110 and 9112 require of the head of a request, beyond the grammar of the parser."""

import re
from ipaddress import AddressValueError, IPv6Address

Headers = list[tuple[bytes, bytes]]

# RFC 3986, 3.2: host [ ":" port ]; the first group is an IPv6 address.
_AUTHORITY = re.compile(
    rb"(?:\[([\da-f:.]+)\]|\[v[\da-f]+\.[\w.~!$&'()*+,;=:-]+\]|(?:[\w.~!$&'()*+,;=-]|%[\da-f]{2})*)"
    rb"(?::\d*)?",
    re.IGNORECASE,
)
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)
_ORIGIN = re.compile(rb"\r\nOrigin:[ \t]*([^\r\n]*)", re.IGNORECASE)
# Headers with one value. A proxy and the service could each read another one of several.
_SINGLE = frozenset({b"authorization", b"content-type", b"expect", b"x-request-timeout-ms"})


def resolve(method: str, target: bytes, version: str, headers: Headers) -> tuple[bytes, Headers]:
    """Checks target, version (as in `1.1`) and headers of a request; their names are in lower case.

    Returns the target in origin form, with a slash before the query, and the headers. The authority
    of a target in absolute form takes the place of `Host`. The target of `OPTIONS *` stays. The
    message of a ValueError is for the client.
    """
    if version not in ("1.0", "1.1"):
        raise ValueError("the version of HTTP is neither 1.1 nor 1.0")
    fields = dict(headers)
    if len(fields) < len(headers):
        for name, value in headers:
            if name in _SINGLE and value != fields[name]:
                raise ValueError(f"the header {name.decode().title()} has two different values")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 and (hosts or version == "1.1"):
        raise ValueError(f"the request has {len(hosts)} headers Host instead of one")
    if hosts and not _is_authority(hosts[0]):
        raise ValueError("the header Host is not a host with an optional port")
    if target.startswith(b"/") or (method == "OPTIONS" and target == b"*"):
        return target, headers
    absolute = _ABSOLUTE.fullmatch(target)
    if not absolute or not _is_authority(absolute[1]) or absolute[1].startswith(b":"):
        raise ValueError("the target of the request is neither a path nor a URL of HTTP")
    path = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
    others = (header for header in headers if header[0] != b"host")
    return path, [(b"host", absolute[1]), *others]


def origin_of(head: bytes) -> Headers:
    """Returns the header Origin of a head that may be malformed or incomplete, if it is there."""
    found = _ORIGIN.search(head)
    return [(b"origin", found[1].rstrip(b" \t"))] if found else []


def _is_authority(text: bytes) -> bool:
    found = _AUTHORITY.fullmatch(text)
    if found and (address := found[1]):
        try:
            IPv6Address(address.decode("ascii"))
        except AddressValueError:
            return False
    return found is not None
