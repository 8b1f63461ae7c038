"""The graph of a run is drawn from its plan: who is there, how often, and who calls whom."""

from __future__ import annotations

import shutil
import subprocess

import msgspec
import pytest

from dynbus.actors.declaring.resources import Resources
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.running.drawing import dot, mermaid, tree
from dynbus.actors.running.plan import PlannedNode


def node(address: str, *calls: str, workers: int = 1, actor: str = "") -> PlannedNode:
    return PlannedNode(
        address=address,
        actor=f"a:{actor or address.partition('.')[2]}",
        depth=0,
        service=ServiceArgs(workers=workers),
        dependencies={f"_{number}": call for number, call in enumerate(calls)},
        endpoints={"ask": "unary", "read": "stream"},
    )


NODES = [
    node("llm.engine-1", workers=2),
    node("llm.router", "llm.engine-1"),
    node("llm.front", "llm.router", "llm.engine-1", "auth.Keys"),
    node("llm.alone"),
    node("auth.Keys", workers=0),
]


def test_a_tree_begins_with_what_nobody_calls_and_writes_each_node_out_once() -> None:
    assert tree(NODES).splitlines() == [
        "llm.front  (ask, read*)",
        "├── llm.router  (ask, read*)",
        "│   └── llm.engine-1 x2  (ask, read*)",
        "├── llm.engine-1 (see above)",
        "└── auth.Keys (runs elsewhere)  (ask, read*)",
        "llm.alone  (ask, read*)",
    ]


def test_what_each_instance_needs_stands_beside_the_number_of_them() -> None:
    needs = Resources(cpu=2.0, gpu=1)
    nodes = [msgspec.structs.replace(NODES[0], service=ServiceArgs(workers=2, resources=needs))]

    assert tree(nodes) == "llm.engine-1 x2: cpu 2, gpu 1  (ask, read*)"
    assert 'n0["llm.engine-1 x2: cpu 2, gpu 1"]' in mermaid(nodes)


def test_a_node_with_a_name_of_its_own_says_which_class_it_runs() -> None:
    nodes = [node("llm.prefill", workers=2, actor="Engine")]

    assert tree(nodes) == "llm.prefill (Engine) x2  (ask, read*)"
    assert 'n0 [label="llm.prefill (Engine) x2"]' in dot(nodes)


def test_mermaid_has_a_box_for_each_node_and_an_arrow_for_each_call() -> None:
    assert mermaid(NODES).splitlines() == [
        "flowchart LR",
        '    n0["llm.engine-1 x2"]',
        '    n1["llm.router"]',
        '    n2["llm.front"]',
        '    n3["llm.alone"]',
        '    n4["auth.Keys (runs elsewhere)"]',
        "    n1 --> n0",
        "    n2 --> n1",
        "    n2 --> n0",
        "    n2 --> n4",
    ]


def test_dot_has_the_same_and_graphviz_reads_it() -> None:
    text = dot(NODES)

    assert text.startswith("digraph run {")
    assert '    n0 [label="llm.engine-1 x2"]' in text.splitlines()
    assert [line.strip() for line in text.splitlines() if "->" in line] == [
        "n1 -> n0",
        "n2 -> n1",
        "n2 -> n0",
        "n2 -> n4",
    ]
    program = shutil.which("dot")
    if program is None:
        pytest.skip("Graphviz is not installed")
    drawn = subprocess.run(
        [program, "-Tsvg"], input=text, capture_output=True, text=True, timeout=120, check=True
    )
    assert "llm.engine" in drawn.stdout


def test_what_a_node_uses_that_is_no_node_stands_below_it() -> None:
    using = msgspec.structs.replace(node("shop.Agent", "shop.Orders"), uses=["model qwen"])
    nodes = [node("shop.Orders"), using]

    assert tree(nodes).splitlines()[1:] == ["├── shop.Orders  (ask, read*)", "└── model qwen"]
    assert mermaid(nodes).splitlines()[3:] == [
        '    n2(["model qwen"])',
        "    n1 --> n0",
        "    n1 --> n2",
    ]
    assert '    n2 [label="model qwen", shape=ellipse]' in dot(nodes).splitlines()
