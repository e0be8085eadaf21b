"""Freed buffers are kept, in a process that asks for it."""

import platform
import resource
import subprocess
import sys

import pytest

_ROUNDS = 50
_BUFFER_BYTES = 1 << 20
_PROGRAM = f"""
import resource, sys
from ister.base.allocator import keep_freed_buffers

if sys.argv[1] == "keep":
    keep_freed_buffers()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

bytearray(b"x") * {_BUFFER_BYTES}
before = faults()
for _ in range({_ROUNDS}):
    # Two, so that the system is asked for more than it has just been given.
    one, two = bytearray(b"x") * {_BUFFER_BYTES}, bytearray(b"x") * {_BUFFER_BYTES}
    del one, two
print(faults() - before)
"""


def faults(how):
    """How many pages the system gave a process that went from buffer to buffer."""
    command = [sys.executable, "-c", _PROGRAM, how]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(ended.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for that")
def test_buffers_are_made_of_memory_that_was_freed():
    pages = _ROUNDS * _BUFFER_BYTES // resource.getpagesize()
    assert faults("leave") > pages
    assert faults("keep") < pages // 4
