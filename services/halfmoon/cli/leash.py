"""Runs a command that must not outlive its parent: `python -m halfmoon.cli.leash COMMAND [ARGUMENT…]`.

Asks the kernel for SIGTERM at the parent's death (prctl(2), PR_SET_PDEATHSIG), which survives execve, and becomes the
command. So a supervisor that is killed with SIGKILL leaves no process behind either.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
PARENT = "HALFMOON_LEASH_PARENT"


def main() -> int:
    command = sys.argv[1:]
    if not command:
        print("usage: python -m halfmoon.cli.leash COMMAND [ARGUMENT...]", file=sys.stderr)
        return 2
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.environ.pop(PARENT, str(os.getppid())) != str(os.getppid()):
        return 1  # the parent died before the leash was on
    # A session of its own keeps the terminal's Ctrl-C away: the supervisor decides the order in which things stop.
    os.setsid()
    os.execvp(command[0], command)
    raise AssertionError("execvp returned")


if __name__ == "__main__":
    sys.exit(main())
