"""`--namespace` and `--component`, which say whose caches or routers are meant."""

from __future__ import annotations

from typing import NamedTuple

import click


class ComponentFilter(NamedTuple):
    """The namespace and component of the options; None for one that has to be found."""

    namespace: str | None
    component: str | None


def parse_component(namespace: str | None, component: str | None) -> ComponentFilter:
    """The filter that the options give, where the component may be written with its namespace.

    Raises:
        click.UsageError: they name two namespaces.
    """
    if component is None or "." not in component:
        return ComponentFilter(namespace, component)
    of, _, name = component.partition(".")
    if namespace not in (None, of):
        raise click.UsageError(
            f"--namespace is {namespace}, and --component names one of {of}: give one of them"
        )
    return ComponentFilter(of, name)
