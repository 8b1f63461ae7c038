"""The restart policy of instances that ended: after a pause that doubles (back-off), for ever.

`dynbus run` restarts processes by it (`running/supervisor.py`), or instances of its own process
(`running/in_process.py`).
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, get_args

from dynbus.bus.errors import ConfigError

OnCrash: TypeAlias = Literal["restart", "stop", "escalate"]
"""The policy for an instance that ends by itself: it restarts, the others go on without it, or the
whole run ends.
"""

SETTLED_AFTER: Final = 60.0
FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 30.0


class RestartPolicy:
    """Decides when an instance that ended is started again, without clock or I/O.

    Attributes:
        crashes: how often it has ended in a row. One that was ready for `SETTLED_AFTER` seconds
            begins anew.
    """

    def __init__(self) -> None:
        self.crashes = 0

    def __repr__(self) -> str:
        return f"<RestartPolicy [{self.crashes} crashes]>"

    def pause_after(self, lived: float, jitter: float) -> float:
        """Seconds to wait after an end.

        Args:
            lived: seconds for which it had been ready.
            jitter: from 0 to 1; the higher, the longer the pause, by up to half of it.
        """
        self.crashes = 1 if lived >= SETTLED_AFTER else self.crashes + 1
        # The exponent is bounded: a float has an end.
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.crashes - 1, 32))
        return pause * (0.5 + jitter / 2)


def check_on_crash(value: Any, source: str) -> OnCrash:
    """Return `value` when it says what to do.

    Raises:
        ConfigError: it does not; the message begins with `source`.
    """
    choices: tuple[OnCrash, ...] = get_args(OnCrash)
    for choice in choices:
        if choice == value:
            return choice
    *first, last = choices
    raise ConfigError(f"{source} = {value!r}: write {', '.join(first)} or {last}")
