"""The HTTP port: a door to the operations (`ister.broker.services`), and to what operators see.

port            the port itself: liveness, readiness, health, metrics, the dashboard
api             the JSON API: paths, errors, what is read
changes         the part of it that changes things
requests        reads paths and bodies of its requests
"""
