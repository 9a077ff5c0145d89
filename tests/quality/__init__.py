"""Tests of `kvblocks quality`."""
