"""Tests of the engine against a model and at every error point."""

import pytest

# Their assertions are part of the tests that use them.
pytest.register_assert_rewrite("tests.queues.engine.machine", "tests.queues.engine.world")
