"""An external scaler of KEDA: a gRPC service that tells how many instances pools are to have.

https://keda.sh/docs/latest/concepts/external-scalers/ has its protocol, `externalscaler.proto`.
"""

from __future__ import annotations

import importlib
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, Protocol
from urllib.parse import urlsplit

import anyio

from dynbus import ConfigError, Option, Options
from dynbus.spi import how_to_install, is_loopback

SERVICE: Final = "externalscaler.ExternalScaler"
METRIC: Final = "dynbus-desired"
"""The name of the one metric of a pool, of which each instance is to have one."""
POOL: Final = "pool"
"""The metadata of a trigger that names its pool."""
STOP_SECONDS: Final = 5.0

_MESSAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "ScaledObjectRef": ("name: string", "namespace: string", "scalerMetadata: map"),
    "IsActiveResponse": ("result: bool",),
    "MetricSpec": ("metricName: string", "targetSize: int64", "targetSizeFloat: double"),
    "GetMetricSpecResponse": ("metricSpecs: MetricSpec*",),
    "GetMetricsRequest": ("scaledObjectRef: ScaledObjectRef", "metricName: string"),
    "MetricValue": ("metricName: string", "metricValue: int64", "metricValueFloat: double"),
    "GetMetricsResponse": ("metricValues: MetricValue*",),
}
"""The fields of each message, by their numbers from 1; `*` for those that are repeated."""


@dataclass(frozen=True, kw_only=True)
class KedaOptions(Options):
    """The address at which KEDA asks, and who may."""

    keda: Annotated[
        str, Option("`HOST:PORT` where it is an external scaler of KEDA; empty for none")
    ] = ""
    keda_tls_cert: Annotated[Path | None, Option("its certificate with the chain, PEM")] = None
    keda_tls_key: Annotated[Path | None, Option("the key of that, PEM")] = None
    keda_tls_client_ca: Annotated[
        Path | None,
        Option("authorities, PEM, one of which must have signed the certificate of KEDA"),
    ] = None
    keda_public: Annotated[
        bool, Option("let it listen beyond this machine without certificates of clients")
    ] = False

    def check(self) -> None:
        """Refuse what nobody can or should listen at."""
        if not self.keda:
            if any((self.keda_tls_cert, self.keda_tls_key, self.keda_tls_client_ca)):
                raise ConfigError("keda_tls_* are for keda, which is not given")
            return
        host, port = _address(self.keda)
        if (self.keda_tls_cert is None) != (self.keda_tls_key is None):
            raise ConfigError("TLS needs both a certificate and a key: give keda_tls_cert and _key")
        if self.keda_tls_client_ca is not None and self.keda_tls_cert is None:
            raise ConfigError("keda_tls_client_ca needs TLS: give keda_tls_cert and _key as well")
        if not (self.keda_public or self.keda_tls_client_ca or is_loopback(host)):
            raise ConfigError(
                f"keda = {self.keda} would be open to other machines, and has no credentials: "
                f"listen at 127.0.0.1:{port}, want certificates with keda_tls_client_ca, or allow "
                "it with keda_public"
            )


def _address(text: str) -> tuple[str, int]:
    refused = ConfigError(f"keda = {text!r} is no address: write HOST:PORT")
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise refused from None
    if host is None or not port or parts.netloc != text:
        raise refused
    return host, port


class _Context(Protocol):
    """A question, as gRPC shows it to who answers."""

    async def abort(self, code: object, details: str) -> NoReturn: ...


class ExternalScaler:
    """Tells KEDA the targets of pools, while it serves.

    Args:
        options: with an address.

    Raises:
        ConfigError: the files cannot be used, or what it takes is not installed.
    """

    def __init__(self, options: KedaOptions) -> None:
        try:
            # Neither carries types.
            self._grpc: Any = importlib.import_module("grpc")
            self._aio: Any = importlib.import_module("grpc.aio")
            self._types = _message_types()
        except ImportError as error:
            raise ConfigError(
                f"KEDA is answered over gRPC: {how_to_install('keda')} ({error})"
            ) from error
        self._address = options.keda
        self._credentials = self._read(options)
        self._targets: Mapping[str, int | None] = {}
        self._is_open = False
        self._changed = anyio.Event()

    def _read(self, options: KedaOptions) -> object:
        """The credentials of the server; None for none."""
        cert, key, authorities = (
            options.keda_tls_cert,
            options.keda_tls_key,
            options.keda_tls_client_ca,
        )
        if cert is None or key is None:
            return None
        try:
            # gRPC says of files that it cannot use only that it cannot listen.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
            if authorities is not None:
                context.load_verify_locations(authorities)
            return self._grpc.ssl_server_credentials(
                [(key.read_bytes(), cert.read_bytes())],
                None if authorities is None else authorities.read_bytes(),
                require_client_auth=authorities is not None,
            )
        except OSError as error:
            raise ConfigError(
                f"the certificate {cert}, the key {key} and the authorities of KEDA "
                f"{authorities or 'none'} cannot be used: {error}"
            ) from None

    def decided(self, targets: Mapping[str, int | None]) -> None:
        """Tell these from now on: the instances of each pool; of None that it is not known yet, on
        which KEDA changes nothing."""
        if targets != self._targets:
            self._targets = dict(targets)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Listen and answer while in the `async with`.

        Raises:
            ConfigError: nobody can listen at its address.
        """
        grpc, types = self._grpc, self._types

        def method(handler: Any, what: Any, request: str, response: str) -> Any:
            return what(handler, types[request].FromString, types[response].SerializeToString)

        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            "IsActive": method(self._is_active, unary, "ScaledObjectRef", "IsActiveResponse"),
            "StreamIsActive": method(self._stream, stream, "ScaledObjectRef", "IsActiveResponse"),
            "GetMetricSpec": method(self._spec, unary, "ScaledObjectRef", "GetMetricSpecResponse"),
            "GetMetrics": method(self._metrics, unary, "GetMetricsRequest", "GetMetricsResponse"),
        }
        # Else two processes could listen at one address, and each would get some of the questions.
        server = self._aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            if self._credentials is None:
                server.add_insecure_port(self._address)
            else:
                server.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"keda = {self._address} cannot be listened at: {error}") from None
        await server.start()
        self._is_open = True
        try:
            yield
        finally:
            # Streams that end of themselves are begun again at once; KEDA waits after those that
            # break off, up to a minute.
            self._is_open = False
            self._wake()
            with anyio.CancelScope(shield=True):
                await server.stop(STOP_SECONDS)
            self._targets = {}

    # The methods of the service -------------------------------------------------------------

    async def _target(self, reference: Any, context: _Context) -> int | None:
        """The number of instances that the pool of a trigger is to have; None while that is not
        known."""
        targets, name = self._targets, reference.scalerMetadata.get(POOL, "")
        if targets and name not in targets:
            await context.abort(
                self._grpc.StatusCode.NOT_FOUND,
                f"the metadata of the trigger has {POOL}: {name!r}; the pools are "
                f"{', '.join(targets)}",
            )
        return targets.get(name)

    async def _desired(self, reference: Any, context: _Context) -> int:
        target = await self._target(reference, context)
        if target is None:
            unknown = "the autoscaler has not decided yet"
            await context.abort(self._grpc.StatusCode.UNAVAILABLE, unknown)
        return target

    async def _is_active(self, request: Any, context: _Context) -> Any:
        is_active = await self._desired(request, context) > 0
        return self._types["IsActiveResponse"](result=is_active)

    async def _stream(self, request: Any, context: _Context) -> AsyncGenerator[Any]:
        last: bool | None = None
        while self._is_open:
            changed = self._changed
            target = await self._target(request, context)
            if target is not None and (target > 0) is not last:
                last = target > 0
                yield self._types["IsActiveResponse"](result=last)
            await changed.wait()

    async def _spec(self, request: Any, context: _Context) -> Any:
        spec = self._types["MetricSpec"](metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return self._types["GetMetricSpecResponse"](metricSpecs=[spec])

    async def _metrics(self, request: Any, context: _Context) -> Any:
        desired = await self._desired(request.scaledObjectRef, context)
        value = self._types["MetricValue"](
            metricName=METRIC, metricValue=desired, metricValueFloat=desired
        )
        return self._types["GetMetricsResponse"](metricValues=[value])


def _message_types() -> Mapping[str, Any]:
    """The classes of the messages by their names; raises `ImportError`.

    Code that `protoc` generates is bound to versions of its library; descriptors are not.
    """
    descriptors: Any = importlib.import_module("google.protobuf.descriptor_pb2")
    factory: Any = importlib.import_module("google.protobuf.message_factory")
    package = SERVICE.partition(".")[0]
    file = descriptors.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    field = descriptors.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields, 1):
            label, _, kind = text.partition(": ")
            is_many = kind.endswith("*") or kind == "map"
            made = message.field.add(
                name=label,
                number=number,
                label=field.LABEL_REPEATED if is_many else field.LABEL_OPTIONAL,
            )
            if kind == "map":
                entry = message.nested_type.add(name=f"{label[:1].upper()}{label[1:]}Entry")
                entry.options.map_entry = True
                for at, part in enumerate(("key", "value"), 1):
                    entry.field.add(
                        name=part, number=at, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING
                    )
                made.type, made.type_name = field.TYPE_MESSAGE, f".{package}.{name}.{entry.name}"
            elif kind.removesuffix("*") in _MESSAGES:
                made.type = field.TYPE_MESSAGE
                made.type_name = f".{package}.{kind.removesuffix('*')}"
            else:
                made.type = getattr(field, f"TYPE_{kind.upper()}")
    classes: dict[str, Any] = factory.GetMessages([file])
    return {name.rpartition(".")[2]: each for name, each in classes.items()}
