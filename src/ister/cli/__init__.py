"""The command line: one file per command, thin over the layers below.

Commands: auth, backup, brokers, completion, config, consume, contexts, danube, dlq, inspect,
metadata, namespaces, pipeline, produce, recover, repair, schema, serve, subscriptions, top, topics,
up; about (status, version, help). What they share:

main            arguments in, exit code out
command         commands as typed functions: their arguments, help and output
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
known_names     names for the completion of a command line
stored_topics   topics as files and stores describe them
config_check    checks of settings: files and stores
interrupts      SIGINT and SIGTERM
"""
