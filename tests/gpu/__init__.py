"""Tests of the launcher side of the CUDA backend; those that need a device have the marker `gpu`."""
