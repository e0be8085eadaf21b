"""The command line: one file per sub-command, thin over the layers below."""
