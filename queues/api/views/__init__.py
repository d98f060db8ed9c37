"""The routes: read the wire, call one verb, write the wire."""
