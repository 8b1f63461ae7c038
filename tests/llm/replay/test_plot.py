"""The plot is an image of its own that names the policies."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from dynbus.llm.replay.plot import HEIGHT, WIDTH, plot_ttft

SVG = "{http://www.w3.org/2000/svg}"


def test_each_policy_has_a_line_that_rises_within_the_image() -> None:
    ttft = {"round_robin": np.array([0.1, 0.5, 2.0, 9.0]), "my:<cost>": np.array([0.05, 0.2])}

    root = ElementTree.fromstring(plot_ttft(ttft))

    names = [text.text for text in root.iter(f"{SVG}text")]
    assert {"round_robin", "my:<cost>"} <= set(names)
    lines = list(root.iter(f"{SVG}polyline"))
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, each.split(","))) for each in line.attrib["points"].split()]
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


def test_the_axis_covers_all_times() -> None:
    names = [
        text.text
        for text in ElementTree.fromstring(plot_ttft({"a": np.array([0.02, 3.0])})).iter(
            f"{SVG}text"
        )
    ]

    assert {"10 ms", "100 ms", "1 s", "10 s"} <= set(names)
    assert "1 ms" not in names
