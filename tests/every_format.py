"""Every format of the library's list, for tests that hold for each: a new one is tested without being named."""

from typing import Final

from kvblocks.formats import KVFormat, all_formats, parse_format

_OF_V = all_formats("v")

# As `CacheConfig` takes them. V as K, and where V has no such scaling the first one of its name.
EVERY_FORMAT: Final = tuple(
    str(KVFormat(part, part if part in _OF_V else parse_format(part.name, "v"))) for part in all_formats("k")
)
