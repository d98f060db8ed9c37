"""All that knows Redis: keys, scripts and one function a transition. No Django, no HTTP, no rule about tenants."""
