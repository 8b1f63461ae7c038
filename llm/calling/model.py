"""`Model`: a model by its name, on which actors depend and of which programs make a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from dynbus import ConfigError, Runtime
from dynbus.llm.models.card import check_name
from dynbus.llm.pipeline import RoutingChoice
from dynbus.spi import Grant

from .client import ModelClient, ModelOptions


@dataclass(frozen=True)
class Model:
    """A model by its name: `model = depends(Model("qwen"))` in an actor, or
    `Model("qwen").client(runtime)` elsewhere.

    Args:
        name: by which workers have registered it.
        wait: seconds for which a model is waited for that is not served; it is refused at once
            unless given.
        timeout: seconds for a whole answer; no more than the running call has, or `call_options`
            gives.
        priority: of requests that say none; that of the running call unless given.
        routing: how requests find an instance.

    Raises:
        ConfigError: an argument is not usable.
    """

    name: str
    wait: float = 0.0
    timeout: float | None = None
    priority: int | None = None
    routing: RoutingChoice = "auto"

    def __post_init__(self) -> None:
        check_name(self.name)
        for option, value, least in (("wait", self.wait, 0.0), ("timeout", self.timeout, 0.001)):
            given: Any = value  # not everyone runs a type checker
            if given is not None and not (isinstance(given, int | float) and given >= least):
                raise ConfigError(f"Model({self.name!r}, {option}={given!r}): give seconds")
        if self.routing not in get_args(RoutingChoice):
            choices = ", ".join(get_args(RoutingChoice))
            raise ConfigError(f"Model({self.name!r}, routing={self.routing!r}): give {choices}")

    def __str__(self) -> str:
        return f"model {self.name}"

    @staticmethod
    def __dynbus_grants__(
        namespaces: Sequence[str],
    ) -> list[Grant]:
        # Only `dynbus auth` needs it.
        from dynbus.llm.permissions import asking_models

        return asking_models(namespaces)

    def client(self, runtime: Runtime, /) -> ModelClient:
        """A client, made at once; the model's tokenizer and routers are had ready meanwhile.

        The clients of one runtime share them.
        """
        options = ModelOptions(self.wait, self.timeout, self.priority)
        return ModelClient(runtime, self.name, self.routing, options)
