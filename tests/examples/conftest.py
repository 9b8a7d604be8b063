"""Fixtures for the examples that need more than Python: workers in this process, on each kind of server."""

from tests.worker.conftest import crew, own_crew

__all__ = ["crew", "own_crew"]
