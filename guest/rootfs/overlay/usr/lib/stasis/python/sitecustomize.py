"""Loads stasis_hook where the .pth file in Debian's dist-packages does not reach, as in a virtual environment.

The agent puts this directory on PYTHONPATH. It then gets out of the way: off the path, for programs to see and for
imports to search, and followed by whatever sitecustomize would have run without it.
"""

import os
import sys
from _frozen_importlib_external import PathFinder

_here = os.path.dirname(__file__)

try:
    import stasis_hook  # noqa: F401
finally:
    sys.path[:] = [entry for entry in sys.path if entry != _here]

_next = PathFinder.find_spec("sitecustomize", sys.path)
if _next is not None and _next.origin is not None:
    __file__ = _next.origin
    exec(_next.loader.get_code("sitecustomize"), globals())
