"""The question and the output of `dynbus why`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import click
import msgspec

from dynbus import BusConfig, ConfigError, Unavailable
from dynbus.kvrouter.routing.decision import MAX_REQUEST_ID, Explanation, Question, why_subject
from dynbus.kvrouter.routing.observing import TARGET_KEY
from dynbus.spi import Message, terminal

from .why_answer import check_answer

ANSWER_SECONDS: Final = 1.5
"""Seconds that routers have to answer."""
QUIET_SECONDS: Final = 0.5
"""Seconds without a further answer after which nobody else is expected."""

MOST_DUMPED: Final = 100
"""Decisions of each router in a dump."""

_decoder = msgspec.json.Decoder(Explanation)


async def ask_routers(
    config: BusConfig, question: Question, namespace: str | None, component: str | None
) -> list[Explanation]:
    """Ask the routers for a request, or for what they have decided of late, within bounded time.

    Args:
        namespace, component: what they route to; None for all that can be found.

    Raises:
        ConfigError: the id or the component is none.
        PermissionDenied, Unavailable: the server cannot be used.
    """
    if len(question.request_id) > MAX_REQUEST_ID or not (question.request_id or question.latest):
        raise ConfigError(f"a request id has 1 to {MAX_REQUEST_ID} characters")
    subjects: set[str] = set()
    if namespace is not None and component is not None:
        subjects = {why_subject(namespace, component)}
    async with terminal.server(config, "dynbus-why") as server:
        if not subjects:
            rows = (await terminal.survey(server)).rows
            targets = {f"{row.namespace}.{row.component}" for row in rows}
            targets |= {row.status[TARGET_KEY] for row in rows if TARGET_KEY in row.status}
            places = [target.split(".") for target in targets if target.count(".") == 1]
            for of, name in places:
                if namespace in (None, of):
                    # Instances say these themselves.
                    with suppress(ConfigError):
                        subjects.add(why_subject(of, name))
        answers = await server.ask(
            subjects,
            msgspec.json.encode(question),
            _read_answer,
            seconds=ANSWER_SECONDS,
            quiet=QUIET_SECONDS,
        )
    by_router = {answer.router: answer for answer in answers}
    return sorted(by_router.values(), key=lambda answer: (answer.target, answer.process))


def _read_answer(message: Message) -> Explanation | None:
    try:
        answer = _decoder.decode(message.data)
        check_answer(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The server's own answer where nobody listens, which is empty; or that of an instance which
        # is no router.
        return None
    return answer


async def dump_decisions(config: BusConfig) -> list[dict[str, Any]]:
    """`dynbus why`: the latest decisions of each router, without sessions.

    Raises:
        Unavailable: no router answers.
    """
    answers = await ask_routers(config, Question(latest=MOST_DUMPED), None, None)
    if not answers:
        raise Unavailable("no router answered: none is open, or it routes to what has no instance")
    for answer in answers:
        for decision in answer.decisions:
            # Clients name sessions, and policies of users raise what they like.
            decision["session"] = bool(decision["session"])
            for shadow in decision["shadows"]:
                shadow["error"] = shadow["error"].partition(":")[0]
    return [msgspec.to_builtins(answer) for answer in answers]


def nobody_knows(request_id: str, answers: Sequence[Explanation]) -> str:
    """The reason for which there is no decision to show, and what to do.

    Args:
        request_id: empty when the latest decisions were asked for.
    """
    if not answers:
        return (
            f"no router answered{f' for {request_id}' if request_id else ''}: routers answer "
            "while they are open (open_router, RouterActor); pass the component that they route to "
            "as --component"
        )
    routers = "1 router" if len(answers) == 1 else f"{len(answers)} routers"
    none = f"none knows {request_id}" if request_id else "no router has decided anything yet"
    lines = [f"{routers} answered, {none}:"]
    for answer in answers:
        oldest = (
            "none yet"
            if answer.oldest_s is None
            else f"back to {terminal.duration(answer.oldest_s)}"
        )
        lines.append(
            f"  {answer.target} in {answer.process} keeps its latest {answer.limit} decisions: "
            f"{answer.kept}, {oldest}" + (" ago" if answer.oldest_s is not None else "")
        )
    if request_id:
        lines.append("the request is older, was not routed by its tokens, or has another id")
    return "\n".join(lines)


def newest_alone(answers: Sequence[Explanation]) -> list[Explanation]:
    """The answer with the newest decision, and no other."""
    answers = [answer for answer in answers if answer.decisions]
    if not answers:
        return []
    newest = min(answers, key=lambda answer: answer.decisions[0]["ago_s"])
    return [msgspec.structs.replace(newest, decisions=newest.decisions[:1])]


def print_latest(answers: Sequence[Explanation], limit: int) -> None:
    """A line for each of the latest decisions of all routers, newest first."""
    rows = [(decision, answer) for answer in answers for decision in answer.decisions]
    rows.sort(key=lambda row: row[0]["ago_s"])
    if not rows:
        return
    columns = ("AGE", "REQUEST", "CHOSEN", "OVERLAP", "PROMPT", "WHY", "OUTCOME", "ROUTES TO")
    terminal.print_table(
        columns,
        [
            (
                terminal.duration(decision["ago_s"]),
                terminal.plain(decision["request_id"]),
                terminal.plain(_name(decision["chosen"])),
                str(decision["expected_reuse"]),
                str(decision["prompt_tokens"]),
                terminal.plain(decision["reason"]),
                terminal.plain(_ended(decision["outcome"])),
                terminal.plain(answer.target),
            )
            for decision, answer in rows[:limit]
        ],
    )


def _ended(outcome: Mapping[str, Any]) -> str:
    if outcome["ended_s"] is None:
        return "runs"
    return outcome["error"] or f"{outcome['ended_s']:.3f} s"


def print_answer(answer: Explanation) -> None:
    """All that one router decided for a request, or what an instance has to say of it."""
    for damage in answer.damages or ():
        _print_damage(answer, damage)
    if answer.decisions_left_out:
        click.echo(f"{answer.decisions_left_out} older decisions are left out")
    for decision in answer.decisions:
        ago = terminal.duration(decision["ago_s"])
        print_decision(decision, f"router {answer.router[:8]} in {answer.process}, {ago} ago")


def _print_damage(answer: Explanation, damage: Mapping[str, Any]) -> None:
    """The damage of a cache that has touched a request."""
    others = len(damage["requests"]) + damage["requests_left_out"] - 1
    lines = [
        f"touched by a damage of the KV cache of {answer.router}, in {answer.process}",
        f"  when    {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(damage['at']))}",
        f"  of      {' and '.join(damage['sources'])}, seen by {damage['evidence']}"
        + (f" of {damage['request_id']}" if damage["request_id"] else ""),
        f"  blocks  {damage['blocks']}, the first is number {damage['first']} of its prompt; "
        f"{damage['dropped']} were dropped",
        f"  done    {', '.join(damage['measures'])}",
        f"  others  {max(0, others)} requests have used them as well",
    ]
    click.echo("\n".join(map(terminal.printable, lines)))


def print_decision(decision: Mapping[str, Any], by: str) -> None:
    """A decision with all of its candidates.

    Args:
        decision: as `Decision.as_dict` has it.
        by: who decided, and when.
    """
    chosen = decision["chosen"]
    waited = f", after {decision['waited_s']:.3f} s in the queue" if decision["waited_s"] else ""
    sampled = f" at temperature {decision['temperature']}" if decision["temperature"] else ""
    session = f", session {decision['session']}" if decision["session"] else ""
    lines = [
        f"{decision['request_id']}, attempt {decision['attempt']}: {_name(chosen)}",
        f"  by      {by}{waited}",
        f"  why     {decision['reason']} by policy {decision['policy']}{sampled}{session}",
        f"  prompt  {decision['prompt_tokens']} tokens, {decision['prompt_blocks']} blocks of "
        f"{decision['block_size']}; {decision['expected_reuse']} tokens expected in the cache",
        f"  index   {decision['awareness']}, events followed to {decision['index_sequence']}",
    ]
    if decision.get("peer") is not None:
        lines.append(
            f"  peer    {_name(decision['peer'])} holds {decision['peer_overlap']} blocks of it, "
            "which may be fetched from there"
        )
    click.echo("\n".join(map(terminal.printable, lines)))
    _print_candidates(decision)
    after: list[str] = []
    if decision.get("left_out"):
        after.append(f"  and {decision['left_out']} candidates that cost more")
    after += [f"  not     {instance}: {why}" for instance, why in decision["excluded"].items()]
    if decision.get("excluded_left_out"):
        after.append(f"  and {decision['excluded_left_out']} others could not")
    after += [f"  trial   {_trial(shadow, chosen)}" for shadow in decision["shadows"]]
    after.append(f"  after   {_outcome(decision)}")
    click.echo("\n".join(map(terminal.printable, after)))


def _print_candidates(decision: Mapping[str, Any]) -> None:
    columns = (
        "CANDIDATE",
        "COST",
        "DEVICE",
        "HOST",
        "DISK",
        "EXTERNAL",
        "GUESSED",
        "PEER",
        "PREFILL",
        "BLOCKS",
        "ADDED",
        "REQUESTS",
    )
    has_hops = any(one.get("hop_ms") for one in decision["candidates"])
    chosen = _name(decision["chosen"])
    terminal.print_table(
        (*columns, "HOP") if has_hops else columns,
        [
            (
                terminal.plain(("> " if _name(one) == chosen else "  ") + _name(one)),
                "never" if one["cost"] is None else f"{one['cost']:.4g}",
                *(str(one["overlap"][tier]) for tier in ("device", "host", "disk", "external")),
                str(one["predicted_blocks"]),
                str(one.get("peer_blocks", 0)),
                str(one["active_prefill_tokens"]),
                f"{one['active_blocks']:g}",
                str(one["added_blocks"]),
                str(one["active_requests"]),
                *([f"{one.get('hop_ms', 0.0):.3g}"] if has_hops else []),
            )
            for one in decision["candidates"]
        ],
    )


def _trial(shadow: Mapping[str, Any], decided: Mapping[str, Any]) -> str:
    if shadow["error"]:
        return f"{shadow['policy']} raised {shadow['error']}"
    chosen = "none" if shadow["chosen"] is None else _name(shadow["chosen"])
    if shadow["chosen"] == decided:
        return f"{shadow['policy']} would have chosen the same"
    regret = "never" if shadow["regret"] is None else f"{shadow['regret']:.4g} more"
    return f"{shadow['policy']} would have chosen {chosen}; to it, what was chosen costs {regret}"


def _outcome(decision: Mapping[str, Any]) -> str:
    outcome = decision["outcome"]
    parts: list[str] = []
    if outcome["first_item_s"] is not None:
        parts.append(f"first item after {outcome['first_item_s']:.3f} s")
    if outcome["reused_tokens"] is not None:
        less = decision["expected_reuse"] - outcome["reused_tokens"]
        compared = f"{abs(less)} {'fewer' if less > 0 else 'more'} than" if less else "as"
        parts.append(f"{outcome['reused_tokens']} tokens reused, {compared} expected")
    if outcome["ended_s"] is None:
        parts.append("it still runs")
    else:
        how = f" with {outcome['error']}" if outcome["error"] else ""
        parts.append(f"ended{how} after {outcome['ended_s']:.3f} s")
    return ", ".join(parts)


def _name(rank: Mapping[str, Any]) -> str:
    return f"{rank['instance']}/{rank['dp_rank']}"
