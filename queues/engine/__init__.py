"""All that knows Redis: keys, scripts and one function a transition. No Django, no HTTP, no rule about tenants."""

from core.redis.script_call import ScriptCall
from queues.engine.base import Engine
from queues.engine.options import Options

__all__ = ["Engine", "Options", "ScriptCall"]
