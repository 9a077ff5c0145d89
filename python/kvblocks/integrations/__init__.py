"""Bridges to other software, one module each: imported by whoever wants one, never by the library itself."""
