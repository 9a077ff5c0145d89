"""Tests of `kvblocks plan`."""
