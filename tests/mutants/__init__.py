"""Seeded faults, and which test notices each: `nox -s mutants`."""
