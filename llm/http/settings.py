"""`HttpSettings`: where a front end listens, whom it answers, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from dynbus import ConfigError, Option, Options
from dynbus.kvrouter import RouterConfig
from dynbus.llm.fetching.settings import FetchRules
from dynbus.llm.media.limits import DEFAULT_LIMITS, MediaLimits
from dynbus.llm.pipeline import RoutingChoice
from dynbus.spi import is_loopback

MAX_MEDIA_BYTES: Final = 20 * 1024 * 1024
"""Of a request: as base64 they fit into one of the bus, `max_request_bytes`."""


def _name_of(host: str) -> str:
    """A host without its port, and without the brackets of an IPv6 address."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


@dataclass(frozen=True, kw_only=True)
class HttpSettings(Options):
    """The settings of a front end.

    Raises:
        ConfigError: a value is not usable, or the host is public without keys.
    """

    host: Annotated[str, Option("the address to listen at")] = "127.0.0.1"
    port: Annotated[
        int, Option("where it listens there; 0 takes a free one", least=0, most=65535)
    ] = 8000
    api_keys: Annotated[
        Path | None,
        Option(
            "a file with a tenant and a key, or its `sha256:`, in each line, and limits; without "
            "keys of any source all are let in"
        ),
    ] = None
    keys_from_bus: Annotated[
        bool, Option("take the keys and limits that `dynbus keys` has put on the bus")
    ] = False
    oidc_issuer: Annotated[
        str | None,
        Option("the address of an OpenID provider whose tokens are taken in place of keys"),
    ] = None
    oidc_audience: Annotated[str, Option("whom its tokens must be for")] = ""
    oidc_tenant_claim: Annotated[str, Option("the claim of a token that names its tenant")] = (
        "tenant"
    )
    insecure_public: Annotated[
        bool, Option("allow a host that other machines can reach without keys")
    ] = False
    tls_cert: Annotated[Path | None, Option("a certificate with its chain, PEM")] = None
    tls_key: Annotated[Path | None, Option("its key, PEM")] = None
    tls_client_ca: Annotated[
        Path | None,
        Option("authorities, PEM, one of which must have signed the certificate of each client"),
    ] = None
    cors_origins: Annotated[
        Sequence[str],
        Option(
            "whose pages may ask, such as `https://example.com`; `*` for all", flag="cors-origin"
        ),
    ] = ()
    allowed_hosts: Annotated[
        Sequence[str],
        Option(
            "names that it is asked by at loopback without keys, such as a proxy's",
            flag="allow-host",
        ),
    ] = ()
    max_body_bytes: Annotated[
        int,
        Option(
            "bytes of a request; one with images may need more",
            least=1,
            unit="bytes",
            flag="max-body",
        ),
    ] = 4 * 1024 * 1024
    media_bytes: Annotated[
        int,
        Option(
            "bytes of one image or sound of a request, decoded",
            least=1,
            unit="bytes",
            guide="images.md#limits",
        ),
    ] = DEFAULT_LIMITS.part_bytes
    media_total_bytes: Annotated[
        int,
        Option(
            "bytes of all images and sounds of a request; those that are fetched count as well",
            least=1,
            most=MAX_MEDIA_BYTES,
            unit="bytes",
            guide="images.md#limits",
        ),
    ] = DEFAULT_LIMITS.bytes
    media_parts: Annotated[
        int,
        Option("images and sounds of a request", least=0, guide="images.md#limits"),
    ] = DEFAULT_LIMITS.parts
    media_pixels: Annotated[
        int,
        Option(
            "pixels of an image, width times height as it says of itself",
            least=1,
            guide="images.md#limits",
        ),
    ] = DEFAULT_LIMITS.pixels
    media_hosts: Annotated[
        Sequence[str],
        Option(
            "hosts from which images are fetched that requests name by URL: `HOST`, `HOST:PORT`, "
            "`*.DOMAIN`, or `*` for all that are public; none unless given",
            flag="media-host",
            guide="images.md#urls",
        ),
    ] = ()
    media_timeout: Annotated[
        float,
        Option(
            "seconds for fetching the images of a request, with their redirects",
            above=0,
            unit="seconds",
            guide="images.md#urls",
        ),
    ] = 10.0
    media_redirects: Annotated[
        int,
        Option("redirects that are followed for an image", least=0, guide="images.md#urls"),
    ] = 3
    max_header_bytes: Annotated[
        int,
        Option(
            "bytes of a request's headers, with its first line",
            least=1,
            unit="bytes",
            flag="max-header",
        ),
    ] = 32 * 1024
    max_requests: Annotated[
        int, Option("requests that run at a time; further ones are answered 429", least=1)
    ] = 8192
    forget_responses: Annotated[
        bool,
        Option(
            "keep nothing of /v1/responses, as if each request had store=false: none goes on from "
            "another",
            guide="front-end-interfaces.md",
        ),
    ] = False
    session_seconds: Annotated[
        float,
        Option(
            "seconds for which engines keep the blocks of a conversation that goes on "
            "(`Dynbus-Session`, `previous_response_id`), unless its request says fewer; 0 for none",
            least=0,
            unit="seconds",
            guide="sessions.md",
        ),
    ] = 600.0
    batches: Annotated[
        bool,
        Option("take files and batches of requests, and do their lines here", guide="batches.md"),
    ] = False
    batch_concurrency: Annotated[
        int,
        Option(
            "lines of batches that are asked here at a time; 0 leaves them to each `BatchWorker`",
            least=0,
            most=64,
            guide="batches.md",
        ),
    ] = 32
    max_file_bytes: Annotated[
        int,
        Option("bytes of a file of requests", least=1, unit="bytes", flag="max-file"),
    ] = 200 * 1024 * 1024
    hold: Annotated[
        float,
        Option(
            "seconds that a request waits for an engine of a model that has none; 0 refuses it",
            least=0,
            unit="seconds",
        ),
    ] = 0.0
    max_held: Annotated[
        int,
        Option("requests that wait so for one model; further ones are answered 429", least=1),
    ] = 256
    max_strangers: Annotated[
        int,
        Option(
            "connections of one address (of IPv6: of a /64) that have shown no key, or, without "
            "keys, asked for nothing yet; the oldest one makes room for the next. Never more than "
            "a quarter of the descriptors",
            least=1,
        ),
    ] = 4096
    request_timeout: Annotated[
        float,
        Option(
            "seconds for a request, and from its engine's first token to its last too",
            above=0,
            unit="seconds",
        ),
    ] = 3600.0
    body_timeout: Annotated[
        float,
        Option("seconds until a request's body must have arrived", above=0, unit="seconds"),
    ] = 30.0
    header_timeout: Annotated[
        float,
        Option("seconds until a request's headers must have arrived", above=0, unit="seconds"),
    ] = 10.0
    write_timeout: Annotated[
        float,
        Option(
            "seconds that an answer waits for a client that does not read", above=0, unit="seconds"
        ),
    ] = 30.0
    grace: Annotated[
        float,
        Option(
            "seconds that requests have to finish when the front end stops",
            above=0,
            unit="seconds",
        ),
    ] = 30.0
    log_content: Annotated[
        bool,
        Option(
            "tell in the log and in traces what requests and answers say, up to 4096 characters "
            "of each"
        ),
    ] = False
    stream_keep_alive: Annotated[
        float,
        Option(
            "seconds for which a stream is silent at most, before its first token too: then its "
            "client is told that it lives, by a comment, or in Anthropic's interface by a ping",
            above=0,
            unit="seconds",
        ),
    ] = 5.0

    def check(self) -> None:
        super().check()
        # Otherwise the first image would tell.
        self.fetch_rules()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both a certificate and a key: give tls_cert and tls_key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca needs TLS: give tls_cert and tls_key as well")
        if self.oidc_issuer is not None and not self.oidc_audience:
            raise ConfigError(
                "tokens of an issuer are for many services: say with --oidc-audience which are ours"
            )
        is_guarded = self.has_keys or self.tls_client_ca is not None
        if not is_guarded and not self.insecure_public and not is_loopback(self.host):
            raise ConfigError(
                f"the front end would be open to other machines at {self.host!r} and asks for no "
                "keys: give a file with --api-keys, take those of --keys-from-bus, want "
                "certificates with --tls-client-ca, listen at 127.0.0.1, or allow it with "
                "--insecure-public"
            )

    @property
    def media_limits(self) -> MediaLimits:
        """The limits of the images and sounds of a request."""
        return MediaLimits(
            self.media_bytes, self.media_parts, self.media_total_bytes, self.media_pixels
        )

    def fetch_rules(self) -> FetchRules | None:
        """The rules of fetching what requests name by URL; None where nothing is fetched.

        Raises:
            ConfigError: a host is none.
        """
        if not self.media_hosts:
            return None
        return FetchRules(self.media_hosts, self.media_timeout, self.media_redirects)

    @property
    def has_keys(self) -> bool:
        """True if a request must show a key or a token."""
        return self.api_keys is not None or self.keys_from_bus or self.oidc_issuer is not None

    def takes_host(self, host: str) -> bool:
        """True if a request may name a host, with or without a port.

        Where nothing but the address says who may ask, a page of a browser could have its own
        name lead there.
        """
        if self.has_keys or not is_loopback(self.host):
            return True
        name = _name_of(host)
        known = (one.lower() for one in self.allowed_hosts)
        return is_loopback(name) or name.endswith(".localhost") or name in known


@dataclass(frozen=True, kw_only=True)
class FrontendOptions(HttpSettings):
    """The settings of a front end, with how its requests find their engines."""

    routing: Annotated[
        RoutingChoice,
        Option("how a request finds a worker; `auto` is `kv` where workers tell their block size"),
    ] = "auto"
    policy: Annotated[
        str,
        Option(
            "the cost function of kv routing: `kv`, `dynamo`, or `module:function`, with arguments "
            "in parentheses where it has some; at a command `costs.py:cost` too"
        ),
    ] = str(RouterConfig.policy)

    @property
    def router(self) -> RouterConfig:
        """The configuration of the routers among the engines of a model."""
        return RouterConfig(policy=self.policy)

    def load(self) -> None:
        """See `RouterConfig.load`."""
        super().load()
        self.router.load()
