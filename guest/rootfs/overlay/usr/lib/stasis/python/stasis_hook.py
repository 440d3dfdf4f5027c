"""Reseeds this interpreter's random generators when its microVM is restored from a snapshot.

Every VM of a template continues from the same memory, and so would `random`. The agent (PID 1) knows of each
interpreter by a connection to its socket and sends, after a restore and before the first request,

    reseed <generation> <64 bytes in hex>\n        answered by        ok <generation>\n

Reseeded are the functions of `random` and `numpy.random`, and OpenSSL's generator under `ssl`; each only if it is
imported. What is imported later seeds itself from the kernel, which was reseeded first, as `os.urandom`, `uuid` and
`secrets` always do. Generators that a program made itself (`random.Random()`, `numpy.random.default_rng()`) are its
own to reseed: a program that keeps one can watch /run/stasis/generation.

Loaded by every interpreter, so it imports only what is built in or loaded anyway, and never raises.
"""

import os
import sys

import _socket
import _thread

_PATH = os.environ.get("STASIS_HOOK_SOCKET", "/run/stasis/hooks.sock")  # the variable is for tests
_connection = None


def _reseed(seed):
    # Each generator its own part of the seed.
    random = sys.modules.get("random")
    # Without these it is being imported just now.
    if hasattr(random, "seed"):
        random.seed(int.from_bytes(seed[:32], "little"))
    numpy_random = sys.modules.get("numpy.random")
    if hasattr(numpy_random, "seed"):
        numpy_random.seed([int.from_bytes(seed[at : at + 4], "little") for at in range(32, 48, 4)])
    ssl = sys.modules.get("_ssl")
    if hasattr(ssl, "RAND_add"):
        ssl.RAND_add(seed[48:], 16.0)


def _serve(connection):
    heard = b""
    try:
        while True:
            received = connection.recv(4096)
            if not received:
                return
            heard += received
            while b"\n" in heard:
                line, heard = heard.split(b"\n", 1)
                word, generation, seed = line.split(b" ")
                if word == b"reseed":
                    _reseed(bytes.fromhex(seed.decode()))
                    connection.sendall(b"ok " + generation + b"\n")
    except Exception:
        # Not acknowledged. While this connection lasts, the agent lets no request through.
        return


def _register():
    """Connects anew; in a forked child too, which has its parent's connection but not the thread that serves it."""
    global _connection
    try:
        if _connection is not None:
            _connection.close()
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        connection.connect(_PATH)
        connection.sendall(b"python %d\n" % os.getpid())
        _connection = connection
        _thread.start_new_thread(_serve, (connection,))
    except Exception:
        # No agent, no microVM: nothing to repair.
        pass


if hasattr(_socket, "AF_UNIX") and os.path.exists(_PATH):
    _register()
    os.register_at_fork(after_in_child=_register)
