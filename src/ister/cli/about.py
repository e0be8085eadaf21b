"""`ister status`, `ister version`, `ister help COMMAND`."""

from __future__ import annotations

from typing import Annotated, Final

from ister import __version__
from ister.cli.command import Arg, Facts, Shown, Table, command, register_command
from ister.cli.connection import Broker

_LAG_SHOWN: Final = 10


@command(None, "status", failed={"ok": False})
def status(broker: Broker) -> Shown:
    """Show the brokers, and what is blocked or far behind.

    Shows the running brokers, the number of topics, and the subscriptions that are blocked or
    furthest behind. Exit code 1 if one is blocked, or if a topic has errors.

    Examples:
        ister status
        ister status --broker 10.0.0.7:6650 --json
    """
    with broker.connect() as client:
        brokers, topics = client.admin.brokers(), client.admin.list_topics()
    rows = [
        (view["topic"], one["name"], one["lag"] or 0, one["blocked_reason"])
        for view in topics
        for one in view["subscriptions"]
    ]
    rows.sort(key=lambda row: (row[3] is None, -row[2], row[:2]))
    blocked = sum(row[3] is not None for row in rows)
    failing = [view["topic"] for view in topics if view["errors"]]
    is_ok = not failing and not blocked
    facts: dict[str, object] = {
        "broker": broker.address,
        "brokers": ", ".join(f"{one['node']} ({one.get('state')})" for one in brokers),
        "version": ", ".join(sorted({str(one.get("version")) for one in brokers})),
        "topics": len(topics),
        "subscriptions": len(rows),
        "blocked": blocked,
    }
    if failing:
        facts["topics with errors"] = ", ".join(failing)
    names = ("topic", "subscription", "lag", "blocked_by")
    behind = [row for row in rows if row[2] or row[3]][:_LAG_SHOWN]
    table = Table([name.replace("_", " ") for name in names], behind)
    json = {
        "ok": is_ok,
        "broker": broker.address,
        "brokers": brokers,
        "topics": len(topics),
        "failing_topics": failing,
        "subscriptions": [dict(zip(names, row, strict=True)) for row in rows],
    }
    return Shown(json, [Facts(facts), "", table] if behind else Facts(facts), is_ok)


@command(None, "version")
def version() -> Shown:
    """Print the version.

    Examples:
        ister version
    """
    return Shown({"version": __version__}, f"ister {__version__}")


@command(None, "help", json="")
def show_help(words: Annotated[list[str], Arg("command, such as topics create", "COMMAND")]) -> int:
    """Show the help of a command.

    Examples:
        ister help topics create
    """
    from ister.cli.main import make_parser  # noqa: PLC0415 - which is made of modules like this

    make_parser(only=words[0] if words else "").parse_args([*words, "--help"])
    return 0


COMMANDS: Final = {
    "status": register_command(status),
    "version": register_command(version),
    "help": register_command(show_help),
}
"""What registers each of the commands."""
