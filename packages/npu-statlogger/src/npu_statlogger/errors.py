"""The exception tree.

StatLoggerError
  ConfigError   a setting is unknown or has a value that cannot be used
  FormatError   a line, or a part of it, is not in this package's format
  InputError    a file or an option that npu-stat was given cannot be used
    NoLinesError  the files hold no whole line
"""

from __future__ import annotations

__all__ = ["ConfigError", "FormatError", "InputError", "NoLinesError", "StatLoggerError"]


class StatLoggerError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(StatLoggerError, ValueError):
    """A setting is unknown or has a value that cannot be used."""


class FormatError(StatLoggerError, ValueError):
    """A line, or a part of it, is not in this package's format."""


class InputError(StatLoggerError, ValueError):
    """A file or an option that npu-stat was given cannot be used."""


class NoLinesError(InputError):
    """The files hold no whole line."""
