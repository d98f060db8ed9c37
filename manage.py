#!/usr/bin/env python
"""Django's command line: `manage.py help codeq_site` lists the operator's commands."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")
    from django.core.management import execute_from_command_line

    from codeq_site.errors import ConfigError

    try:
        execute_from_command_line(sys.argv)
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
