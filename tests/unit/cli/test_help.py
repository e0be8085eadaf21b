"""Help of every command: what it is for, what it takes, and examples that work."""

import argparse
import re
import shlex

import pytest

from ister.cli.main import main, make_parser
from ister.cli.parser import Parser, walk_commands

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


def test_there_are_the_commands_of_the_design():
    assert set(PARSER.commands) >= {
        *("serve", "produce", "consume", "topics", "subscriptions", "brokers", "inspect"),
        *("repair", "recover", "pipeline", "bench", "demo", "auth", "config", "completion"),
    }


def test_every_command_is_in_a_group_of_the_help():
    grouped = [name for names in PARSER.groups.values() for name in names]
    assert sorted(grouped) == sorted(PARSER.commands)
    assert "others:" not in PARSER.format_help()


@pytest.mark.parametrize("prog", COMMANDS)
def test_command_says_what_it_is_for(prog):
    command = COMMANDS[prog]
    assert isinstance(command, Parser)
    assert command.description
    assert command.description[0].isupper()
    assert command.description.endswith(".")
    for name in command.commands:
        summary = command.summary(name)
        assert summary, f"{prog} {name}"
        assert not summary.endswith("."), f"{prog} {name}: one line, no sentence"
        assert len(summary) <= 110


@pytest.mark.parametrize("prog", COMMANDS)
def test_every_argument_is_explained(prog):
    for action in COMMANDS[prog].arguments:
        name = "/".join(action.option_strings) or action.dest
        assert action.help, f"{prog} {name}"
        takes_none = action.nargs == 0 or action.choices is not None
        assert takes_none or action.metavar, f"{prog} {name}: what is its value called?"


@pytest.mark.parametrize("prog", COMMANDS)
def test_command_has_examples_which_parse(prog, capsys):
    lines = examples_of(COMMANDS[prog])
    assert lines, f"{prog} has no example"
    calls = [call for line in lines for call in calls_in(line)]
    own = prog.split()[1:]
    assert any(call[: len(own)] == own for call in calls), f"no example calls `{prog}`"
    for call in calls:
        try:
            options = PARSER.parse_args(call)
        except SystemExit:
            pytest.fail(f"ister {shlex.join(call)}\n{capsys.readouterr().err}")
        assert callable(options.run)


@pytest.mark.parametrize("prog", COMMANDS)
def test_help_fits_into_eighty_columns_but_for_examples(prog, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = COMMANDS[prog]
    text = command.format_help()
    own = set((command.epilog or "").splitlines())
    for line in text.splitlines():
        assert len(line) <= 80 or line in own, line


@pytest.mark.parametrize("prog", [prog for prog in COMMANDS if prog.count(" ")])
def test_commands_that_print_take_json(prog):
    """Goal: programs can use every command; groups, scripts and streams of text aside."""
    command = COMMANDS[prog]
    if command.commands:
        return
    names = {name for action in command.arguments for name in action.option_strings}
    assert "--json" in names or prog in ("ister completion",), prog


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


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["sreve"], "unknown command 'ister sreve'", "did you mean 'serve'?"),
        (["pipelin"], "unknown command 'ister pipelin'", "did you mean 'pipeline'?"),
        (["inspect", "wall"], "unknown command 'ister inspect wall'", "did you mean 'wal'?"),
        (["serve", "--prot", "1"], "unknown option --prot", "did you mean '--port'?"),
        (["serve", "--prot=1"], "unknown option --prot", "did you mean '--port'?"),
        (["--verson"], "unknown option --verson", "did you mean '--version'?"),
        (
            ["pipeline", "compact", "--format", "parkett"],
            "--format: 'parkett' is none of dnb1, parquet",
            "did you mean 'parquet'?",
        ),
        (["zzz"], "unknown command 'ister zzz'", "known: serve, demo, produce"),
        (["serve", "--zzz"], "unknown option --zzz", "`ister serve --help` shows"),
        (["inspect", "wal", "a", "b"], "unexpected argument 'b'", "`ister inspect wal --help`"),
        (["inspect", "wal"], "the following arguments are required: PATH", "--help` shows"),
    ],
)
def test_wrong_usage_is_answered_with_what_was_meant(arguments, message, hint, capsys):
    error = refusal(arguments, capsys)
    assert re.search(r"^usage: ister", error)
    assert f"ister: {message}" in error
    assert hint in error


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["config"], ["pipeline"]])
def test_command_without_its_sub_command_shows_its_help(arguments, capsys):
    error = refusal(arguments, capsys)
    parser = COMMANDS[" ".join(["ister", *arguments])]
    assert error == parser.format_help()


def test_hidden_options_stay_hidden():
    hidden = [
        action
        for command in COMMANDS.values()
        for action in command.arguments
        if action.help is argparse.SUPPRESS
    ]
    for action in hidden:
        assert action.option_strings[0] not in COMMANDS["ister pipeline run"].format_help()


@pytest.mark.parametrize("prog", COMMANDS)
def test_every_command_finds_its_broker_in_the_same_way(prog):
    """Goal: no command acts on another broker than the one of --broker and ISTER_BROKER."""
    parser = COMMANDS[prog]
    flags = {flag for action in parser.arguments for flag in action.option_strings}
    # Jobs take a broker's Flight address, where they read messages and change nothing.
    if "--broker" not in flags or prog.startswith("ister pipeline"):
        return
    assert {"--token", "--tls", "--ca-file", "--cert-file", "--key-file", "--retry-for"} <= flags
    assert parser.get_default("broker") is None
    assert parser.get_default("answer_within") is not None
