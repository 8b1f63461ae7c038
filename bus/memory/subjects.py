"""Subject matching for the in-memory bus."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


def matches(pattern: str, subject: str) -> bool:
    """True if a subscription to `pattern` hears a message to `subject`.

    `*` stands for one token and a final `>` for one or more. In `subject` both are ordinary
    characters, and a subject with an empty token is heard by nobody, as on nats-server.
    """
    wanted = pattern.split(".")
    tokens = subject.split(".")
    if "" in tokens:
        return False
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
    elif len(tokens) != len(wanted):
        return False
    # With a final `>` there are more tokens than wanted, which is what it stands for.
    return all(want in ("*", token) for want, token in zip(wanted, tokens, strict=False))


def overlap(one: str, two: str) -> bool:
    """True if some subject matches both patterns."""
    left, right = one.split("."), two.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


class _Branch(Generic[T]):
    __slots__ = ("branches", "values")

    def __init__(self) -> None:
        self.branches: dict[str, _Branch[T]] = {}
        self.values: dict[int, T] = {}


class SubjectTree(Generic[T]):
    """Values by pattern, found by subject in time that does not grow with their number."""

    def __init__(self) -> None:
        self._root: _Branch[T] = _Branch()
        self._values: dict[int, T] = {}

    def add(self, pattern: str, number: int, value: T) -> None:
        """Add a value under a number of its own."""
        branch = self._root
        for token in pattern.split("."):
            branch = branch.branches.setdefault(token, _Branch())
        branch.values[number] = value
        self._values[number] = value

    def remove(self, pattern: str, number: int) -> None:
        """Remove a value; one that is not there is no error."""
        path = [self._root]
        tokens = pattern.split(".")
        for token in tokens:
            if token not in path[-1].branches:
                return
            path.append(path[-1].branches[token])
        path[-1].values.pop(number, None)
        self._values.pop(number, None)
        for token, parent, child in zip(
            reversed(tokens), reversed(path[:-1]), reversed(path[1:]), strict=True
        ):
            if not child.values and not child.branches:
                del parent.branches[token]

    def values(self) -> list[T]:
        """All values, in the order of their addition."""
        return list(self._values.values())

    def match(self, subject: str) -> list[T]:
        """The values whose pattern hears `subject`, by number; see `matches`."""
        tokens = subject.split(".")
        if "" in tokens:
            return []
        values: dict[int, T] = {}
        level = [self._root]
        for token in tokens:
            following: list[_Branch[T]] = []
            for branch in level:
                rest = branch.branches.get(">")
                if rest is not None:
                    values.update(rest.values)
                for key in {token, "*"} - {">"}:
                    if key in branch.branches:
                        following.append(branch.branches[key])
            level = following
        for branch in level:
            values.update(branch.values)
        return [values[number] for number in sorted(values)]
