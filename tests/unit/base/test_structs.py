"""Types that msgspec meets in many threads at once."""

import subprocess
import sys

# msgspec looks at the fields of inner types while it has shared the outer one already.
_PROGRAM = """
import sys, threading
from dataclasses import make_dataclass
import msgspec
from ister.base.structs import known

sys.setswitchinterval(1e-6)
for number in range(30):
    inner = [make_dataclass(f"Inner{number}_{n}", [("value", int, 0)]) for n in range(20)]
    kind = make_dataclass(
        f"Kind{number}", [(f"field_{n}", kind, None) for n, kind in enumerate(inner)]
    )
    gate = threading.Barrier(4)

    def convert():
        gate.wait()
        assert msgspec.convert({"field_19": {"value": 7}}, known(kind)).field_19.value == 7

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_use_a_type_for_the_first_time_do_not_crash():
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=300)
