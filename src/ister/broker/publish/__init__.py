"""From producers to the log: producer names and limits, and the fast path of SendMessage.

admission        the checks that a message passes before it is appended, for every way in
batched_sends    SendMessage calls that arrived together, committed and answered together
producers        the producers of a topic
producer_names   which principal a producer name belongs to
"""
