"""Pure functions from DataFrame to DataFrame that compute the facts and the marts.

They do no input or output.
"""
