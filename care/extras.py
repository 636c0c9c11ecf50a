"""Optional dependencies: which packages of an extra are missing, and how to install them."""

import re
from importlib.metadata import PackageNotFoundError, metadata

from care.gpu_builds import installed
from core.errors import CareError

_DISTRIBUTION = "care-retrieval"
_NAME = re.compile(r"[\w.-]+")


def missing(extra: str) -> list[str]:
    """Returns the names of the packages of an extra that are not installed.

    Of a checkout that is not installed itself nothing is known: the list is empty. CareError if an
    older release is installed, which has no such extra.
    """
    try:
        facts = metadata(_DISTRIBUTION)
    except PackageNotFoundError:
        return []
    if extra not in facts.get_all("Provides-Extra", []):
        message = f"the installed {_DISTRIBUTION} is older than this code, without the extra "
        message += f"'{extra}': in a checkout, pip install -c constraints.txt -e ."
        raise CareError(message, code="not_installed", extras=(extra,), packages=[])
    lines = facts.get_all("Requires-Dist", [])
    wanted = [line for line in lines if f'extra == "{extra}"' in line]
    return [name for line in wanted for name in _NAME.findall(line)[:1] if not installed(name)]


def require(*extras: str, make: str | None = None) -> None:
    """Checks that the packages of all extras are installed.

    Args:
        extras: Names of extras in pyproject.toml.
        make: The make target that runs the command in an environment with these packages.
    """
    if packages := [name for extra in extras for name in missing(extra)]:
        install = f"pip install '{_DISTRIBUTION}[{','.join(extras)}]'"
        message = f"packages are not installed: {', '.join(packages)}; install them: {install}"
        if make:
            message += f" (in a checkout, `make {make}` uses an environment that has them)"
        raise CareError(message, code="not_installed", extras=extras, packages=packages)
