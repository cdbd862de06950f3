"""Malformed requests get a status of 4xx and one sentence: our own, and those that schemathesis makes from the OpenAPI
description. `SCHEMATHESIS_EXAMPLES=2000` runs more of the latter."""

import http.client
import json
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from serving.client import HOST, Server

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "250"))
JSON = {"Content-Type": "application/json"}
CHECKS = [
    not_a_server_error, content_type_conformance, negative_data_rejection, response_schema_conformance,
    status_code_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with Server("--model", "demo", "--threads", "1", "--limit-body-bytes", "100000") as running:
        yield running


def send(server: Server, body: bytes, headers: dict[str, str] = JSON, path: str = "/v1/summaries") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def text(**options: Any) -> bytes:
    return json.dumps({"text": "a text", **options}).encode()


MISTAKES = {
    "nothing": (b"", 422),
    "half of an object": (b'{"text": "a', 400),
    "not UTF-8": (b'{"text": "\xff\xfe"}', 400),
    "half of a character": (b'{"text": "\\ud83d"}', 422),
    "half of a character in a list": (b'{"texts": ["a", "\\udc00 b"]}', 422),
    "an array": (b"[]", 422),
    "null": (b"null", 422),
    "a number": (b"7", 422),
    "deep nesting": (b"[" * 20_000, 400),
    "deep nesting that ends": (b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    "a huge integer": (b'{"text": "a", "beam": ' + b"9" * 5000 + b"}", 400),
    "a large integer": (b'{"text": "a", "beam": ' + b"9" * 400 + b"}", 422),
    "a huge exponent": (b'{"text": "a", "timeout": 1e999}', 422),
    "NaN": (b'{"text": "a", "timeout": NaN}', 422),
    "no text": (b"{}", 422),
    "text and texts": (text(texts=["b"]), 422),
    "no texts": (b'{"texts": []}', 422),
    "too many texts": (json.dumps({"texts": ["a"] * 65}).encode(), 422),
    "a text that is a number": (b'{"text": 1}', 422),
    "texts that are numbers": (b'{"texts": [1, 2]}', 422),
    "an unknown option": (text(beams=3), 422),
    "a beam of zero": (text(beam=0), 422),
    "a beam that is text": (text(beam="4"), 422),
    "a beam that is true": (text(beam=True), 422),
    "a beam beyond the limit": (text(beam=17), 422),
    "a fraction of a beam": (text(beam=2.5), 422),
    "nbest beyond the beam": (text(nbest=5), 422),
    "an unknown search": (text(search="s" * 30), 422),
    "an odd name of a search": (text(search="\u202e\u0000"), 422),
    "a precision that is not loaded": (text(precision="int8"), 422),
    "an unknown form of attention": (text(attention="both"), 422),
    "a negative length": (text(min_len=-1), 422),
    "a length beyond the limit": (text(max_len=1025), 422),
    "lengths that contradict each other": (text(min_len=20, max_len=10), 422),
    "a beam that its groups don't divide": (text(search="diverse", beam=5), 422),
    "a beam for greedy search": (text(search="greedy", beam=2), 422),
    "a deadline in the past": (text(timeout=-1), 422),
    "a body beyond the limit": (text(text="x" * 100_000), 413),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_a_status_and_one_sentence(server, name):
    body, expected = MISTAKES[name]
    status, answer = send(server, body)
    assert status == expected, answer
    assert set(answer) == {"error"} and 5 < len(answer["error"]) < 400
    assert "\n" not in answer["error"] and "Traceback" not in answer["error"] and "pydantic" not in answer["error"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_taken(server, kind):
    """Which a browser does not send to another site without asking."""
    status, answer = send(server, text(), {"Content-Type": kind})
    assert status == 415 and "application/json" in answer["error"]


def test_the_stream_refuses_what_it_can_not_do(server):
    for body in (b"{}", b'{"texts": ["a"]}', text(beam=2), text(search="beam"), text(min_len=50)):
        status, answer = send(server, body, path="/v1/summaries/stream")
        assert status == 422 and answer["error"]


ODD_TEXTS = ["", " ", "\x00", "\u202eabc", "a\u0301" * 50, "\U0001f600" * 20, "\ufffe", "x" * 20_000]


@pytest.mark.parametrize("odd", ODD_TEXTS)
def test_odd_texts_are_summarised(server, odd):
    status, answer = send(server, json.dumps({"text": odd}).encode())
    assert status == 200 and answer["results"][0]["error"] is None


def test_generated_requests_break_nothing(server):
    """Of each operation, against its description: valid and invalid ones."""
    schema = schemathesis.openapi.from_url(f"http://{HOST}:{server.port}/openapi.json")
    sent = 0
    for operation in (found.ok() for found in schema.get_all_operations()):
        takes_body = operation.method == "post"
        if takes_body:
            sent += run_examples(operation, GenerationMode.NEGATIVE, EXAMPLES)
        run_examples(operation, GenerationMode.POSITIVE, 20 if takes_body else 1)
    assert sent >= 2 * EXAMPLES


def run_examples(operation: Any, mode: GenerationMode, count: int) -> int:
    """Returns how many requests were sent."""
    sent = 0

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        nonlocal sent
        sent += 1
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()
    return sent
