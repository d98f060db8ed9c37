"""The operator's commands of the site; each app brings its own."""
