"""Models of a hub, by `huggingface_hub`: its cache, its tokens, and the files that are needed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dynbus.spi import how_to_install

from . import hub_process
from .downloads import Download, lacks_room
from .origins import HubSource, ModelUnavailable, Progress

_CHECK: Final = (
    "check its name, the network, HF_TOKEN and HF_ENDPOINT, or give the path of a folder"
)
_REMEDIES: Final = {
    "GatedRepoError": "ask for access on its page, and give the token of who has it in HF_TOKEN",
    "OfflineModeIsEnabled": "unset HF_HUB_OFFLINE to download it, or give the path of a folder",
}


def cached_folder(source: HubSource, download: Download) -> Path | None:
    """The folder with the needed files of a repository in the hub's cache; None where it does not
    have all of them.

    Raises:
        ModelUnavailable: the cache cannot be looked at.
        DownloadStopped: it shall end.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    report, _ = _reported(source, download, weights=True, only_cached=True)
    return Path(report["folder"]) if "folder" in report else None


def repository_folder(source: HubSource, download: Download, *, weights: bool) -> Path:
    """The folder with the needed files of a repository; what the hub's cache has is not got again.

    Args:
        weights: whether they are needed where the hub cannot be asked.

    Raises:
        ModelUnavailable: it cannot be had.
        DownloadStopped: it shall end. What is here of it is not taken for whole.
    """
    name = source.repository
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelUnavailable(f"{name} is of a hub: {how_to_install('llm')}")
    report, said = _reported(source, download, weights=weights, only_cached=False)
    if "folder" in report:
        return Path(report["folder"])
    why = report.get("failed", said)
    remedy = _REMEDIES.get(report.get("kind", ""), _CHECK)
    if lacks_room(why):
        remedy = "make room in the hub's cache, or set HF_HOME to a folder that has it"
    raise ModelUnavailable(f"{name} cannot be downloaded: {why}; {remedy}")


def _reported(
    source: HubSource, download: Download, *, weights: bool, only_cached: bool
) -> tuple[Mapping[str, Any], str]:
    """The report of the process, and what it said last."""
    name = source.repository
    download.tell(Progress(f"looking for {name}", 0, 0))
    request = {
        "repository": name,
        "revision": source.revision,
        "file": source.file,
        "weights": weights,
        "only_cached": only_cached,
    }
    command = [sys.executable, "-P", hub_process.__file__, json.dumps(request)]
    with tempfile.TemporaryDirectory() as working:
        output = Path(working) / "output"
        try:
            status = download.run(
                command, os.environ, output, lambda said: _progress(name, _report_in(said))
            )
        except TimeoutError as error:
            raise ModelUnavailable(
                f"{name} cannot be downloaded: {error}; {_CHECK}. Another process may be "
                "downloading it and hold its lock in the hub's cache"
            ) from None
        said = output.read_text(errors="replace")
    last = " ".join(said.split())[-600:] or f"its process ended with status {status}"
    return _report_in(said), last


def _report_in(said: str) -> Mapping[str, Any]:
    """The latest report of the process."""
    report: dict[str, Any] = {}
    for line in said.split("\n"):
        if line.startswith('{"dynbus"'):
            # The last one may not be written to its end.
            with contextlib.suppress(ValueError):
                report |= json.loads(line)["dynbus"]
    return report


def _progress(name: str, report: Mapping[str, Any]) -> Progress:
    """The progress of a repository, by the sizes of its files in the hub's cache."""
    if "blobs" not in report:
        return Progress(f"looking for {name}", 0, 0)
    blobs, expected = Path(report["blobs"]), report["expected"]
    done = 0
    for blob, size in expected.items():
        here = 0
        for path in blobs.glob(f"{blob}*"):
            # It is moved when it is whole.
            with contextlib.suppress(OSError):
                here = max(here, path.stat().st_size)
        done += min(here, size)
    return Progress(f"downloading {name}", done, sum(expected.values()))
