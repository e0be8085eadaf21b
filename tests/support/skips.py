"""Which tests may be skipped in CI, and why.

A skip is quiet: if a library were missing, hundreds of tests would vanish and the run be green. So
`.ci/run` sets ISTER_STRICT_SKIPS, and a skip whose reason is not listed here fails the run.
Elsewhere, where tools and rights may be missing, every skip is only shown with its reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

IS_STRICT = os.environ.get("ISTER_STRICT_SKIPS") == "1"

# reason (a regular expression for all of it): why it may stay
LISTED = {
    "this Spark (has filter pushdown|runs several batches|asks with a start)": (
        "what another version of Spark does; each test runs on the versions that it is about"
    ),
    "this store has no copies": "an optional operation of object stores",
    "needs nginx": "an example of deploy/, for a program that is not on every machine",
    "(promtool|docker compose|hadolint|systemd|kubectl) is not installed.*": (
        "checks files of deploy/ with tools that are not on every machine"
    ),
}


def unlisted(reports: Iterable[Any]) -> list[str]:
    """The skips among reports of tests whose reasons are not listed: test and reason."""
    found = []
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        # Without the note of `support.cases` that names the case.
        reason = reason.removeprefix("Skipped: ").partition("\ncase: ")[0]
        if not any(re.fullmatch(pattern, reason) for pattern in LISTED):
            found.append(f"{report.nodeid}: {reason}")
    return found
