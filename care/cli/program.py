"""How a shell calls `care` in the environment of this process."""

import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """Returns the words that call `care`, for commands that a user copies.

    Documents of a trained pair are encoded by torch, which another environment may lack: the
    path is given unless the shell finds this environment's `care`.
    """
    script = Path(sys.executable).with_name("care")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m care"
    return "care" if shutil.which("care") == str(script) else shlex.quote(str(script))
