"""The demo: a small shop on a real broker, from the first order to a table, with proofs.

    shop        what is published, and what it has to add up to
    serving     the broker, a process that can be killed
    etcd        the metadata store of several brokers
    traffic     producers and consumers, and what they saw
    proof       whether anything was lost, doubled or out of order
    lake        the process with Spark: uploads, compaction, SQL, streams, tables
    story       steps, proofs and figures, of both demos
    play        the steps, in their order; cluster: those with three brokers
    report      the page that is left at the end; cluster_report; page: their parts
    terminal    progress and summary on a terminal
    command     `python -m demo`: directory, signals, exit code

Everything that the demo does can be done by hand, with the same commands and libraries.
"""

from __future__ import annotations

__all__: list[str] = []
