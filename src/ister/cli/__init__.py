"""The command line: one file per command, thin over the layers below.

Commands: auth, bench, brokers, completion, config, consume, danube, demo, dlq, inspect, namespaces,
pipeline, produce, recover, repair, schema, serve, subscriptions, topics, up. What they share:

main            arguments in, exit code out
parser          the layout of help, hints after wrong usage
output          tables, errors, progress, questions: the look of all commands
table           tables in the terminal
tier_map        a topic's tiers drawn to scale
errors_out      errors for people and for programs
location        which log a command works on
contexts        named brokers, and the command `context`
connection      which broker a command talks to
messages_in     the input of `produce`
messages_out    the output of `consume`
topic_moves     `topics move` and `topics take-over`
topic_reading   reading without a subscription
stored_topics   topics as files and stores describe them
inspect_topic, inspect_object    `inspect topic`, `inspect object`
survey_view     the results of a survey
config_check    checks of settings: files and stores
interrupts      SIGINT and SIGTERM
checkout        finds the checkout, for `bench` and `demo`
"""
