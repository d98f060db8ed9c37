#!/usr/bin/env python
"""Django's command line. `manage.py help` lists the commands by app."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")
    from django.core.management import execute_from_command_line
    from django.db import OperationalError

    from core.errors import ConfigError

    try:
        execute_from_command_line(sys.argv)
    except ConfigError as error:
        sys.exit(str(error))
    except OperationalError as error:
        if "--traceback" in sys.argv:
            raise
        sys.exit(
            f"PostgreSQL does not answer: {' '.join(str(error).split())}\n"
            "Start codeQ first (`make run`). If it was started with another CODEQ_HOME, set that; if PostgreSQL runs "
            "on another machine, set DATABASE_URL."
        )


if __name__ == "__main__":
    main()
