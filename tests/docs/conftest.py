"""Fixtures for what docs/ and examples/ promise: workers in this process, on each kind of server."""

from tests.worker.conftest import crew, own_crew

__all__ = ["crew", "own_crew"]
