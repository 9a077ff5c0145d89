"""Replay of request traces through the real allocator, beside models of what others reserve.

traces | generate -> (paged | reservations) -> simulate -> sizing -> results -> command
traces | generate -> hit_rate
"""
