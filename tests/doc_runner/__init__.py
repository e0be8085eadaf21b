"""Runs what documents show, as their readers do: `python -m tests.doc_runner PAGE`."""
