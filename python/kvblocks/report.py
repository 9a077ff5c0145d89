"""What the commands share in how they speak: the error of a user's input, tables, progress, plots.

Owns `UserError` and the use of rich and matplotlib, both of the extra `tools` and imported when first used.
Imports the standard library only.
"""

import importlib
from types import ModuleType


class UserError(Exception):
    """Input that a command cannot use: one sentence with the file, line, field or option, and what was expected."""


def require(module: str) -> ModuleType:
    """Import a module of the extra `tools`; a UserError that names the pip command where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{module} is not installed: pip install 'kvblocks[tools]'") from error
