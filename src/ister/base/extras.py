"""Errors for optional libraries that are not installed."""

from __future__ import annotations

from ister.errors import ConfigError


def missing_extra(what: str, extra: str, error: ImportError) -> ConfigError:
    """The error for a feature whose library is missing.

    Args:
        what: The feature, as the beginning of a sentence.
        extra: The extra of this package that brings the library.
        error: What the import said; raised as it is if it is not about a library.
    """
    if (error.name or "").partition(".")[0] in ("ister", ""):
        raise error
    return ConfigError(
        f"{what} needs {error.name}, which is not installed", hint=f"pip install 'ister[{extra}]'"
    )


def missing_library(what: str, library: str, error: ImportError) -> ConfigError:
    """The error for a method that needs a library which no extra brings.

    Args:
        what: The method, as the beginning of a sentence.
        library: What to install.
        error: What the import said; raised as it is if it is about something else.
    """
    if (error.name or "").partition(".")[0] != library:
        raise error
    return ConfigError(
        f"{what} needs {library}, which is not installed", hint=f"pip install {library}"
    )
