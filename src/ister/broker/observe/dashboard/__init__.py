"""The dashboard: pages for a browser, fed by `/api`.

pages.py   serves the files of `static/` with headers that let them do little
static/    HTML, CSS and ES modules as they are: nothing is built, nothing comes from elsewhere
"""

from __future__ import annotations

from ister.broker.observe.dashboard.pages import OPEN_PATHS, add_pages

__all__ = ["OPEN_PATHS", "add_pages"]
