"""Malformed requests, made from the server's OpenAPI schema.

.venv/bin/python -m tests.serving.fuzzing --requests 10000 --seed 1
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import urlopen

from tests.serving.live_server import make_models, served

LEAKS = re.compile(r"Traceback|File \"|\.py\b|site-packages|/home/|/tmp/|0x[0-9a-f]{6,}|torch\.|pydantic")
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", " ", "\0", "a\nb", "\ud800", "\U0001f600", "\u202e", "é" * 50, "A" * 5000, "../../etc/passwd", "%s%n{}{0}", "</s>",
    "<|user|>", "{{ 7*7 }}", "gpt", "encoder", "translator", [], [[]], [None], [""], ["a"] * 300, [0], [-1], [2**70], {},
    {"": {}}, {"a": "\ud800"}, {"0": 1e9}, {"1": float("nan")}, {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"$ref": "#"}}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(a{1,99}){1,99}$^["}}},
]  # fmt: skip
PATHS = [
    "/v1/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/v1/models/%00",
    "/v1/models/%ff%fe", "/v1/models/" + "a" * 3000, "//v1/models", "/v1//completions", "/v1/completions/", "/V1/MODELS",
    "/v1/models?name[]=1", "/docs", "/redoc", "/.git/config", "/v1/completions;a=b", "/healthz/../v1/models",
]  # fmt: skip
HEADERS = [
    {"content-type": "text/plain"}, {"content-type": "application/xml"}, {"content-type": "multipart/form-data"},
    {"content-type": "application/json; charset=utf-16"}, {"content-type": "\xff"}, {"accept": "x" * 4000},
    {"authorization": "Bearer \xff"}, {"x-forwarded-for": "1.2.3.4"}, {"cookie": "a=" + "b" * 4000}, {"expect": "no"},
    {"origin": "null"}, {"origin": "http://evil.example"}, {"content-encoding": "gzip"}, {"range": "bytes=0-1"},
    {"x-http-method-override": "DELETE"},
]  # fmt: skip
RAW = [
    b"GET / HTTP/1.1\r\n\r\n", b"GET /healthz HTTP/1.1\r\nhost: evil.example\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
    b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx: a\r\n\tb\r\n\r\n", b"GET /v1/models HTTP/9.9\r\nhost: localhost\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", b"\r\n" * 50,
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: \xb2\r\n\r\n",
    b"GET /v1/models\r\nx-injected: 1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
]  # fmt: skip


class Fuzzer:
    """Makes requests from a server's schema, and some that violate it."""

    def __init__(self, url: str, seed: int) -> None:
        self.place, self.random = urlsplit(url), random.Random(seed)
        with urlopen(f"{url}/openapi.json") as told:
            self.schema: dict[str, Any] = json.load(told)
        self.routes = [(path, verb) for path, verbs in self.schema["paths"].items() for verb in verbs]
        self.statuses: Counter[int] = Counter()

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """A value that fits the schema, or almost."""
        rng = self.random
        if rng.random() < 0.12 or depth > 6:
            return rng.choice(ODD)
        if "$ref" in schema:
            return self.value(self.schema["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], depth)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self.value(rng.choice(schema[word]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                fields = cast("dict[str, dict[str, Any]]", schema.get("properties", {}))
                needed = schema.get("required", [])
                keep = {name for name in fields if name in needed or rng.random() < 0.3}
                keep -= {rng.choice(list(fields))} if fields and rng.random() < 0.05 else set()
                named = {name: self.named(name, fields[name], depth) for name in keep}
                return named if fields else {str(rng.choice(ODD))[:9]: self.value({"type": "number"}, depth + 1)}
            case "array":
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
            case "string":
                return rng.choice(["a", "the cat", "user", "auto", "é\u200b", ""])
            case "integer":
                return rng.choice([schema.get("minimum", 0), schema.get("maximum", 3), 1, 2, 7])
            case "number":
                return rng.choice([0, 0.5, 1, schema.get("maximum", 2), schema.get("minimum", -1)])
            case "boolean":
                return rng.random() < 0.5
            case _:
                return rng.choice(ODD)

    def named(self, name: str, schema: dict[str, Any], depth: int) -> Any:
        """Mostly models that exist, so that requests pass the first check."""
        if name == "model" and self.random.random() < 0.9:
            return self.random.choice(["gpt", "gpt", "encoder", "translator", ""])
        if name in ("max_tokens", "max_completion_tokens") and self.random.random() < 0.8:
            return self.random.choice([1, 2, 5])
        return self.value(schema, depth + 1)

    def body(self, path: str, verb: str) -> bytes:
        rng = self.random
        kind = rng.random()
        if kind < 0.03:
            return rng.randbytes(rng.choice((0, 1, 30)))
        if kind < 0.05:
            return b"[" * rng.choice((50, 900, 100_000))
        if kind < 0.07:
            return b'{"a":' * 900 + b"1" + b"}" * 900
        content = self.schema["paths"][path][verb].get("requestBody", {}).get("content", {})
        schema = next((each["schema"] for each in content.values()), {})
        text = json.dumps(self.value(schema)).encode()  # NaN and Infinity as Python writes them
        return text[: rng.randrange(len(text) + 1)] if kind > 0.97 else text

    def ask(self) -> None:
        """Send one request and check the form of its answer."""
        rng = self.random
        if rng.random() < 0.05:
            self.ask_raw(rng.choice(RAW))
            return
        path, verb = rng.choice(self.routes)
        body, headers = self.body(path, verb), {"content-type": "application/json"}
        path = path.replace("{name}", rng.choice(["gpt", "none", "a/b", "%20"]))
        if rng.random() < 0.05:
            path = rng.choice(PATHS)
        if rng.random() < 0.1:
            headers |= rng.choice(HEADERS)
        if rng.random() < 0.05:
            verb = rng.choice(["get", "put", "delete", "options", "patch", "trace", "head", "brew"])
        connection = http.client.HTTPConnection(self.place.hostname or "", self.place.port, timeout=60)
        try:
            connection.request(verb.upper(), path, body, headers, encode_chunked=False)
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        self.check(answer.status, answer.headers.get("content-type", ""), said, (verb, path, headers, body[:600]))

    def check(self, status: int, kind: str, said: bytes, asked: Any) -> None:
        self.statuses[status] += 1
        assert status < 500, (status, said[:500], asked)
        text = said.decode()
        if kind == "text/event-stream":
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            if events[-1] != "[DONE]":
                self.check(400, "application/json", events[-1].encode(), asked)
        elif status >= 400 and asked[0] != "head":
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"}, (text, asked)
            assert error["message"], asked
            assert error["message"].isprintable(), (text, asked)
            assert not LEAKS.search(re.sub(r"'[^']*'", "", text)), (text, asked)  # quotations of the request excepted

    def ask_raw(self, sent: bytes) -> None:
        """Bytes that no client library would send: the server must refuse them or close the connection."""
        with socket.create_connection((self.place.hostname or "", self.place.port or 80), timeout=10) as line:
            try:
                line.sendall(sent)
                line.shutdown(socket.SHUT_WR)
                said = line.recv(100_000)
            except ConnectionError:
                return
        if said:
            status = int(said.split()[1])
            self.statuses[status] += 1
            assert status < 500, (said, sent)
            assert not LEAKS.search(said.decode()), (said, sent)
            assert b"x-injected" not in said

    def is_alive(self) -> bool:
        body = json.dumps({"model": "gpt", "prompt": "the cat", "max_tokens": 3}).encode()
        connection = http.client.HTTPConnection(self.place.hostname or "", self.place.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status == 200 and bool(json.load(answer)["choices"])
        finally:
            connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        places = make_models(Path(folder))
        with served(*map(str, places.values())) as (url, _):
            fuzzer = Fuzzer(url, asked.seed)
            for _ in range(asked.requests):
                fuzzer.ask()
            assert fuzzer.is_alive()
    print(f"{asked.requests:,} requests: {dict(sorted(fuzzer.statuses.items()))}")


if __name__ == "__main__":
    main()
