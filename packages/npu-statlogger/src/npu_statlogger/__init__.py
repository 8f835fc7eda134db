"""The statistics logger; the entry point is the class itself."""


class NPUStatLogger:
    """Placeholder until the logger lands."""
