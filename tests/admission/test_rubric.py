"""The rubric against a real HTTP server that speaks chat completions."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from rsi.admission.command import CommandConfig
from rsi.admission.rubric import CRITERIA, EndpointError, ask, read_review
from rsi.admission.validate import validate_fully
from rsi.harbor.task import task_from_files
from tests.corpus.sound import sort_lines

Answer = Callable[[Mapping[str, Any], Mapping[str, str]], tuple[int, str]]
"""From the request's body and headers, its status and the text that the model says."""
TASK = task_from_files(sort_lines())


def review(**broken: str) -> str:
    return json.dumps({name: {"holds": name not in broken, "why": broken.get(name, "fine")} for name in CRITERIA})


@contextmanager
def endpoint(answer: Answer) -> Iterator[dict[str, str]]:
    """The environment that leads to a server on the loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = answer({**body, "path": self.path}, dict(self.headers))
            reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield {"OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1/", "OPENAI_API_KEY": "k-1"}
        finally:
            server.shutdown()
            thread.join()


def test_the_model_is_shown_the_task_and_the_criteria_and_answers_for_each() -> None:
    seen: list[tuple[Mapping[str, Any], Mapping[str, str]]] = []

    def answer(body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, str]:
        seen.append((body, headers))
        return 200, f"<think>a {{brace}}</think>\n```json\n{review(honest='it only looks at the name')}\n```"

    with endpoint(answer) as environ:
        found = ask(TASK, "judge-7b", environ)
    [(body, headers)] = seen
    assert body["path"] == "/v1/chat/completions" and body["model"] == "judge-7b"
    assert headers["Authorization"] == "Bearer k-1"
    system, user = (message["content"] for message in body["messages"])
    assert all(name in system for name in CRITERIA)
    assert "sort words.txt > sorted.txt" in user and "Sort the lines of words.txt" in user
    assert found["honest"] == (False, "it only looks at the name") and found["fair"] == (True, "fine")


def test_an_answer_out_of_form_is_asked_for_again_and_then_given_up() -> None:
    replies = ["I think it is fine.", review()]
    with endpoint(lambda body, headers: (200, replies.pop(0))) as environ:
        assert all(holds for holds, _ in ask(TASK, "m", environ).values())
    with endpoint(lambda body, headers: (200, "no JSON here")) as environ:
        with pytest.raises(EndpointError, match="did not answer in the form"):
            ask(TASK, "m", environ)


def test_an_endpoint_that_refuses_or_is_not_there_is_named() -> None:
    with endpoint(lambda body, headers: (401, "")) as environ:
        with pytest.raises(EndpointError, match="answers 401"):
            ask(TASK, "m", environ)
    with pytest.raises(EndpointError, match="does not answer"):
        ask(TASK, "m", {"OPENAI_BASE_URL": "http://127.0.0.1:9"})
    with pytest.raises(EndpointError, match="set OPENAI_BASE_URL"):
        ask(TASK, "m", {})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"specified": true}', review().replace("true", '"yes"'), "}{"])
def test_what_is_no_review_raises(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_review(text)


@pytest.mark.parametrize(
    "answer, valid, reason",
    [
        (review(), True, ""),
        (review(fair="a coin is tossed"), False, "fair: a coin is tossed"),
        ("hm", None, "did not answer"),
    ],
)
def test_the_gate_follows_the_review(
    answer: str, valid: bool | None, reason: str, with_grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CommandConfig().narrowed("rubric", strict=False, rubric_model="judge-7b").admission
    with endpoint(lambda body, headers: (200, answer)) as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        validation = with_grader(lambda grader, _: validate_fully(TASK.files, grader, config=config))
    assert validation.valid is valid and reason in validation.gates[-1].reason


def test_a_review_that_nobody_asked_for_is_no_fault(with_grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    config = CommandConfig().narrowed("rubric", strict=False, rubric_model="").admission
    validation = with_grader(lambda grader, _: validate_fully(TASK.files, grader, config=config))
    assert validation.valid is True
    assert (validation.gates[-1].passed, validation.gates[-1].reason) == (None, "not asked for")
