"""Options of a command, made of the specification that has them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

import click

from dynbus.actors.declaring.specification import DeclaredOption, Options, declared
from dynbus.bus.commands.terminal import terminal

C = TypeVar("C", bound=Callable[..., Any])


def flags(spec: type[Options], only: Collection[str] = ()) -> Callable[[C], C]:
    """Give a command an option for each field of a specification; the command gets them by the
    names of the fields.

    Args:
        only: of these fields alone; of all unless given.
    """
    given = [each for each in declared(spec) if not only or each.name in only]

    def decorate(command: C) -> C:
        for each in reversed(given):
            command = _flag(each)(command)
        return command

    return decorate


def _flag(each: DeclaredOption) -> Callable[[C], C]:
    name = f"--{each.option.flag or each.name.replace('_', '-')}"
    meaning = each.option.meaning.replace("`", "")
    settings: dict[str, Any] = {"help": f"{meaning[0].upper()}{meaning[1:]}."}
    if each.option.unit:
        settings["metavar"] = each.option.unit.upper()
    kind = each.plain_kind
    if kind is bool:
        settings["is_flag"] = True
    elif each.is_list:
        settings |= {"multiple": True, "help": f"{settings['help']} Repeatable."}
    else:
        settings["type"] = _type(each, kind)
        settings["show_default"] = not each.is_secret
    if each.default is MISSING:
        settings["required"] = True
    else:
        settings["default"] = each.default
    return click.option(name, each.name, **settings)


def _type(each: DeclaredOption, kind: Any) -> click.ParamType[Any]:
    option = each.option
    if each.choices:
        return click.Choice(each.choices)
    if kind is int:
        return click.IntRange(_whole(option.least), _whole(option.most))
    if kind is float:
        least = option.least if option.above is None else option.above
        return terminal.number(least, option.most, min_open=option.above is not None)
    if kind is Path:
        return click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.STRING


def _whole(bound: float | None) -> int | None:
    return None if bound is None else int(bound)
