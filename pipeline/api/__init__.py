"""The HTTP API of the marts: each tenant reads its own rows."""
