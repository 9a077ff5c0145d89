"""Replay of request traces through the real allocator, beside models of what others reserve.

readers | generate -> trace -> (paged | reservations) -> simulate -> sizing -> results -> command
                      trace -> hit_rate
"""
