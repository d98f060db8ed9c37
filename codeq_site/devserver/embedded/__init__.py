"""The Valkey and PostgreSQL servers that `manage.py up` and the tests run.

Both listen on unix sockets, in directories that only their owner and root can enter. With a `port` in its settings,
Valkey also listens on TCP.
"""

from codeq_site.devserver.embedded.postgresql import PostgreSQL
from codeq_site.devserver.embedded.server import EmbeddedServer
from codeq_site.devserver.embedded.valkey import BROKER, DURABLE, Valkey

__all__ = ["BROKER", "DURABLE", "EmbeddedServer", "PostgreSQL", "Valkey"]
