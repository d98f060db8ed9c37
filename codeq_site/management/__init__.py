"""The site's commands for operators. Each app has its own."""
