"""Tests of the engine against a model and at every error point."""

import pytest

# Show the values of failed assertions in these modules, as in test modules.
pytest.register_assert_rewrite("tests.queues.engine.machine", "tests.queues.engine.checked_engine")
