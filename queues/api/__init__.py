"""The HTTP surface of queues: wire types, views, routes. Decides nothing; every verb is in `queues.services`."""
