"""The command line: one file per command, thin over the layers below.

Commands: auth, backup, bench, brokers, completion, config, consume, contexts, danube, demo, dlq,
inspect, metadata, namespaces, pipeline, produce, recover, repair, schema, serve, subscriptions,
top, topics, up. What they share:

main            arguments in, exit code out
parser          the layout of help, hints after wrong usage
output          tables, errors, progress, questions: the look of all commands
table           tables in the terminal
tier_map        a topic's tiers drawn to scale
errors_out      errors for people and for programs
location        which log a command works on
connection      which broker a command talks to
messages_in     the input of `produce`
messages_out    the output of `consume`
message_options    `--format` and filters of commands that print messages
templates       messages as lines, by templates
lag             `subscriptions lag`
known_names     names for the completion of a command line
topic_moves     `topics move` and `topics take-over`
topic_reading   reading without a subscription
stored_topics   topics as files and stores describe them
config_check    checks of settings: files and stores
interrupts      SIGINT and SIGTERM
checkout        finds the checkout, for `bench` and `demo`
"""
