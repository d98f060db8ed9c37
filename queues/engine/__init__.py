"""The queue engine: Redis keys, Lua scripts, and one function for each transition.

This package imports no Django and no HTTP, and has no rules about tenants.
"""

from core.redis.script_call import ScriptCall
from queues.engine.engine import Engine
from queues.engine.options import Options

__all__ = ["Engine", "Options", "ScriptCall"]
