"""A hub's cache with the model of the guides, so that their programs run without a network.

`python tests/guides/hub_cache.py FOLDER` makes one; programs find it by `HF_HOME=FOLDER`. Its
tokenizer and its template are tiny, and it has no weights: what registers a model needs none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
COMMIT: Final = "c1899de289a04d12100db370d81485cdf75e47ca"
"""Any will do."""


def make_hub_cache(home: Path) -> Path:
    """Put `Qwen/Qwen3-0.6B` into the cache below a folder; its files are in the one returned."""
    from tests.llm.models.tiny_model import tiny_folder

    repository = home / "hub" / "models--Qwen--Qwen3-0.6B"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return tiny_folder(repository / "snapshots" / COMMIT)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(make_hub_cache(Path(sys.argv[1])))
