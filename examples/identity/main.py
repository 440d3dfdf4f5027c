"""Shows who this process is, and misbehaves on demand."""

import glob
import json
import os
import random
import socket
import subprocess
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

VALUE = random.random()
COUNTER = 0
REMEMBERED = []
# Their ends keep them alive.
CANARIES = []
# On the root disk, on two tmpfs.
PLACES = ["/var/tmp/canary", "/tmp/canary", "/dev/shm/canary"]
KEPT = None


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return None


def identity():
    global COUNTER
    COUNTER += 1
    return {
        "value": VALUE,
        "counter": COUNTER,
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "boot_nonce": read("/run/stasis/boot_nonce"),
        "hostname": socket.gethostname(),
        "machine_id": read("/etc/machine-id"),
        "random": random.random(),
        "uuid4": str(uuid.uuid4()),
        "time": time.time(),
        "monotonic": time.monotonic(),
        "pid": os.getpid(),
        "uid": os.getuid(),
        "cpus": os.cpu_count(),
    }


def traces():
    """Where tokens of `remember` are."""
    found = [f"memory: {token}" for token in REMEMBERED]
    found += [f"{place}: {read(place)}" for place in PLACES if os.path.exists(place)]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if (read(f"/proc/{pid}/cmdline") or "").startswith("canary"):
            found.append(f"process {pid}")
    return found


def append(path, line):
    """Adds a line to a file, and has it on the disk and no longer in memory: the next reader asks the disk. Returns what was there before."""
    with open(path, "a+b") as file:
        file.seek(0)
        before = file.read().decode().splitlines()
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return before


class Kept:
    """What a pause must not lose."""

    def __init__(self):
        self.tokens = []
        # A file that stays open, and has no name by which it could be opened again.
        self.file = os.open("/var/tmp/open", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink("/var/tmp/open")
        # A process that counts what it hears.
        count = "n=0; while read -r token; do n=$((n + 1)); echo $n $token; done"
        self.clerk = subprocess.Popen(["sh", "-c", count], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def add(self, token):
        """Adds a token to each, and tells what each holds."""
        self.tokens.append(token)
        os.write(self.file, token.encode() + b"\n")
        offset = os.lseek(self.file, 0, os.SEEK_CUR)
        self.clerk.stdin.write(token + "\n")
        return {
            "memory": self.tokens,
            "file": os.pread(self.file, offset, 0).decode().splitlines(),
            "process": {"pid": self.clerk.pid, "said": self.clerk.stdout.readline().strip()},
            "disk": append("/var/tmp/kept", token) + [token],
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def dispatch(self):
        url = urlsplit(self.path)
        name, _, argument = url.path.strip("/").partition("/")
        route = getattr(self, f"route_{(name or 'identity').replace('-', '_')}", None)
        if route is None:
            self.answer(404, {"error": f"there is no {url.path}"})
        else:
            self.query = parse_qs(url.query)
            route(argument)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = dispatch

    # Routes: the part of the path after the name is the argument.

    def route_identity(self, _):
        self.drain()
        self.answer(200, identity())

    def route_healthz(self, _):
        self.send(200, b"ok", "text/plain")

    def route_inspect(self, _):
        """What arrived: method, path, query, headers as a list, the body's length."""
        url = urlsplit(self.path)
        length = sum(map(len, self.body()))
        self.answer(
            200,
            {
                "method": self.command,
                "path": url.path,
                "query": url.query,
                "headers": [[name, value] for name, value in self.headers.items()],
                "body_bytes": length,
                "peer": self.client_address[0],
            },
        )

    def route_echo(self, _):
        """The body back, each piece as it arrives."""
        self.begin_chunked(self.headers.get("Content-Type", "application/octet-stream"))
        for piece in self.body():
            self.chunk(piece)
        self.end_chunked()

    def route_status(self, code):
        self.drain()
        self.answer(int(code), {"status": int(code)})

    def route_sleep(self, seconds):
        self.drain()
        time.sleep(float(seconds))
        self.answer(200, {"slept": float(seconds)})

    def route_remember(self, token):
        """Leaves a token wherever a function can, and tells which were there before."""
        self.drain()
        before = traces()
        REMEMBERED.append(token)
        for place in PLACES:
            with open(place, "w", encoding="utf-8") as file:
                file.write(token * 1000)
                file.flush()
                os.fsync(file.fileno())
        # Heard before it is looked for: between a process's start and its first word it has no name.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        canary = subprocess.Popen([f"canary-{token}", "-c", "echo; read x"], executable="/bin/sh", start_new_session=True, **pipes)
        canary.stdout.readline()
        CANARIES.append(canary)
        self.answer(200, {"before": before, "now": len(traces())})

    def route_keep(self, token):
        """Adds a token to memory, to a file that stays open, to what a process counts and to the disk, and tells what each holds."""
        global KEPT
        self.drain()
        KEPT = KEPT or Kept()
        self.answer(200, KEPT.add(token))

    def route_devices(self, _):
        """The ids of the virtio devices, in their order; and the source of /dev/hwrng, if there is one."""
        self.drain()
        places = sorted(glob.glob("/sys/bus/virtio/devices/*/device"))
        self.answer(200, {"ids": [int(read(place), 16) for place in places], "rng": read("/sys/class/misc/hw_random/rng_current")})

    def route_crash(self, _):
        os._exit(3)

    def route_crash_mid(self, _):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n0123456789")
        os._exit(3)

    def route_crash_stream(self, _):
        self.begin_chunked("text/plain")
        self.chunk(b"before the crash\n")
        os._exit(3)

    def route_drip(self, _):
        """`?n=5&pause=0.1`: n chunks with pauses between them."""
        pause = float(self.query.get("pause", ["0.1"])[0])
        self.begin_chunked("text/plain")
        for number in range(int(self.query.get("n", ["5"])[0])):
            if number:
                time.sleep(pause)
            self.chunk(f"{number}\n".encode())
        self.end_chunked()

    def route_bytes(self, count):
        """An answer of so many bytes."""
        self.send(200, b"x" * int(count), "application/octet-stream")

    def route_env(self, _):
        self.answer(200, dict(os.environ))

    # Requests

    def body(self):
        """The body's pieces, as they arrive."""
        if self.headers.get("Transfer-Encoding", "").strip().lower() == "chunked":
            while size := int(self.rfile.readline(1024).split(b";", 1)[0], 16):
                yield from self.pieces(size)
                self.rfile.readline(3)
            while self.rfile.readline(65536) not in (b"\r\n", b"\n", b""):
                pass
        else:
            yield from self.pieces(int(self.headers.get("Content-Length") or 0))

    def pieces(self, left):
        while left:
            piece = self.rfile.read1(min(left, 1 << 16))
            if not piece:
                raise ConnectionError("the body is shorter than announced")
            left -= len(piece)
            yield piece

    def drain(self):
        for _ in self.body():
            pass

    # Answers: each in one write

    def answer(self, status, value):
        self.send(status, json.dumps(value).encode(), "application/json")

    def send(self, status, body, kind):
        reason = self.responses.get(status, ("Unknown",))[0]
        bodiless = status in (204, 304)
        length = "" if bodiless else f"Content-Length: {len(body)}\r\n"
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\n{length}\r\n".encode()
        self.wfile.write(head if bodiless or self.command == "HEAD" else head + body)

    def begin_chunked(self, kind):
        self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_chunked(self):
        self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    Server(("0.0.0.0", int(os.environ.get("PORT", "8080"))), Handler).serve_forever(poll_interval=None)
