"""Runs what documents show, as their readers do: `python -m doc_runner PAGE` in `tests/`."""
