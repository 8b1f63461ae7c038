"""Targets of `dynbus run` name exactly the actors that are meant, wherever they are written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

from dynbus.actors.running.graph import (
    Node,
    addresses_of,
    dependency_depth,
    dependents_first,
    with_dependencies,
)
from dynbus.actors.running.loader import (
    DeclaredNode,
    ImportFailed,
    Target,
    load_targets,
    reference,
    resolve,
)
from dynbus.actors.runtime import Actor
from dynbus.bus.errors import ConfigError

HEAD = "from dynbus import Actor, depends, handler\n"


def actor(name: str, *, bases: str = 'Actor, namespace="demo"', body: str = "") -> str:
    return f"""
class {name}({bases}):
    {body}
    @handler
    async def call(self, text: str) -> str:
        return text
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; modules that are imported from it are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def names(nodes: list[Node]) -> list[str]:
    return [node.actor.__qualname__ for node in nodes]


def test_a_file_gives_the_actors_that_it_defines_in_their_order(folder: Path) -> None:
    (folder / "service.py").write_text(HEAD + actor("Second") + actor("First"))

    found = load_targets(["service.py"])

    assert names(found) == ["Second", "First"]


def test_a_file_is_imported_under_its_stem(folder: Path) -> None:
    (folder / "service.py").write_text(HEAD + actor("One"))

    (found,) = load_targets(["service.py"])

    assert found.actor.__module__ == "service"


def test_a_file_sees_the_other_files_of_its_folder_first(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "neighbour.py").write_text("NAME = 'wrong'")
    (folder / "deep" / "neighbour.py").write_text("NAME = 'right'")
    text = HEAD + "from neighbour import NAME\n" + actor("One", body="name = NAME")
    (folder / "deep" / "service.py").write_text(text)

    (found,) = load_targets(["deep/service.py"])

    assert vars(found.actor)["name"] == "right"


def test_actors_that_a_file_only_imports_are_not_started(folder: Path) -> None:
    (folder / "library.py").write_text(HEAD + actor("Imported"))
    (folder / "service.py").write_text(HEAD + "from library import Imported\n" + actor("Own"))

    found = load_targets(["service.py"])

    assert names(found) == ["Own"]


def test_dependencies_are_started_too_and_come_first(folder: Path) -> None:
    (folder / "library.py").write_text(
        HEAD + actor("Deepest") + actor("Deep", body="deepest = depends(Deepest)")
    )
    (folder / "service.py").write_text(
        HEAD + "from library import Deep\n" + actor("Top", body="deep = depends(Deep)")
    )

    found = load_targets(["service.py"])

    assert names(found) == ["Deepest", "Deep", "Top"]
    assert [dependency_depth(node.actor) for node in found] == [0, 1, 2]


def test_what_others_depend_on_is_drained_last() -> None:
    depths = {"Deepest": 0, "Top": 2, "Deep": 1, "Other": 1}

    found = dependents_first(depths, depths.__getitem__)

    assert found == [["Top"], ["Deep", "Other"], ["Deepest"]]


def test_an_error_of_a_file_is_told_by_the_name_that_the_pages_have_for_it(folder: Path) -> None:
    method = "@handler\n    async def odd(self, parts: list[bytes]) -> None: ..."
    (folder / "service.py").write_text(HEAD + actor("Odd", body=method))

    with pytest.raises(ImportFailed, match="'service.py': ConfigError: Odd.odd: "):
        load_targets(["service.py"])


def test_a_file_that_ends_its_program_is_refused(folder: Path) -> None:
    (folder / "service.py").write_text("import sys\nsys.exit(0)\n")

    with pytest.raises(ImportFailed, match="'service.py': it ends its program .*SystemExit: 0"):
        load_targets(["service.py"])


def test_an_abstract_class_is_never_started(folder: Path) -> None:
    base = actor("Base", bases='Actor, namespace="demo", abstract=True')
    (folder / "service.py").write_text(HEAD + base + actor("Concrete", bases="Base"))

    found = load_targets(["service.py"])

    assert names(found) == ["Concrete"]


def test_a_name_chooses_one_actor(folder: Path) -> None:
    (folder / "service.py").write_text(HEAD + actor("One") + actor("Two"))

    by_file, by_module = load_targets(["service.py:Two"]), load_targets(["service:Two"])

    assert names(by_file) == ["Two"]
    assert by_file == by_module


def test_a_dotted_module_is_found_in_the_working_directory(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "base.py").write_text(HEAD + actor("One"))
    (folder / "package" / "service.py").write_text(HEAD + "from .base import One\n" + actor("Two"))

    assert names(load_targets(["package.service:Two"])) == ["Two"]
    assert names(load_targets(["package.service:One"])) == ["One"]


def test_an_actor_that_two_targets_name_is_started_once(folder: Path) -> None:
    (folder / "service.py").write_text(HEAD + actor("One") + actor("Two"))

    found = load_targets(["service.py", "service.py:One"])

    assert names(found) == ["One", "Two"]


def test_a_reference_leads_back_to_the_class(folder: Path) -> None:
    (folder / "service.py").write_text(HEAD + actor("One"))
    (found,) = load_targets(["service.py"])

    assert reference(found.actor) == "service:One"
    assert resolve("service:One") is found.actor


def test_a_class_inside_a_function_has_no_reference() -> None:
    class Local(Actor, namespace="demo"):
        pass

    with pytest.raises(ConfigError, match="use --in-process"):
        reference(Local)


def test_a_shared_dependency_comes_once() -> None:
    class Base(Actor, namespace="demo"):
        pass

    found = with_dependencies([Base, Base])

    assert found == [Base]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "is not a target: write actors.py"),
        ("service.py:", "is not a target"),
        ("service.py:a b", "is not a target"),
        ("my-service", "is not a target"),
        ("missing.py", "there is no file missing.py"),
        ("missing", "there is no module 'missing'"),
        ("missing.actors", "is it a file? then write missing/actors.py"),
        ("./folder", "'./folder' is a folder: give a file in it, for example folder/actors.py"),
        ("folder/", "'folder/' is a folder: give a file in it, for example folder/actors.py"),
        ("folder", "'folder' is a folder: give a file in it, for example folder/actors.py"),
        ("other/", "for example other/serve.py"),
        ("service", "is it a file"),
        ("my-service.py", "must be a Python identifier"),
        ("good.py:Missing", "there is no 'Missing'; its actors are: One"),
        ("good.py:handler", "handler is not an actor"),
        ("good.py:Base", "Base is abstract"),
        ("empty.py", "defines no actor: write class Name"),
        ("imports.py", "defines no actor of its own; One comes from good: run imports.py:One"),
        ("mute.py", "Mute has no handler"),
        ("random.py", "the name 'random' belongs to another module"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_with_the_remedy(
    target: str, message: str, folder: Path
) -> None:
    base = actor("Base", bases='Actor, namespace="demo", abstract=True')
    (folder / "good.py").write_text(HEAD + base + actor("One"))
    for file in ("folder/actors.py", "folder/a.py", "other/serve.py", "other/a-b.py"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(HEAD + actor("One"))
    (folder / "my-service.py").write_text(HEAD + actor("One"))
    (folder / "empty.py").write_text("")
    (folder / "imports.py").write_text("from good import One")
    (folder / "mute.py").write_text(HEAD + 'class Mute(Actor, namespace="demo"): pass')
    (folder / "random.py").write_text(HEAD + actor("One"))

    with pytest.raises(ConfigError) as raised:
        load_targets([target])

    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError"),
        ("import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
        ("from dynamo.sdk import service", "No module named 'dynamo'; dynbus.compat has its names"),
        ("from . import other", "run by its dotted name"),
    ],
)
def test_a_file_that_raises_is_told_with_its_own_exception(
    text: str, message: str, folder: Path
) -> None:
    (folder / "service.py").write_text(text)

    with pytest.raises(ImportFailed, match=message) as raised:
        load_targets(["service.py"])

    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("line", ["from random import mine", "import random.mine"])
def test_a_file_with_the_name_of_a_module_that_python_has_is_to_be_renamed(
    line: str, folder: Path
) -> None:
    (folder / "random.py").write_text("mine = 1")
    (folder / "service.py").write_text(line)

    with pytest.raises(ImportFailed, match=r"rename your file random\.py$"):
        load_targets(["service.py"])


def test_what_a_standard_module_lacks_is_no_clash_of_names(folder: Path) -> None:
    (folder / "service.py").write_text("from random import mine")

    with pytest.raises(ImportFailed) as raised:
        load_targets(["service.py"])

    assert "rename" not in str(raised.value)


def test_classes_of_one_name_share_a_run_in_two_namespaces(folder: Path) -> None:
    (folder / "one.py").write_text(HEAD + actor("Same"))
    (folder / "two.py").write_text(HEAD + actor("Same", bases='Actor, namespace="other"'))

    found = load_targets(["one.py", "two.py"])

    assert addresses(found) == ["demo.Same", "other.Same"]


def test_classes_of_one_name_in_one_module_are_refused(folder: Path) -> None:
    other = "class Outer:\n" + indent(actor("Same", bases='Actor, namespace="other"'), "    ")
    (folder / "one.py").write_text(HEAD + actor("Same") + other)

    with pytest.raises(ConfigError, match=r"one:Same and one:Outer\.Same have the same name"):
        load_targets(["one.py", "one.py:Outer.Same"])


def test_two_classes_at_one_address_are_refused(folder: Path) -> None:
    other = actor("Other", bases='Actor, namespace="demo", component="One"')
    (folder / "service.py").write_text(HEAD + actor("One") + other)

    with pytest.raises(ConfigError, match=r"the same address 'demo\.One'"):
        addresses(load_targets(["service.py"]))


NODES = (
    HEAD
    + actor("Engine")
    + actor(
        "Frontend",
        body='prefill = depends(Engine, node="prefill"); decode = depends(Engine, node="decode")',
    )
)


def addresses(nodes: list[Node], *declared: DeclaredNode) -> list[str]:
    namespaces = {node: node.actor.__dynbus_service__.namespace for node in nodes}
    sources = {node.name: node.source for node in declared}
    return list(map(str, addresses_of(namespaces, sources).values()))


def test_a_class_that_stands_under_other_names_is_started_under_these_alone(folder: Path) -> None:
    (folder / "service.py").write_text(NODES)

    found = load_targets(["service.py"])

    assert addresses(found) == ["demo.prefill", "demo.decode", "demo.Frontend"]
    assert names(found) == ["Engine", "Engine", "Frontend"]


def test_a_class_is_started_under_its_own_name_too_when_something_depends_on_that(
    folder: Path,
) -> None:
    (folder / "service.py").write_text(NODES + actor("Other", body="engine = depends(Engine)"))

    found = load_targets(["service.py"])

    assert set(addresses(found)) == {f"demo.{name}" for name in (
        "prefill", "decode", "Engine", "Frontend", "Other",
    )}  # fmt: skip


def declared(name: str, class_name: str) -> DeclaredNode:
    return DeclaredNode(name, class_name, f"config.yaml: {name}.class")


def test_a_file_names_further_nodes_of_the_classes_of_the_run(folder: Path) -> None:
    (folder / "service.py").write_text(HEAD + actor("Engine"))

    found = load_targets(["service.py"], [declared("fast", "Engine"), declared("slow", "Engine")])

    assert addresses(found) == ["demo.fast", "demo.slow"]


def test_a_file_may_ask_for_the_name_of_the_class_beside_others(folder: Path) -> None:
    (folder / "service.py").write_text(NODES)

    found = load_targets(["service.py:Frontend"], [declared("Engine", "Engine")])

    assert set(addresses(found)) == {"demo.prefill", "demo.decode", "demo.Engine", "demo.Frontend"}


def test_a_node_that_both_a_dependency_and_a_file_name_is_one(folder: Path) -> None:
    (folder / "service.py").write_text(NODES)

    found = load_targets(["service.py"], [declared("decode", "Engine")])

    assert addresses(found) == ["demo.decode", "demo.prefill", "demo.Frontend"]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            declared("fast", "Engin"),
            r"^config\.yaml: fast\.class: this run has no class Engin \(did you mean Engine\?\); "
            "it has Engine, Frontend$",
        ),
        (
            declared("prefill", "Frontend"),
            "^config.yaml: prefill.class: service:Engine and service:Frontend have the same "
            "address 'demo.prefill': give one of them another component, another name by ",
        ),
    ],
)
def test_a_node_of_no_class_and_one_of_two_classes_are_refused(
    node: DeclaredNode, message: str, folder: Path
) -> None:
    (folder / "service.py").write_text(NODES)

    with pytest.raises(ConfigError, match=message):
        addresses(load_targets(["service.py"], [node]), node)


def test_two_classes_as_one_node_are_refused(folder: Path) -> None:
    wrong = actor("Wrong", body='frontend = depends(Frontend, node="decode")')
    (folder / "service.py").write_text(NODES + wrong)

    with pytest.raises(
        ConfigError,
        match="Engine and service:Frontend have the same address .* another namespace by "
        r"--service:decode\.ServiceArgs\.namespace=NAME "
        r"\(they are needed by Wrong -> Frontend -> Engine and Wrong -> Frontend\)$",
    ):
        addresses(load_targets(["service.py"]))


def test_classes_of_one_component_in_two_namespaces_are_started(folder: Path) -> None:
    other = actor("Other", bases='Actor, namespace="other", component="One"')
    (folder / "service.py").write_text(HEAD + actor("One") + other)

    assert addresses(load_targets(["service.py"])) == ["demo.One", "other.One"]


def test_no_target_runs_code_when_one_of_them_does_not_exist(folder: Path) -> None:
    (folder / "service.py").write_text("raise RuntimeError('ran')")

    with pytest.raises(ConfigError, match="there is no file missing.py"):
        load_targets(["service.py", "missing.py"])


def test_a_target_is_read_into_its_parts(folder: Path) -> None:
    (folder / "service.py").write_text("")

    assert Target.parse("service.py:A.B") == Target(
        "service.py:A.B", folder, "service", "A.B", folder / "service.py"
    )
