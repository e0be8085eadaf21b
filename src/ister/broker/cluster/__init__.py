"""Several brokers as one system: who is there, who leads, which broker should have a topic.

    members       the brokers that are up, with their state and load
    leader        one of them, which assigns topics
    assignments   the broker that should have each topic
    placement     how a broker is chosen: pure functions
    cluster       which broker has a topic, or should have it
    peers         calls to other brokers

Nothing here protects data. An assignment gives no ownership: a broker serves a topic only under its
own claim (`ister.bucket.claim`), so two leaders, an old one or none can delay a topic, and lose
nothing.
"""
