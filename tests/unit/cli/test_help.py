"""Help of every command: what it is for, what it takes, and examples that work."""

import argparse
import re
import shlex

import pytest

from ister.cli.main import main, make_parser
from ister.cli.parser import Parser, walk_commands
from tests.support.cases import each

PARSER = make_parser()
COMMANDS = {command.prog: command for command in walk_commands(PARSER)}
ENDS = frozenset({"|", "||", "&&", ";", "&"})
REDIRECTIONS = frozenset({"<", ">", ">>", "2>"})


def examples_of(command):
    """The command lines below "examples:", each in one piece."""
    _, found, text = (command.epilog or "").partition("examples:\n")
    if not found:
        return []
    text = text.replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.startswith("  ")]


def calls_in(line):
    """The arguments of each call of `ister` in a command line of a shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    calls, words, skip = [], [], False
    for word in [*lexer, ";"]:
        if skip:
            skip = False
        elif word in REDIRECTIONS:
            skip = True
        elif word in ENDS:
            if words and words[0] == "ister":
                calls.append(words[1:])
            words = []
        else:
            words.append(word)
    return calls


def test_every_command_is_in_a_group_of_the_help():
    grouped = [name for names in PARSER.groups.values() for name in names]
    assert sorted(grouped) == sorted(PARSER.commands)
    assert "others:" not in PARSER.format_help()


def test_every_command_and_argument_says_what_it_is_for():
    for prog, command in COMMANDS.items():
        assert isinstance(command, Parser), prog
        description = command.description or ""
        assert description[:1].isupper() and description.endswith("."), prog  # noqa: PT018
        for name in command.commands:
            summary = command.summary(name)
            assert summary, f"{prog} {name}"
            assert not summary.endswith("."), f"{prog} {name}: one line, no sentence"
            assert len(summary) <= 110, f"{prog} {name}"
        for action in command.arguments:
            name = "/".join(action.option_strings) or action.dest
            assert action.help, f"{prog} {name}"
            takes_none = action.nargs == 0 or action.choices is not None
            assert takes_none or action.metavar, f"{prog} {name}: what is its value called?"


def test_every_command_has_examples_which_parse(capsys):
    for prog, command in COMMANDS.items():
        calls = [call for line in examples_of(command) for call in calls_in(line)]
        own = prog.split()[1:]
        assert any(call[: len(own)] == own for call in calls), f"no example calls `{prog}`"
        for call in calls:
            try:
                options = PARSER.parse_args(call)
            except SystemExit:
                pytest.fail(f"ister {shlex.join(call)}\n{capsys.readouterr().err}")
            assert callable(options.run), call


def test_commands_that_print_take_json():
    """Goal: programs can use every command; groups and scripts aside."""
    for prog, command in COMMANDS.items():
        if command.commands or prog in ("ister completion", "ister help"):
            continue
        names = {name for action in command.arguments for name in action.option_strings}
        assert "--json" in names, prog


def test_every_command_finds_its_broker_in_the_same_way():
    """Goal: no command acts on another broker than the one of --broker and ISTER_BROKER."""
    common = {
        *("--context", "--token", "--tls", "--ca-file", "--cert-file", "--key-file"),
        *("--server-name", "--retry-for"),
    }
    for prog, parser in COMMANDS.items():
        flags = {flag for action in parser.arguments for flag in action.option_strings}
        # Jobs take a broker's Flight address, where they read messages and change nothing.
        is_other = prog.startswith("ister pipeline") or prog == "ister context add"
        if "--broker" in flags and not is_other:
            assert common <= flags, prog
            assert parser.get_default("broker") is None, prog
            assert parser.get_default("answer_within") is not None, prog


def test_help_of_each_command_ends_with_0(capsys):
    for prog in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([*prog.split()[1:], "--help"])
        assert stop.value.code == 0
        assert f"usage: {prog}" in capsys.readouterr().out


# -- wrong usage ----------------------------------------------------------------------------


def refusal(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_wrong_usage_is_answered_with_what_was_meant(capsys):
    for arguments, message, hint in [
        (["sreve"], "unknown command 'ister sreve'", "did you mean 'serve'?"),
        (["pipelin"], "unknown command 'ister pipelin'", "did you mean 'pipeline'?"),
        (["inspect", "wall"], "unknown command 'ister inspect wall'", "did you mean 'wal'?"),
        (["serve", "--prot", "1"], "unknown option --prot", "did you mean '--port'?"),
        (["serve", "--prot=1"], "unknown option --prot", "did you mean '--port'?"),
        (["--verson"], "unknown option --verson", "did you mean '--version'?"),
        (["health"], "unknown command 'ister health'", "known: up, serve"),
        (["bench"], "unknown command 'ister bench'", "`python -m benchmarks`"),
        (["demo"], "unknown command 'ister demo'", "`make demo`"),
        (["subscriptions", "lag"], "unknown command 'ister subscriptions lag'", "list`, which"),
        (["inspect", "topic"], "unknown command 'ister inspect topic'", "`ister topics describe`"),
        (["consume", "t", "--tail"], "unknown option --tail", "`ister consume --help` shows"),
        (
            ["pipeline", "compact", "--format", "parkett"],
            "--format: 'parkett' is not one of dnb1, parquet",
            "did you mean 'parquet'?",
        ),
        (["zzz"], "unknown command 'ister zzz'", "known: up, serve, produce"),
        (["serve", "--zzz"], "unknown option --zzz", "`ister serve --help` shows"),
        (["inspect", "wal", "a", "b"], "unexpected argument 'b'", "`ister inspect wal --help`"),
        (["inspect", "wal"], "the following arguments are required: PATH", "--help` shows"),
    ]:
        error = refusal(arguments, capsys)
        assert error.startswith(f"ister: {message}"), arguments
        assert hint in error, arguments


def test_command_without_its_sub_command_shows_its_help(capsys):
    for prog, parser in COMMANDS.items():
        if parser.commands:
            assert refusal(prog.split()[1:], capsys) == parser.format_help(), prog


def test_wrong_usage_ends_with_2_and_one_line(capsys):
    for line in """
        nonsense
        inspect nonsense
        inspect wal . --limit -1
        inspect wal . --limit many
        inspect checkpoint
        inspect object
        topics nonsense
        topics describe
        topics describe /orders
        topics describe /default/orders --width 0
        topics list --broker a:1 --data .
        topics list --config a.yml --data .
        topics create /default/orders --partitions -1
        topics create /default/orders --ack nonsense
        topics policies /default/orders --set nonsense
        topics policies /default/orders --set a=1 --reset
        subscriptions seek /default/orders s
        subscriptions seek /default/orders s --to nowhere
        subscriptions policy /default/orders s --poison nonsense
        produce
        produce /orders
        produce orders text --message text
        produce /default/orders --file a --message b
        produce /default/orders --whole --null
        produce /default/orders --attribute nonsense
        produce /default/orders --rate 0
        consume
        consume /default/orders --from yesterday
        consume /default/orders --limit 0
        consume /default/orders --timeout -1
        consume /default/orders --kind nonsense --subscription s
        consume /default/orders --format nonsense
        consume orders --last 3 --from latest
        consume orders --last 3 --subscription s
        recover /orders
        recover --data . --config x.yml
        recover --data
        recover /a/b/c
        serve --port=x
        serve --config=a --data-dir=b
        serve extra
        serve --nonsense
    """.strip().splitlines():
        error = refusal(line.split(), capsys)
        assert re.fullmatch(r"ister: .+; .+\n", error), line


@each("text", ["nan", "inf", "-inf", "1e999", "9" * 5000, "\ud800", "a\0b", "@" + "9" * 19])
def test_no_option_takes_what_is_no_value(text):
    """Goal: hostile values are wrong usage (argparse handles these errors); no number is NaN."""
    taken = []
    for prog, command in COMMANDS.items():
        for action in command._actions:
            try:
                value = action.type(text) if action.type is not None else None
            except (argparse.ArgumentTypeError, TypeError, ValueError):
                continue
            if isinstance(value, float):
                taken.append((prog, action.dest, value))
    assert taken == []
