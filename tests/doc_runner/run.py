"""Runs one page: its blocks in order, in one shell and one interpreter, in a directory of its own.

    python -m tests.doc_runner docs/start.md

A page that passes says what it ran; one that does not says which block failed and what it printed.
Whatever it starts is ended with it, by process group.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.doc_runner import shims
from tests.doc_runner.interpreter import ask
from tests.doc_runner.pages import PYTHON, ROOT, SHELL, Block, Directive, Page, read_page

BLOCK_SECONDS = 300.0
_READY_SECONDS = 60.0
_PAUSE_SECONDS = 0.05

# One block after the other is named on file 3 and run in the same shell. `set -e` ends the shell
# at the first command that fails, which is what closes file 4 early.
_DRIVER = """
set -e -o pipefail
while IFS= read -r block <&3; do
    case "$block" in
    fails:*)
        block="${block#fails:}"
        set +e
        (set -e; . "$block" </dev/null >"$block.out" 2>&1 3<&- 4>&-)
        code=$?
        set -e
        ;;
    checkout:*)
        block="${block#checkout:}"
        set +e
        (set -e; cd "$DOCS_ROOT"; . "$block" </dev/null >"$block.out" 2>&1 3<&- 4>&-)
        code=$?
        set -e
        ;;
    *)
        exec 5>&1 6>&2 >"$block.out" 2>&1
        . "$block" </dev/null
        exec >&5 2>&6 5>&- 6>&-
        code=0
        ;;
    esac
    echo "$code" >&4
done
"""


@dataclass
class Outcome:
    """What became of a page."""

    page: str
    ran: int = 0
    commands: int = 0
    checked: list[list[str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    failure: str | None = None
    seconds: float = 0.0


class BlockError(Exception):
    """A block did not do what the page says."""


class _Shell:
    """The page's shell."""

    def __init__(self, directory: Path, work: Path, environment: dict[str, str]) -> None:
        self._directory = directory
        orders, self._orders = os.pipe()
        self._codes, codes = os.pipe()
        # Files 3 and 4 of the shell; beyond the numbers of a shell's own until they are.
        orders, codes = _moved(orders), _moved(codes)
        script = f"exec 3<&{orders} 4>&{codes} {orders}<&- {codes}>&-\n{_DRIVER}"
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-c", script],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(orders, codes),
            start_new_session=True,
        )
        os.close(orders)
        os.close(codes)
        self._answers = os.fdopen(self._codes, "r")
        self._count = 0

    def run(self, text: str, *, fails: bool = False, in_checkout: bool = False) -> str:
        self._count += 1
        path = self._directory / f"block-{self._count}.sh"
        path.write_text(text)
        kind = "fails:" if fails else "checkout:" if in_checkout else ""
        os.write(self._orders, f"{kind}{path}\n".encode())
        with _alarm(BLOCK_SECONDS):
            answer = self._answers.readline().strip()
        output = _read(Path(f"{path}.out"))
        if fails and answer == "0":
            raise BlockError(f"it was to fail, and did not; it printed\n{output}")
        if not fails and answer != "0":
            raise BlockError(f"it failed ({answer or 'the shell ended'}); it printed\n{output}")
        return output

    def end(self) -> None:
        os.close(self._orders)
        _end_group(self._process)
        self._answers.close()


def _moved(file: int) -> int:
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(file)
    return moved


class _Background:
    """A block that goes on while others run."""

    def __init__(
        self, text: str, directory: Path, work: Path, environment: dict[str, str], number: int
    ) -> None:
        self._log = directory / f"background-{number}.out"
        script = directory / f"background-{number}.sh"
        script.write_text(f"set -e\n{text}")
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "--noprofile", "--norc", str(script)],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait(text)

    def output(self) -> str:
        return _read(self._log)

    def _wait(self, text: str) -> None:
        """Until a broker answers on its port; anything else is given a moment to fail."""
        is_broker = re.search(r"\bister (serve|up)\b", text) is not None
        port = re.search(r"--port[ =](\d+)", text)
        deadline = time.monotonic() + (_READY_SECONDS if is_broker else 1.0)
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BlockError(f"it ended by itself; it printed\n{self.output()}")
            if is_broker and "ready" in self.output().lower():
                with contextlib.suppress(OSError):
                    number = int(port.group(1)) if port else 6650
                    socket.create_connection(("127.0.0.1", number), timeout=1).close()
                    return
            time.sleep(_PAUSE_SECONDS)
        if is_broker:
            raise BlockError(f"it does not answer; it printed\n{self.output()}")

    def end(self, *, is_killed: bool = False) -> None:
        _end_group(self._process, is_killed=is_killed)


def _end_group(process: subprocess.Popen[bytes], *, is_killed: bool = False) -> None:
    """In order, as a reader does, and after a while by force."""
    steps = ((signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0))
    for number, seconds in steps[1:] if is_killed else steps:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            process.poll()
            if not _has_group(process.pid):
                return
            time.sleep(_PAUSE_SECONDS)
    process.wait(timeout=60)


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise BlockError(f"it takes longer than {seconds:.0f} s")

    kept = signal.signal(signal.SIGALRM, stop)
    began = time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # The test's own time limit uses the same timer, and goes on.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.001))


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def start_interpreter(path: str, enter: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """An interpreter that listens on a socket."""
    # It is killed in the end: what it leaves, Spark's files above all, goes with the socket.
    temporary = Path(path).with_name("tmp")
    temporary.mkdir(exist_ok=True)
    environment = {
        **_plain_environment(),
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TMPDIR": str(temporary),
    }
    process = subprocess.Popen(
        [*enter, sys.executable, "-u", "-m", "tests.doc_runner.interpreter", path],
        env=environment,
        # It ends when this pipe does, and so with this process, however that ends.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError("the interpreter does not start")
    return process


def _plain_environment() -> dict[str, str]:
    """What a reader's shell has, without what tests and agents of this machine have put there."""
    kept = ("PATH", "LANG", "LC_ALL", "JAVA_HOME", "TMPDIR", "TERM", "USER")
    return {name: os.environ[name] for name in kept if name in os.environ}


class _Run:
    """One page on its way."""

    def __init__(
        self, page: Page, shared: str | None, directory: Path, work: Path, *, is_next: bool
    ) -> None:
        self.page = page
        self.outcome = Outcome(page=page.name)
        self._directory = directory
        self._work = work
        self._stack = contextlib.ExitStack()
        self._background: list[_Background] = []
        self._socket = shared if shared is not None and _uses_spark(page) else None
        self._has_own = False
        if not is_next:
            _empty(work)
        real = Path(sys.executable).parent
        shims.install(directory / "shims", real)
        (directory / "checked").touch()
        (directory / "tmp").mkdir()
        self._environment = _plain_environment() | {
            "PATH": f"{directory / 'shims'}:{real}:{os.environ['PATH']}",
            "HOME": str(work),
            "TMPDIR": str(directory / "tmp"),
            "DOCS_ROOT": str(ROOT),
            "DOCS_CHECKED": str(directory / "checked"),
            "DOCS_INTERPRETER": shared or str(directory / "interpreter"),
            "PYTHONUNBUFFERED": "1",
        }

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *exception: object) -> None:
        for one in self._background:
            one.end()
        self._stack.close()

    def run(self) -> None:
        began = time.monotonic()
        # A page that shows commands of the project itself stands in its directory.
        for name in ("deploy", "examples", "pyproject.toml"):
            if (ROOT / name).exists() and not (self._work / name).is_symlink():
                (self._work / name).symlink_to(ROOT / name)
        # Servers first: their addresses are in the environment of everything else.
        for block in self.page.blocks:
            for directive in block.directives:
                if server := directive.settings.get("server"):
                    self._serve(server)
        shell = _Shell(self._directory, self._work, self._environment)
        self._stack.callback(shell.end)
        for block in self.page.blocks:
            where = f"{self.page.name}:{block.line}"
            try:
                self._prepare(shell, block.directives)
                if block.language in SHELL | PYTHON or block.setting("file") is not None:
                    self._step(shell, block)
            except BlockError as failure:
                shown = "".join(f"    {line}\n" for line in block.text.splitlines())
                noise = "".join(
                    f"\n-- in the background:\n{one.output()[-3000:]}" for one in self._background
                )
                self.outcome.failure = f"{where}: {failure}\n-- the block:\n{shown}{noise}"
                break
        else:
            self._prepare(shell, self.page.trailing)
        notes = (self._directory / "checked").read_text().splitlines()
        self.outcome.checked = [json.loads(line) for line in notes]
        self.outcome.seconds = round(time.monotonic() - began, 2)

    def _serve(self, name: str) -> None:
        """Starts a server; what documents call it is in the environment."""
        if name == "s3":
            from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, rclone_server  # noqa: PLC0415

            server = self._stack.enter_context(rclone_server())
            self._environment |= {
                "S3_ENDPOINT": server.endpoint,
                "S3_BUCKET": BUCKET,
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            }
        elif name == "etcd":
            from tests.servers.etcd import EtcdServer  # noqa: PLC0415 - heavy

            etcd = self._stack.enter_context(EtcdServer())
            self._environment["ETCD_ENDPOINT"] = etcd.endpoint.removeprefix("http://")
        else:
            raise BlockError(f"there is no server {name!r}")

    def _prepare(self, shell: _Shell, directives: tuple[Directive, ...]) -> None:
        """What readers do not see, in its order."""
        for directive in directives:
            if directive.flags & {"stop", "kill"}:
                for one in self._background:
                    one.end(is_killed="kill" in directive.flags)
                self._background.clear()
            for name, text in directive.texts:
                if name == "setup":
                    shell.run(text + "\n")
                elif name == "python":
                    self._python(text, directive.line)

    def _step(self, shell: _Shell, block: Block) -> None:
        if missing := _missing(block.setting("needs")):
            self.outcome.skipped.append(f"{self.page.name}:{block.line} needs {missing}")
            return
        if name := block.setting("file"):
            path = self._work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            self.outcome.ran += 1
            return
        if test := block.setting("covered-by"):
            _check_covered(block, test)
            self.outcome.elsewhere.append(f"{self.page.name}:{block.line} by {test}")
            return
        text = _commands(block)
        if block.language in PYTHON:
            output = self._python(text, block.line)
        elif block.has("background"):
            number = len(list(self._directory.glob("background-*.sh")))
            self._background.append(
                _Background(text, self._directory, self._work, self._environment, number)
            )
            output = self._background[-1].output()
        else:
            in_checkout = block.setting("in") == "checkout"
            output = shell.run(text, fails=block.has("expect-failure"), in_checkout=in_checkout)
        for wanted in block.outputs():
            if wanted not in output:
                raise BlockError(f"it does not print {wanted!r}, but\n{output}")
        self.outcome.ran += 1
        self.outcome.commands += _count_commands(text) if block.language in SHELL else 0
        if os.environ.get("DOCS_SHOW"):
            print(f"--- {self.page.name}:{block.line}\n{text}---\n{output}", flush=True)

    def _python(self, code: str, line: int) -> str:
        if self._socket is None:
            self._socket = str(self._directory / "interpreter")
            process = start_interpreter(self._socket)
            self._stack.callback(end_interpreter, process)
        path = self._directory / f"python-{line}.out"
        request = {
            "kind": "python",
            "page": str(self._directory),
            "line": line,
            "code": code,
            "directory": str(self._work),
            "environment": {
                name: value
                for name, value in self._environment.items()
                if name.startswith(("S3_", "AWS_", "ETCD_"))
            },
        }
        with path.open("wb") as output, open(os.devnull, "rb") as nothing, _alarm(BLOCK_SECONDS):
            files = [nothing.fileno(), output.fileno(), output.fileno()]
            code_ = ask(self._socket, request, files, BLOCK_SECONDS)
        if code_ != 0:
            raise BlockError(f"it raised; it printed\n{_read(path)}")
        return _read(path)


def end_interpreter(process: subprocess.Popen[str]) -> None:
    """Ends it, and Spark with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.close()
    process.stdin.close()


def _uses_spark(page: Page) -> bool:
    return any(
        block.language in PYTHON and ("pyspark" in block.text or "spark." in block.text)
        for block in page.blocks
    )


def _missing(needs: str | None) -> str | None:
    """Which of the programs that a block needs is not here."""
    for name in (needs or "").split(","):
        if name and shutil.which(name) is None:
            return name
    return None


def _commands(block: Block) -> str:
    """What is typed: of a `console` block the lines behind a prompt."""
    if block.language != "console":
        return block.text
    lines = block.text.splitlines(keepends=True)
    return "".join(line.removeprefix("$ ") for line in lines if line.startswith("$ "))


def _count_commands(text: str) -> int:
    lines = [line.strip() for line in text.splitlines()]
    return sum(1 for line in lines if line and not line.startswith("#"))


def _check_covered(block: Block, test: str) -> None:
    """The test that is said to run a script names it."""
    path = ROOT / test
    if not path.exists():
        raise BlockError(f"there is no test {test}")
    for script in re.findall(r"(?:examples/)?([\w/]+\.py)", block.text):
        if script not in path.read_text():
            raise BlockError(f"{test} does not name {script}")


def run_page(path: Path, shared: str | None = None, *, is_next: bool = False) -> Outcome:
    """Runs a page in this process's network.

    Args:
        path: The page.
        shared: The socket of an interpreter that has, or may start, Spark. Pages are then run in
            the directory beside it, one after the other: a JVM cannot change its directory.
        is_next: Whether it finds there what the page before it has left, as a reader does who goes
            on. For pages with a shared interpreter.
    """
    page = read_page(path)
    if not page.runs():
        return Outcome(page=page.name)
    with tempfile.TemporaryDirectory(prefix="ister-docs-", ignore_cleanup_errors=True) as directory:
        work = Path(shared).with_name("work") if shared else Path(directory, "work")
        work.mkdir(exist_ok=True)
        with _Run(page, shared, Path(directory), work, is_next=is_next) as run:
            run.run()
        return run.outcome


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="doc_runner")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--interpreter", help="the socket of a shared interpreter")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--together", action="store_true", help="each page goes on where the one before it ended"
    )
    options = parser.parse_args()
    # Whoever ends this process ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    code = 0
    with contextlib.ExitStack() as stack:
        shared = options.interpreter
        if shared is None:
            directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ister-docs-", ignore_cleanup_errors=True)
            )
            shared = f"{directory}/interpreter"
            process = start_interpreter(shared)
            stack.callback(end_interpreter, process)
        for number, path in enumerate(options.pages):
            is_next = options.together and number > 0
            outcome = run_page(path.resolve(), shared, is_next=is_next)
            print(json.dumps(asdict(outcome)) if options.json else _say(outcome), flush=True)
            code = code or (1 if outcome.failure else 0)
    return code


def _say(outcome: Outcome) -> str:
    if outcome.failure:
        return f"FAILED {outcome.failure}"
    return (
        f"ok     {outcome.page}: {outcome.ran} blocks, {outcome.commands} commands, "
        f"{len(outcome.checked)} only checked, {len(outcome.skipped)} left out, "
        f"{len(outcome.elsewhere)} elsewhere, {outcome.seconds} s"
    )
