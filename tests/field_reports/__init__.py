"""The cases of known field reports about KV-cache block managers, one file an area, each test under its number."""
