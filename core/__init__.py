"""Code that the apps share: settings, errors, HTTP, Redis, metrics, admin. Imports no app."""
