"""Traces of requests: what is known of each request, and the files that hold them.

readers -> trace. The replay runs them, the planner reads their lengths.
"""
