"""`dynbus http` that ends with its standard input, so that it does not outlive who started it."""

from __future__ import annotations

import os
import signal
import threading

from dynbus.cli import main

from .processes import allow_many_files


def _end_with_input() -> None:
    # Unbuffered: a buffer's lock would be held when the interpreter ends.
    with open(0, "rb", buffering=0, closefd=False) as given:
        given.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    allow_many_files()
    threading.Thread(target=_end_with_input, daemon=True).start()
    main()
