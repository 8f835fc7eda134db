"""Benchmarks beside a peer in the same run: ``nox -s bench``."""
