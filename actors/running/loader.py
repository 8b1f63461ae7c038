"""Targets of `dynbus run`: what `actors.py`, `actors.py:Name` and `package.module:Name` mean.

A file is imported under its stem with its folder first on the path, never as `__main__`, so
that its classes have one identity in every process.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

from dynbus.actors.declaring.actor import check_servable, full_name
from dynbus.actors.runtime import Actor
from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError, DynbusError

from .graph import Node, full_key, nodes_of, path_to, with_dependencies

_SUFFIX: Final = ".py"


class ImportFailed(ConfigError):
    """Raised when importing a target raised; `__cause__` is what it raised."""


class DeclaredNode(NamedTuple):
    """A node that a configuration file names.

    Attributes:
        source: where it says so, for messages.
    """

    name: str
    class_name: str
    source: str


class Target(NamedTuple):
    """One argument of `dynbus run`.

    Attributes:
        folder: what must be first on the path.
        module: what is imported.
        name: the class; empty for all that the module defines.
        file: the file that must be what is imported; None for a module name.
    """

    text: str
    folder: Path
    module: str
    name: str
    file: Path | None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read one target.

        Raises:
            ConfigError: it has none of the forms, or there is no such file.
        """
        place, colon, name = text.partition(":")
        is_file = place.endswith(_SUFFIX) or "/" in place or os.sep in place
        if not place or (colon and not all(map(str.isidentifier, name.split(".")))):
            raise ConfigError(_not_a_target(text))
        if not is_file:
            if not all(map(str.isidentifier, place.split("."))):
                raise ConfigError(_not_a_target(text))
            return cls(text, Path.cwd(), place, name, None)
        file = Path(place).absolute()
        if file.is_dir():
            raise ConfigError(_is_folder(text, file))
        if not file.is_file():
            raise ConfigError(f"{text!r}: there is no file {place} in {Path.cwd()}")
        if file.suffix != _SUFFIX or not file.stem.isidentifier():
            raise ConfigError(
                f"{text!r}: {file.name} cannot be imported: its name must be a Python "
                "identifier with .py, for example actors.py"
            )
        return cls(text, file.parent, file.stem, name, file)

    def load(self) -> list[type[Actor]]:
        """Import the module and return the actors that are meant.

        Raises:
            ConfigError: there is no such module, class or actor.
            ImportFailed: the module raised while it was imported.
        """
        module = self._import()
        if self.name:
            return [self._named(module)]
        actors = defined_actors(module)
        if not actors:
            if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
                raise ConfigError(_is_folder(self.text, Path(next(iter(module.__path__)))))
            raise ConfigError(f"{self.text!r} defines no actor{self._imported(module)}")
        return actors

    def _import(self) -> ModuleType:
        put_first_on_path(str(self.folder))
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{self.module}.".startswith(f"{error.name}."):
                path = self.module.replace(".", "/") + _SUFFIX
                hint = f"; is it a file? then write {path}" if not self.file else ""
                raise ConfigError(
                    f"{self.text!r}: there is no module {error.name!r} in {self.folder} or "
                    f"among the installed ones{hint}"
                ) from None
            raise ImportFailed(
                f"{self.text!r}: {error}{self._clash(error)}{_from_dynamo(error)}"
            ) from error
        except ImportError as error:
            raise ImportFailed(f"{self.text!r}: {_why(error)}{self._clash(error)}") from error
        except SystemExit as error:
            raise ImportFailed(
                f"{self.text!r}: it ends its program when it is imported ({_why(error)}): "
                'put what does so below `if __name__ == "__main__":`'
            ) from error
        except Exception as error:
            raise ImportFailed(f"{self.text!r}: {_why(error)}") from error
        loaded = getattr(module, "__file__", None)
        if self.file is not None and not (loaded and _same_file(self.file, Path(loaded))):
            raise ConfigError(
                f"{self.text!r}: the name {self.module!r} belongs to another module "
                f"({loaded or 'built in'}): rename the file"
            )
        return module

    def _clash(self, error: ImportError) -> str:
        """The part of the message about a file of the user's that has the name of a standard
        module.
        """
        name = (error.name or "").partition(".")[0]
        if name not in sys.stdlib_module_names or not (self.folder / f"{name}{_SUFFIX}").is_file():
            return ""
        return f"; {name!r} is a module of Python's own too: rename your file {name}{_SUFFIX}"

    def _imported(self, module: ModuleType) -> str:
        """The part of the message about actors that a module only imports."""
        imported = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Actor) and value is not Actor
        ]
        if not imported:
            return ": write class Name(Actor, namespace=...) with a @handler"
        # A module that links others is to be run with what it has linked.
        one = max(imported, key=lambda actor: len(actor.__dynbus_links__))
        return (
            f" of its own; {one.__name__} comes from {one.__module__}: run "
            f"{self.text}:{one.__name__}"
        )

    def _named(self, module: ModuleType) -> type[Actor]:
        value: object = module
        for part in self.name.split("."):
            value = getattr(value, part, None)
        if value is None:
            names = ", ".join(actor.__name__ for actor in defined_actors(module)) or "none"
            raise ConfigError(f"{self.text!r}: there is no {self.name!r}; its actors are: {names}")
        if not (isinstance(value, type) and issubclass(value, Actor)):
            raise ConfigError(
                f"{self.text!r}: {self.name} is not an actor: write class {self.name}(Actor, ...)"
            )
        check_servable(value)
        return value


def load_targets(texts: Sequence[str], declared: Sequence[DeclaredNode] = ()) -> list[Node]:
    """The nodes to start for the targets: those meant and all that they depend on.

    Dependencies come before what depends on them; each node comes once.

    Args:
        declared: further nodes of these classes.

    Raises:
        ConfigError: a target, a dependency or a declared node cannot be used, actors depend on
            each other in a circle, or two nodes cannot be told apart.
        ImportFailed: a module raised while it was imported.
    """
    # All of them first: a mistake in the last one is told before the first one runs code.
    targets = [Target.parse(text) for text in texts]
    actors = [actor for target in targets for actor in target.load()]
    known = with_dependencies(actors)
    chosen = nodes_of(actors, [_declared(node, known) for node in declared])
    for node in chosen:
        try:
            check_servable(node.actor)
        except ConfigError as error:
            way = path_to(node, chosen)
            raise (ConfigError(f"{way}: {error}") if way else error) from error.__cause__
    _check_distinct(chosen)
    return chosen


def defined_actors(module: ModuleType) -> list[type[Actor]]:
    """The actors that a module itself defines and that can be started, in their order."""
    actors: dict[type[Actor], None] = {}
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, Actor)
            and value.__module__ == module.__name__
            and not value.__dynbus_abstract__
        ):
            actors[value] = None
    return list(actors)


def reference(actor: type[Actor]) -> str:
    """`module:Name` by which another process finds the class.

    Raises:
        ConfigError: the class is local to a function.
    """
    if "<locals>" in actor.__qualname__:
        raise ConfigError(
            f"{actor.__qualname__} is defined inside a function, where another process does not "
            "find it: move it to the top of its module, or use --in-process"
        )
    return full_name(actor)


def resolve(text: str) -> type[Actor]:
    """The class of a `reference`.

    Raises:
        ConfigError: it names no actor.
    """
    module, _, name = text.partition(":")
    value: object = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    if not (isinstance(value, type) and issubclass(value, Actor)):
        raise ConfigError(f"{text} is not an actor")
    return value


def put_first_on_path(folder: str) -> None:
    """Make `folder` the first that imports look in."""
    while folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()


def _declared(node: DeclaredNode, known: Sequence[type[Actor]]) -> Node:
    """The node that a configuration file names, of one of the classes of the run."""
    named = {actor: (actor.__name__, full_name(actor)) for actor in known}
    matching = [actor for actor, names in named.items() if node.class_name in names]
    if len(matching) == 1:
        return Node(node.name, matching[0])
    if matching:
        ways = " or ".join(map(full_name, matching))
        raise ConfigError(f"{node.source}: {node.class_name} may be {ways}: write one of them")
    names = list(dict.fromkeys(actor.__name__ for actor in known))
    raise ConfigError(
        f"{node.source}: this run has no class {node.class_name}"
        f"{suggestion(node.class_name, names)}; it has {', '.join(names)}"
    )


def _check_distinct(nodes: Sequence[Node]) -> None:
    """Refuse two nodes that no option could tell apart."""
    keys: dict[tuple[str, str], Node] = {}
    for node in nodes:
        other = keys.setdefault((full_key(node), node.actor.__name__), node)
        if other is not node:
            raise ConfigError(
                f"{full_name(other.actor)} and {full_name(node.actor)} have the same name "
                f"{node.name!r}: rename one of them"
            )


def _not_a_target(text: str) -> str:
    return (
        f"{text!r} is not a target: write actors.py, actors.py:Name, actors:Name or "
        "package.module:Name"
    )


def _is_folder(text: str, folder: Path) -> str:
    names = sorted(file.name for file in folder.glob(f"*{_SUFFIX}") if file.stem.isidentifier())
    name = "actors.py" if "actors.py" in names or not names else names[0]
    return f"{text!r} is a folder: give a file in it, for example {Path(text) / name}"


def _why(error: BaseException) -> str:
    name = error.code if isinstance(error, DynbusError) else type(error).__name__
    text = f"{name}: {error}"
    if "attempted relative import" in text:
        text += "; a module of a package is run by its dotted name: package.module"
    return text


def _from_dynamo(error: ModuleNotFoundError) -> str:
    """The part of the message about a program that imports Dynamo's library."""
    if (error.name or "").partition(".")[0] != "dynamo":
        return ""
    return "; dynbus.compat has its names: `from dynbus.compat.sdk import ...`"


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)
