"""The module ``torch.npu``."""


def autoload() -> None:
    """Register the device; called by ``import torch`` through the entry point group ``torch.backends``."""
