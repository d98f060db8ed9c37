"""systemd accepts the units."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from django.conf import settings

UNITS = Path(settings.BASE_DIR) / "deploy" / "systemd"


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    assert program, "Install systemd (on Debian: apt-get install systemd)."
    for unit in UNITS.iterdir():
        text = unit.read_text(encoding="utf-8").replace("/opt/codeq/bin", str(Path(sys.executable).parent))
        (tmp_path / unit.name).write_text(text)
    units = sorted(str(path) for path in tmp_path.iterdir())
    checked = subprocess.run(
        [program, "verify", "--man=no", *units], capture_output=True, text=True, timeout=60, check=False
    )
    # It also reports faults of the system's own units.
    assert "codeq" not in checked.stderr, checked.stderr
    assert len(units) == 5
