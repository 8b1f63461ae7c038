"""`ServiceConfig`: what services were configured with, by their names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from dynbus.spi import ActorConfigs


class ServiceConfig(Mapping[str, dict[str, Any]]):
    """The values that each service was given, constructor arguments and others, by its name.

    In a process of `dynbus run` it has what the run gives the service there, from wherever that
    came; of other services, and outside of a run, what `DYNBUS_CONFIG` or `DYNAMO_SERVICE_CONFIG`
    has.
    """

    def __init__(self, services: ActorConfigs) -> None:
        self._services = services

    @classmethod
    def get_instance(cls) -> ServiceConfig:
        """The configuration as it is now.

        Raises:
            ConfigError: the variable cannot be read.
        """
        return cls(ActorConfigs.read(os.environ))

    def __getitem__(self, service_name: str) -> dict[str, Any]:
        return dict(self._services[service_name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._services)

    def __len__(self) -> int:
        return len(self._services)

    def __repr__(self) -> str:
        # Without the values, which may be secrets.
        return f"<ServiceConfig of {', '.join(self) or 'no service'}>"

    def require(self, service_name: str, key: str) -> Any:
        """A value that must be there.

        Raises:
            ConfigError: it is not; the message says how to give it.
        """
        return self._services.of(service_name).require(key)

    def as_args(self, service_name: str, prefix: str = "") -> list[str]:
        """The values as the command line of a library; see `ActorConfig.as_args`.

        Args:
            prefix: of the keys that are meant; it is stripped.
        """
        return self._services.of(service_name).as_args(prefix=prefix)
