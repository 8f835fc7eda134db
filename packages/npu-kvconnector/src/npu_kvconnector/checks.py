"""Checks of values that a user wrote, by the names of their options."""

from __future__ import annotations

import math

from npu_kvconnector.errors import OptionError

__all__ = ["check_flags", "check_number", "check_texts"]


def check_flags(options: object, *names: str) -> None:
    """Refuse what is neither true nor false.

    Raises:
        OptionError: "false" in quotes, for instance, which Python would take for true.
    """
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            msg = f"{name} must be true or false, not {value!r}"
            raise OptionError(msg)


def check_texts(options: object, *names: str, may_be_none: tuple[str, ...] = ()) -> None:
    """Refuse what is no text.

    Raises:
        OptionError: it is something else, or None where that is not among ``may_be_none``.
    """
    for name in (*names, *may_be_none):
        value = getattr(options, name)
        if not isinstance(value, str) and not (value is None and name in may_be_none):
            msg = f"{name} must be a text, not {value!r}"
            raise OptionError(msg)


def check_number(
    name: str, value: object, least: float, *, most: float = math.inf, is_whole: bool = False, text: str = ""
) -> None:
    """Refuse what is no finite number of this range.

    Args:
        name: of the option.
        value: what the user wrote.
        least: that is allowed.
        most: likewise.
        is_whole: whether it must be an integer.
        text: what it must be, where that is more than its range.

    Raises:
        OptionError: NaN and Infinity among others, which Python's JSON reads.
    """
    kinds = (int,) if is_whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        what = "a whole number" if is_whole else "a number"
        bounds = f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"
        msg = f"{name} must be {text or f'{what} {bounds}'}, not {value!r}"
        raise OptionError(msg)
