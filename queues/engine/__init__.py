"""All that knows Redis: keys, scripts and one function a transition. No Django, no HTTP, no rule about tenants."""

from queues.engine.call import Call
from queues.engine.engine import Engine
from queues.engine.options import Options

__all__ = ["Call", "Engine", "Options"]
