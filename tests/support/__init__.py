"""Shared parts of the tests: small models, a real server."""
