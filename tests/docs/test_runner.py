"""The runner of documents notices what it is there to notice."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.doc_runner import pages
from tests.doc_runner.pages import read_page
from tests.doc_runner.run import run_page


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)

    def run(text: str):
        path = tmp_path / "page.md"
        path.write_text(textwrap.dedent(text))
        return run_page(path)

    return run


def test_blocks_share_a_shell_a_directory_and_an_interpreter(run):
    outcome = run(
        """
        ```sh
        word=seven
        echo 7 > number
        ```
        ```python
        number = int(open("number").read())
        ```
        ```python
        assert number == 7
        ```
        <!-- docs-test: output: seven 7 -->
        ```console
        $ echo $word $(cat number)
        seven 7
        ```
        """
    )
    assert outcome.failure is None
    assert outcome.ran == 4


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("```sh\nfalse\necho not here\n```", "it failed"),
        ("```sh\nfalse | true\n```", "it failed"),
        ("```sh\nister no-such-command\n```", "it failed"),
        ("<!-- docs-test: output: yes -->\n```sh\necho no\n```", "it does not print"),
        ("<!-- docs-test: expect-failure -->\n```sh\ntrue\n```", "it was to fail"),
        ("<!-- docs-test: background -->\n```sh\nexit 3\n```", "it ended by itself"),
        ("<!-- docs-test: setup: false -->\n```sh\ntrue\n```", "it failed"),
        ("```python\nraise ValueError('seen')\n```", "seen"),
        ("```python\nassert await_nothing\n```", "NameError"),
        ("```sh\npip install '.[nothing]'\n```", "no extra nothing"),
        ("```sh\npip install ister\n```", "nothing else has been published"),
        ("```sh\nuv pip install '.[nothing]'\n```", "no extra nothing"),
        ("```sh\nuv nothing\n```", "uv nothing"),
        ("```sh\nmake nothing\n```", "no target nothing"),
        ("```sh\ndocker compose -f nothing.yml up\n```", "no file nothing.yml"),
        ("```sh\nkubectl apply -f nothing.yml\n```", "no file nothing.yml"),
        ("```sh\nsystemctl start nothing\n```", "no unit nothing.service"),
    ],
)
def test_block_that_does_not_do_what_the_page_says_fails_it(run, block, says):
    outcome = run(f"{block}\n")
    assert outcome.failure is not None
    assert says in outcome.failure


def test_what_is_only_checked_is_counted(run):
    outcome = run("```sh\npip install '.[broker,client]'\nmake test\npython3 -m venv .venv\n```\n")
    assert outcome.failure is None
    assert [command[0] for command in outcome.checked] == ["pip", "make", "venv"]


def test_block_that_needs_a_missing_program_is_left_out_and_counted(run):
    outcome = run("<!-- docs-test: needs=no-such-program -->\n```sh\nfalse\n```\n")
    assert outcome.failure is None
    assert outcome.ran == 0
    assert outcome.skipped == ["page.md:2 needs no-such-program"]


@pytest.mark.nightly
def test_background_is_ended_with_its_page(run):
    outcome = run(
        """
        <!-- docs-test: background -->
        ```sh
        sleep 987.6 & sleep 987.6
        ```
        ```sh
        sleep 987.7 &
        ```
        """
    )
    assert outcome.failure is None
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            running.append((process / "cmdline").read_bytes())
        except OSError:
            continue  # it has ended meanwhile
    assert not [one for one in running if b"987." in one]


@pytest.mark.parametrize(
    "text", ["```sh\ntrue\n", "<!-- docs-test: nonsense -->\n", "<!-- docs-test: setup: x\n"]
)
def test_page_that_cannot_be_understood_is_refused(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md:1"):
        read_page(path)
