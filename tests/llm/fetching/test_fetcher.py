"""URLs of clients, also of those who want to reach what is not theirs."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.certificates import Authority

from dynbus.llm.fetching.addresses import is_public
from dynbus.llm.fetching.fetcher import PublicFetcher
from dynbus.llm.fetching.settings import FetchRules
from dynbus.llm.openai.errors import BadRequest

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\n"
PUBLIC = "93.184.215.14"


def to(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


def whole(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{one}\r\n" for one in headers)
    return OK + f"Content-Length: {len(body)}\r\n{lines}\r\n".encode() + body


class Web:
    """A server on loopback that answers by path, and names that lead there.

    Attributes:
        answers: what is sent for a path, piece by piece; a number is seconds of silence.
        names: the addresses of hosts; of any other one the loopback.
        requests: what was sent to it.
        resolved: the names that were asked for.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Sequence[bytes | float]] = {}
        self.names: dict[str, Sequence[str]] = {}
        self.requests: list[str] = []
        self.resolved: list[str] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(asked)
            for piece in self.answers[asked.split(" ")[1]]:
                if isinstance(piece, bytes):
                    writer.write(piece)
                    await writer.drain()
                else:
                    await asyncio.sleep(piece)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append(host)
        return self.names.get(host, ["127.0.0.1"])

    def fetching(self, rules: FetchRules, context: ssl.SSLContext | None = None) -> PublicFetcher:
        """A fetcher that takes this loopback for public, and nothing else that is not."""
        return PublicFetcher(
            rules,
            resolve=self.resolve,
            may_connect=lambda address: address == "127.0.0.1" or is_public(address),
            context=context,
        )

    def fetcher(self, **rules: Any) -> PublicFetcher:
        chosen: dict[str, Any] = {"hosts": [f"pictures.example:{self.port}"], **rules}
        return self.fetching(FetchRules(**chosen))

    def url(self, path: str, host: str = "pictures.example") -> str:
        return f"http://{host}:{self.port}{path}"

    async def fetch(self, path: str, most: int = 1000, **rules: Any) -> bytes:
        return await self.fetcher(**rules).fetch(self.url(path), "messages[0]", most)

    async def refusal(self, path: str, most: int = 1000, **rules: Any) -> str:
        with pytest.raises(BadRequest) as raised:
            await self.fetch(path, most, **rules)
        assert (raised.value.param, raised.value.status) == ("messages[0]", 400)
        return raised.value.message


class Tls(NamedTuple):
    """The contexts of a server that is pictures.example, and of who trusts it."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    authority = Authority(tmp_path)
    pair = authority.sign("pictures", "pictures.example")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pair)
    return Tls(context, ssl.create_default_context(cafile=authority.ca))


@asynccontextmanager
async def web(
    answers: Mapping[str, Sequence[bytes | float]], context: ssl.SSLContext | None = None
) -> AsyncGenerator[Web]:
    it = Web()
    it.answers = dict(answers)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0, ssl=context)
    it.port = server.sockets[0].getsockname()[1]
    try:
        yield it
    finally:
        server.close()


async def test_an_image_is_fetched_by_the_name_of_its_host_from_the_address_that_was_checked() -> (
    None
):
    async with web({"/a?b=%20c": [whole(b"picture")]}) as it:
        assert await it.fetch("/a?b=%20c#there") == b"picture"

    [asked] = it.requests
    assert asked.startswith("GET /a?b=%20c HTTP/1.1\r\n")
    assert f"Host: pictures.example:{it.port}\r\n" in asked
    assert "Accept-Encoding: identity\r\n" in asked
    # A name that leads elsewhere with its next answer is not asked a second time.
    assert it.resolved == ["pictures.example"]


async def test_a_certificate_is_that_of_the_name(tls: Tls) -> None:
    async with web({"/a": [whole(b"picture")]}, tls.server) as it:
        rules = FetchRules([f"{host}.example:{it.port}" for host in ("pictures", "other")])
        fetcher = it.fetching(rules, tls.client)
        url = it.url("/a").replace("http:", "https:")

        assert await fetcher.fetch(url, "", 100) == b"picture"
        with pytest.raises(BadRequest, match="the host does not answer"):
            await fetcher.fetch(url.replace("pictures.", "other."), "", 100)


async def test_https_does_not_become_http(tls: Tls) -> None:
    async with web({"/a": [to("http://pictures.example/")]}, tls.server) as it:
        fetcher = it.fetching(FetchRules([f"pictures.example:{it.port}"]), tls.client)
        with pytest.raises(BadRequest, match="from https to http"):
            await fetcher.fetch(it.url("/a").replace("http:", "https:"), "", 100)


async def test_redirects_are_followed_within_their_number_and_each_is_checked() -> None:
    async with web(
        {
            "/one": [to("/two", 301)],
            "/two": [to("three", 308)],
            "/three": [to("//pictures.example:PORT/four", 307)],
            "/four": [whole(b"picture")],
        }
    ) as it:
        it.answers["/three"] = [to(f"//pictures.example:{it.port}/four", 303)]
        assert await it.fetch("/one") == b"picture"
        assert "redirects more than 2 times" in await it.refusal("/one", redirects=2)
        assert "redirects more than 0 times" in await it.refusal("/one", redirects=0)
    assert it.resolved[:4] == ["pictures.example"] * 4


@pytest.mark.parametrize("location", ["//[x/", "http://[1"])
async def test_a_redirect_to_what_is_no_url_is_refused(location: str) -> None:
    async with web({"/a": [to(location)]}) as it:
        assert "redirects to what is no URL" in await it.refusal("/a")


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://0/",
        "http://localhost/",
        "http://localhost./",
        "https://inside.example/",
        "http://mixed.example/",
        "http://nowhere.example/",
    ],
)
async def test_a_redirect_into_our_network_is_refused(location: str) -> None:
    inside: dict[str, Sequence[str]] = {
        "inside.example": ["10.0.0.7"],
        "mixed.example": [PUBLIC, "10.0.0.7"],
        "nowhere.example": [],
    }

    async def resolve(host: str, port: int) -> Sequence[str]:
        if host == "pictures.example":
            return ["127.0.0.1"]
        if host in inside:
            return inside[host]
        # As the system reads what is a number.
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]

    async with web({"/a": [to(location)]}) as it:
        fetcher = PublicFetcher(
            FetchRules(["*", f"pictures.example:{it.port}"]),
            resolve=resolve,
            may_connect=_first_public(),
        )
        with pytest.raises(BadRequest, match="has no public address"):
            await fetcher.fetch(it.url("/a"), "messages[0]", 100)
    assert len(it.requests) == 1


def _first_public() -> Any:
    """A check that takes the first address for public, and looks at all others."""
    seen: list[str] = []

    def may_connect(address: str) -> bool:
        seen.append(address)
        return len(seen) == 1 or is_public(address)

    return may_connect


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://[::ffff:7f00:1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://017700000001/",
        "http://0.0.0.0/",
        "http://localhost/",
        "http://169.254.169.254/",
        "http://[fe80::1]/",
    ],
)
async def test_no_way_of_writing_a_private_address_leads_there(url: str) -> None:
    with pytest.raises(BadRequest, match="has no public address"):
        await PublicFetcher(FetchRules(["*"])).fetch(url, "messages[0]", 100)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://pictures.example/a",
        "file:///etc/passwd",
        "gopher://pictures.example/",
        "//pictures.example/a",
        "pictures.example/a",
        "http:///a",
        "http://",
        "http://pictures.example:99999/",
        "http://pictures.example:x/",
        "http://[::1/",
        "http://pictures.example/a b",
        "http://pictures.example/a\r\nX-Evil: 1",
        "http://pictures.example/a\tb",
        "http://pictures.example\\@inside.example/",
        "http://fe80%25eth0/",
        "http://[fe80::1%25eth0]/",
        "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/",
        "http://pictures.example/" + "a" * 9000,
    ],
)
async def test_what_is_no_url_of_the_web_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="its URL is none that is fetched"):
        await PublicFetcher(FetchRules(["*"])).fetch(url, "messages[0]", 100)


async def test_names_and_passwords_are_sent_to_nobody() -> None:
    with pytest.raises(BadRequest, match="a name or a password"):
        await PublicFetcher(FetchRules(["*"])).fetch("http://me:secret@a.example/", "", 100)


async def test_a_host_or_port_that_no_rule_names_is_not_asked() -> None:
    async with web({"/a": [to("http://other.example/")]}) as it:
        assert "nothing is fetched from other.example:80 here" in await it.refusal("/a")
        assert "nothing is fetched from pictures.example" in await it.refusal("/a", hosts=["*"])
    assert "other.example" not in it.resolved


@pytest.mark.parametrize(
    "answer",
    [
        [whole(bytes(1001))],
        [OK + b"\r\n", *[bytes(100)] * 20],
        [OK + b"Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n3E9\r\n" + bytes(1001)],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n", *[b"64\r\n" + bytes(100) + b"\r\n"] * 11],
    ],
    ids=["said", "unsaid", "both", "chunks"],
)
async def test_no_more_is_read_than_is_taken(answer: Sequence[bytes]) -> None:
    async with web({"/a": answer}) as it:
        refusal = await it.refusal("/a")
    assert "more than 1000 bytes" in refusal or "does not answer" in refusal


async def test_a_body_without_end_is_left() -> None:
    endless = [OK + b"\r\n", *[bytes(65536)] * 10_000]
    async with web({"/a": endless}) as it:
        assert "more than 1000 bytes" in await it.refusal("/a")


async def test_what_is_slow_is_left_when_its_time_is_over() -> None:
    drops: list[bytes | float] = [OK + b"Content-Length: 500\r\n\r\n"]
    for _ in range(100):
        drops += [b"x", 0.05]
    async with web({"/drops": drops, "/silent": [30.0], "/loop": [0.2, to("/loop")]}) as it:
        for path in ("/drops", "/silent", "/loop"):
            assert "not fetched within 0.3 s" in await it.refusal(path, timeout=0.3, redirects=99)


async def test_a_name_that_nobody_resolves_in_time_is_left() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(30)
        return [PUBLIC]

    fetcher = PublicFetcher(FetchRules(["*"], timeout=0.2), resolve=resolve)
    with pytest.raises(BadRequest, match="not fetched within"):
        await fetcher.fetch("http://a.example/", "", 100)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "deflate", "gzip, identity"])
async def test_what_is_compressed_is_not_unpacked(encoding: str) -> None:
    bomb = gzip.compress(bytes(1_000_000))
    async with web({"/a": [whole(bomb, f"Content-Encoding: {encoding}")]}) as it:
        assert "an encoding that was not asked for" in await it.refusal("/a", most=1_000_000)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\na",
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_image_is_refused_with_its_status(answer: bytes) -> None:
    async with web({"/a": [answer]}) as it:
        assert f"the status {answer[9:12].decode()}" in await it.refusal("/a")


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-OpenSSH_9.6\r\n", OK + b"X: " + b"a" * 100_000, OK + b"Content-Length: 9"],
)
async def test_a_host_that_speaks_something_else_is_told_apart_by_nobody(answer: bytes) -> None:
    async with web({"/a": [answer]}) as it:
        assert "its URL cannot be fetched: the host does not answer" in await it.refusal("/a")


async def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    async with web({"/a": [whole(b"picture")]}) as it:
        it.names["pictures.example"] = ["127.0.0.2", "127.0.0.1"]
        fetcher = PublicFetcher(
            FetchRules([f"pictures.example:{it.port}"]),
            resolve=it.resolve,
            may_connect=lambda address: True,
        )
        assert await fetcher.fetch(it.url("/a"), "", 100) == b"picture"
