"""Triton's intermediate representation (TTIR): its types, its operations, and the text that they are read from."""
