"""Types that msgspec meets in many threads at once."""

import subprocess
import sys

_PROGRAM = """
import sys, threading
from dataclasses import make_dataclass
import msgspec
from ister.structs import known

sys.setswitchinterval(1e-6)
fields = [(f"field_{n}", "int | str | None", None) for n in range(40)]
for number in range(150):
    kind = make_dataclass(f"Kind{number}", fields)
    gate = threading.Barrier(4)

    def convert():
        gate.wait()
        assert msgspec.convert({"field_0": 7}, known(kind)).field_0 == 7

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_use_a_type_for_the_first_time_do_not_crash():
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=300)
