"""Pages of documents as lists of steps: what a reader types, and what tests have to know besides.

A fenced block is a step. What readers need not see stands in HTML comments in front of one:

    <!-- docs-test: setup: COMMAND -->        run this first, in the page's shell
    <!-- docs-test: python: CODE -->          run this first, in the page's interpreter
    <!-- docs-test: background -->            the block goes on running until the page ends
    <!-- docs-test: stop -->                  end what runs in the background (as Ctrl-C does)
    <!-- docs-test: kill -->                  the same with SIGKILL
    <!-- docs-test: file=ister.yml -->        the block is a file of this name
    <!-- docs-test: output: TEXT -->          the block prints this
    <!-- docs-test: expect-failure -->        the block fails, on purpose
    <!-- docs-test: in=checkout -->           the block is run in the project's own directory
    <!-- docs-test: needs=java -->            left out, and counted, where that is missing
    <!-- docs-test: server=s3 -->             a server (s3, etcd, spark) that the page talks to
    <!-- docs-test: covered-by=FILE -->       that test runs the scripts that the block names

Words may be combined (`background needs=java`); a page's servers run until its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELL = frozenset({"sh", "bash", "console"})
PYTHON = frozenset({"python", "py"})

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[^\s`]*)[^`]*$")
_COMMENT = re.compile(r"<!--\s*docs-test:\s*(?P<text>.*?)\s*-->", re.DOTALL)
_TEXTS = ("setup", "python", "output")
_FLAGS = frozenset({"background", "stop", "kill", "expect-failure"})
_SETTINGS = frozenset({"file", "in", "needs", "server", "covered-by"})


@dataclass(frozen=True, kw_only=True)
class Directive:
    """A comment for tests."""

    line: int
    texts: tuple[tuple[str, str], ...] = ()
    flags: frozenset[str] = frozenset()
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block, and the comments right in front of it."""

    line: int
    language: str
    text: str
    directives: tuple[Directive, ...] = ()

    def has(self, flag: str) -> bool:
        return any(flag in directive.flags for directive in self.directives)

    def setting(self, name: str) -> str | None:
        found = [one.settings[name] for one in self.directives if name in one.settings]
        return found[-1] if found else None

    def outputs(self) -> list[str]:
        """What the block has to print."""
        return [text for one in self.directives for name, text in one.texts if name == "output"]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A document."""

    path: Path
    blocks: tuple[Block, ...]
    trailing: tuple[Directive, ...] = ()

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    def runs(self) -> list[Block]:
        """The blocks that somebody runs, or that are files for those."""
        return [
            block
            for block in self.blocks
            if block.language in SHELL | PYTHON or block.setting("file") is not None
        ]


def find_pages() -> list[Path]:
    """Every document whose blocks are run."""
    named = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
    return [path for path in named if path.exists()] + sorted((ROOT / "docs").rglob("*.md"))


def read_page(path: Path) -> Page:
    """Takes a page apart.

    Raises:
        ValueError: A fence is not closed, or a comment for tests cannot be understood.
    """
    lines = path.read_text().splitlines()
    blocks: list[Block] = []
    waiting: list[Directive] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        if fence := _FENCE.match(line):
            end = _end_of(lines, number, fence["fence"], path)
            indent = len(fence["indent"])
            text = "\n".join(one[indent:] for one in lines[number + 1 : end]) + "\n"
            blocks.append(
                Block(
                    line=number + 1,
                    language=fence["language"],
                    text=text,
                    directives=tuple(waiting),
                )
            )
            waiting = []
            number = end + 1
        elif line.lstrip().startswith("<!-- docs-test:"):
            end = number
            while "-->" not in lines[end]:
                end += 1
                if end == len(lines):
                    raise ValueError(f"{path}:{number + 1}: the comment does not end")
            comment = _COMMENT.search("\n".join(lines[number : end + 1]))
            if comment is None:
                raise ValueError(f"{path}:{number + 1}: no comment that tests understand")
            waiting.append(_directive(comment["text"], number + 1, path))
            number = end + 1
        else:
            number += 1
    return Page(path=path, blocks=tuple(blocks), trailing=tuple(waiting))


def _end_of(lines: list[str], begin: int, fence: str, path: Path) -> int:
    for number in range(begin + 1, len(lines)):
        text = lines[number].strip()
        if text.startswith(fence) and not text.strip(fence[0]):
            return number
    raise ValueError(f"{path}:{begin + 1}: the block does not end")


def _directive(text: str, line: int, path: Path) -> Directive:
    for name in _TEXTS:
        if text.startswith(f"{name}:"):
            value = text.removeprefix(f"{name}:").strip("\n")
            return Directive(line=line, texts=((name, value.strip()),))
    flags, settings = set(), {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if equals and key in _SETTINGS:
            settings[key] = value
        elif not equals and word in _FLAGS:
            flags.add(word)
        else:
            raise ValueError(f"{path}:{line}: tests do not know {word!r}")
    return Directive(line=line, flags=frozenset(flags), settings=settings)
