"""`python -m benchmarks.routing.dynamo_replay`: Dynamo's offline replay, in its own environment.

Standard input has {"trace", "instances", "speed", "router_mode", "event_delay_ms"}, standard
output gets the summary of `run_mocker_trace_replay` with its default engine.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main() -> None:
    """Replay once."""
    asked = json.load(sys.stdin)
    # It is not installed where the types are checked.
    core: Any = importlib.import_module("dynamo._core")
    is_round_robin = asked["router_mode"] == "round_robin"
    result = core.run_mocker_trace_replay(
        [asked["trace"]],
        num_workers=asked["instances"],
        router_mode=asked["router_mode"],
        arrival_speedup_ratio=asked["speed"],
        trace_block_size=512,
        capture_planner_details=False,
        kv_event_lag_ms=None if is_round_robin else asked["event_delay_ms"],
    )
    json.dump(result.summary, sys.stdout)


if __name__ == "__main__":
    main()
