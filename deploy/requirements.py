"""Print the dependencies of pyproject.toml and of extras: `requirements.py s3 tracing`.

The image installs them before it copies the code, so that a change of the code does not install them again.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
print(*project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*project["optional-dependencies"][extra], sep="\n")
