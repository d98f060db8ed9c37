"""Collect these tests only if CODEQ_TEST_DEPLOY is set.

They need helm, nginx and kubernetes-validate.
"""

from __future__ import annotations

import os

if not os.environ.get("CODEQ_TEST_DEPLOY"):
    collect_ignore_glob = ["test_*.py"]
