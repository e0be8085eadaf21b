"""`make peers`: measures Ister and comparable servers (peers) in one run.

    __main__   the runner: installs the peers, starts the measurements, writes the page
    install    downloads the peers' servers and clients into a directory of their own
    measure    the process that measures one contender
    cases      what is measured of each contender, and how
    contender  the interface of a contender: a server, Ister's or a peer's, with its Python client;
               one module for each: `ister_flight`, `ister_danube`, `ister_open`,
               `nats_jetstream`, `redis_streams`, `rabbitmq_streams`, `kafka`
    processes  servers as child processes
    statistics quantiles, medians, spreads
    page       docs/BENCHMARKS.md and its plot

Not part of the distribution. The peers are not dependencies of the project: their packages are
installed by name, from whatever index pip, apt and Maven are configured with. `measure` runs in an
environment with the peers' clients, where Ister is not installed; only the modules of Ister's own
contenders import it.
"""
