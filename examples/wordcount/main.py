"""Answers POST / with the bytes, lines, words and ten commonest words of the body, as JSON."""

import heapq
import json
import os
import re
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

# Letters lower-cased, digits as they are, everything else a space.
TO_WORDS = bytes(ord(chr(b).lower()) if chr(b).isascii() and chr(b).isalnum() else 32 for b in range(256))
SLICE = 1 << 18  # words are listed slice by slice: a list of all of them would be many times the body


def count(body):
    text = body.translate(TO_WORDS)
    words = Counter()
    at = 0
    while at < len(text):
        end = text.find(b" ", at + SLICE)
        end = len(text) if end < 0 else end
        words.update(text[at:end].split())
        at = end
    top = heapq.nsmallest(10, words.items(), key=lambda item: (-item[1], item[0]))
    return {
        "bytes": len(body),
        "lines": body.count(b"\n"),
        "words": words.total(),
        "top": [[word.decode("ascii"), number] for word, number in top],
    }


class BadRequest(Exception):
    """What is wrong with the request."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = 1 << 16

    def do_GET(self):
        if self.path.split("?", 1)[0] == "/healthz":
            self.answer(200, b"ok", "text/plain")
        else:
            self.answer(404, b'{"error":"POST a text to /"}')

    do_HEAD = do_GET

    def do_POST(self):
        try:
            body = self.read_body()
        except BadRequest as error:
            self.close_connection = True
            self.answer(400, json.dumps({"error": str(error)}).encode())
            return
        if self.path.split("?", 1)[0] == "/":
            self.answer(200, json.dumps(count(body)).encode())
        else:
            self.answer(404, b'{"error":"POST a text to /"}')

    def read_body(self):
        if self.headers.get("Transfer-Encoding", "").strip().lower() == "chunked":
            return self.read_chunks()
        length = self.headers.get("Content-Length", "0").strip()
        if not (length.isascii() and length.isdigit()):
            raise BadRequest("Content-Length is not a number")
        return self.read_exactly(int(length))

    def read_chunks(self):
        chunks = []
        while True:
            size = self.rfile.readline(1024).split(b";", 1)[0].strip()
            if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", size):
                raise BadRequest("a chunk's size is not a hexadecimal number")
            if int(size, 16) == 0:
                break
            chunks.append(self.read_exactly(int(size, 16)))
            if self.read_exactly(2) != b"\r\n":
                raise BadRequest("a chunk is longer than its size")
        while self.rfile.readline(65536) not in (b"\r\n", b"\n", b""):
            pass  # trailers
        return b"".join(chunks)

    def read_exactly(self, length):
        data = self.rfile.read(length) if length else b""
        if len(data) < length:
            raise BadRequest("the body is shorter than announced")
        return data

    def answer(self, status, body, kind="application/json"):
        """Head and body in one write: a system call is dear on some hosts."""
        connection = "Connection: close\r\n" if self.close_connection else ""
        head = (
            f"HTTP/1.1 {status} {self.responses[status][0]}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\n{connection}\r\n"
        ).encode()
        self.wfile.write(head if self.command == "HEAD" else head + body)


if __name__ == "__main__":
    server = HTTPServer(("0.0.0.0", int(os.environ.get("PORT", "8080"))), Handler)
    server.serve_forever(poll_interval=None)
