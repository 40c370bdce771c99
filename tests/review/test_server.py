"""The server answers its own page only, and opens no path that a request names."""

import asyncio
import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from certvol.errors import UserError
from certvol.predict.random_sample import STRATA
from certvol.review.guesses import no_guesses
from certvol.review.server import MOST_BODY, listen, make_app
from certvol.review.session import LARGEST_SIDE, Session
from certvol.review.target import find_images, newer_images, open_target
from support.made_runs import MadeRun
from support.reviews import TOKEN, made_for_review, review, session_of, stored

HOST = "127.0.0.1:8765"
POST = {"origin": f"http://{HOST}", "content-type": "application/json"}


@dataclass(frozen=True)
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """Send requests to the application, without a network."""

    def __init__(self, session: Session) -> None:
        self.app = make_app(session, TOKEN)

    def ask(
        self,
        path: str,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        parts: list[bytes] | None = None,
    ) -> Answered:
        given = {"host": HOST} | (headers or {})
        waiting = [
            {"type": "http.request", "body": part, "more_body": True} for part in parts or []
        ]
        waiting.append({"type": "http.request", "body": b"", "more_body": False})
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return waiting.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        asyncio.run(self.app(scope, receive, send))  # type: ignore[arg-type]
        start, *rest = sent
        self.unread = len(waiting)
        found = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answered(start["status"], found, b"".join(each.get("body", b"") for each in rest))

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answered:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask(f"/{TOKEN}/{path}", "POST", POST if headers is None else headers, [text])


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return made_for_review(tmp_path)


@pytest.fixture
def client(made: MadeRun) -> Iterator[Client]:
    with session_of(made) as session:
        yield Client(session)


def first_item(client: Client) -> dict[str, Any]:
    return dict(json.loads(client.ask(f"/{TOKEN}/data").body)["items"][0])


@pytest.mark.parametrize("path", ["", "assets/review.js", "data", "image/0"])
def test_every_answer_has_safe_headers(client: Client, path: str) -> None:
    found = client.ask(f"/{TOKEN}/{path}")
    assert found.status == 200
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"
    assert found.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "path", ["/", "/data", "/wrong/data", "/a-secre/", "/a-secret2/data", "//", "*", "foo", ""]
)
def test_without_the_token_nothing_is_shown(client: Client, path: str) -> None:
    found = client.ask(path)
    assert found.status == 403
    assert "content-security-policy" in found.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8765"},
        {"host": "127.0.0.1.evil.example:8765"},
        {"host": ""},
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_pages_can_neither_read_nor_label(
    client: Client, made: MadeRun, headers: dict[str, str]
) -> None:
    assert client.ask(f"/{TOKEN}/data", headers=headers).status == 403
    body = {"item": 0, "answer": "none"}
    assert client.post("answer", body, POST | headers).status == 403
    assert stored(made) == []


def test_an_answer_needs_an_origin_and_json(client: Client, made: MadeRun) -> None:
    body = {"item": 0, "answer": "none"}
    assert client.post("answer", body, {"content-type": "application/json"}).status == 403
    form = {**POST, "content-type": "text/plain"}
    assert client.post("answer", body, form).status == 415
    assert client.ask(f"/{TOKEN}/answer").status == 405
    assert stored(made) == []
    local = {**POST, "host": "localhost:9000", "origin": "http://localhost:9000"}
    assert client.post("answer", body, local).status == 200  # a port forwarded by ssh
    assert len(stored(made)) == 1


def test_a_large_body_is_refused_before_it_is_read(client: Client, made: MadeRun) -> None:
    parts = [b"x" * MOST_BODY] * 1000
    found = client.ask(f"/{TOKEN}/answer", "POST", POST, parts)
    assert found.status == 413
    assert client.unread > 990
    assert stored(made) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 4000,
        {},
        {"item": -1, "answer": "none"},
        {"item": 10**6, "answer": "none"},
        {"item": True, "answer": "none"},
        {"item": "0", "answer": "none"},
        {"item": 0, "answer": "undone"},
        {"item": 0, "answer": ["class"]},
        {"item": 0, "answer": "class"},
        {"item": 0, "answer": "class", "label": 3},
        {"item": 0, "answer": "class", "label": -1},
        {"item": 0, "answer": "class", "label": "apple"},
        {"item": 0, "answer": "class", "label": 1.0},
    ],
)
def test_an_answer_that_does_not_fit_is_refused(client: Client, made: MadeRun, body: Any) -> None:
    assert client.post("answer", body).status == 400
    assert stored(made) == []


@pytest.mark.parametrize(
    "path",
    [
        "image/../../../etc/passwd",
        "image/%2e%2e%2fconfig.yaml",
        "image/-1",
        "image/1e3",
        "image/99999999999999999999",
        "image/" + "9" * 5000,
        "image/²",
        "image/0/../../run/config.yaml",
        "assets/../server.py",
        "assets/..%2fserver.py",
        "assets/%2e%2e/server.py",
        "assets//etc/passwd",
        "assets/review.html.py",
    ],
)
def test_no_path_of_a_request_is_opened(client: Client, path: str) -> None:
    assert client.ask(f"/{TOKEN}/{path}").status == 404


def test_images_are_made_smaller_and_named_by_number(tmp_path: Path) -> None:
    made = made_for_review(tmp_path, distinct=1)
    Image.new("RGB", (4000, 1000), (1, 2, 3)).save(made.target / made.names[0])
    with session_of(made) as session:
        found = Client(session).ask(f"/{TOKEN}/image/0")
    assert found.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(found.body)).size == (LARGEST_SIDE, LARGEST_SIDE // 4)


def test_an_image_that_is_gone_or_damaged_is_said_to_be_unreadable(made: MadeRun) -> None:
    with session_of(made) as session:
        file = Path(str(session.files[session.items[0].row]))
        file.write_bytes(b"no image")
        assert Client(session).ask(f"/{TOKEN}/image/0").status == 410


def test_answers_are_stored_and_taken_back(client: Client, made: MadeRun) -> None:
    item = first_item(client)
    label = item["likeliest"][0]
    found = client.post("answer", {"item": 0, "answer": "class", "label": label})
    assert json.loads(found.body)["estimates"]["random"] == 1
    assert [each.label for each in stored(made)] == [made.classes[label]]
    assert first_item(client)["answer"] == {"answer": "class", "label": label}
    assert json.loads(client.post("undo", {}).body)["item"] == 0
    assert json.loads(client.post("undo", {}).body)["item"] is None
    assert stored(made) == []


def test_the_page_gets_no_more_for_more_images(tmp_path: Path) -> None:
    sizes = []
    for count in (200, 20_000):
        made = made_for_review(tmp_path / str(count), count, distinct=1, measures=False)
        with session_of(made, labels=50) as session:
            sizes.append(len(Client(session).ask(f"/{TOKEN}/data").body))
    assert sizes[1] < 1.1 * sizes[0]


def test_an_answer_is_quick_with_many_images_and_labels(tmp_path: Path) -> None:
    """In processor time: the machine may be busy."""
    made = made_for_review(tmp_path, 20_000, distinct=1, measures=False)
    with session_of(made, labels=400) as session:
        rows = [item.row for item in session.items]
        session.labels.add(*[review(made, row) for row in rows[1:]])
        client = Client(session)
        first_item(client)
        before = time.process_time()
        assert client.post("answer", {"item": 0, "answer": "none"}).status == 200
        assert time.process_time() - before < 0.5


def test_a_full_disk_is_told_and_not_taken_for_an_answer(made: MadeRun) -> None:
    with session_of(made) as session:
        (made.path / "review.csv").mkdir()
        found = Client(session).post("answer", {"item": 0, "answer": "none"})
        assert found.status == 507
        assert b"cannot write" in found.body
        assert session.labels.reviews == []


def test_images_that_were_moved_are_found_again(made: MadeRun, tmp_path: Path) -> None:
    target = open_target(made.path)
    moved = made.target.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"not in .* any more; .* --images FOLDER"):
        find_images(target, None)
    assert find_images(target, moved) == [str(moved / path) for path in target.paths]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds none of the run's 60 target images"):
        find_images(target, tmp_path / "empty")


def test_images_that_changed_after_the_run_are_found(made: MadeRun) -> None:
    target = open_target(made.path)
    files = find_images(target, None)
    assert newer_images(target, files) == []
    changed = made.target / made.names[3]
    late = target.run.predictions.stat().st_mtime + 10
    os.utime(changed, (late, late))
    assert newer_images(target, [None, *files]) == [str(changed)]


def test_a_path_of_the_run_that_leads_out_of_the_folder_is_not_opened(made: MadeRun) -> None:
    secret = made.path.parent / "secret.png"
    Image.new("RGB", (9, 9)).save(secret)
    table = made.path / "predictions.csv"
    for name in ("measures.csv", "predictions.csv"):
        table = made.path / name
        table.write_text(table.read_text().replace(made.names[0], "../secret.png", 1))
    files = find_images(open_target(made.path), None)
    assert files.count(None) == 1


def answer_rounds(session: Session, end: int) -> None:
    for number in range(end):
        if session.labels.answer_of(session.target.paths[session.items[number].row]) is None:
            session.give(number, "none", None)


def test_chosen_labels_count_as_random_once_their_round_is_answered(made: MadeRun) -> None:
    with session_of(made, labels=10) as session:
        answer_rounds(session, 20)
        chosen = {item.row for item in session.items[10:]}
        assert session.estimates().random == 10
    with session_of(made, labels=60) as session:
        places = [i for i, item in enumerate(session.items) if item.row in chosen]
        first = places[0] // STRATA * STRATA
        early = [place for place in places if first <= place < first + STRATA]
        answer_rounds(session, first)
        assert session.estimates().random == first
        for number in range(first, first + STRATA):
            open_before = session.labels.answer_of(path_of(session, early[0]))
            assert open_before is not None
            if number not in early:
                assert open_before.kind == "chosen"
                session.give(number, "none", None)
                last = number
        assert session.estimates().random == first + STRATA
        assert session.undo() == last


def path_of(session: Session, number: int) -> str:
    return session.target.paths[session.items[number].row]


def test_a_larger_number_of_labels_changes_nothing_until_they_are_given(made: MadeRun) -> None:
    with session_of(made, labels=10) as session:
        answer_rounds(session, 20)
        figures = session.estimates().data()
    data = (made.path / "review.csv").read_bytes()
    with session_of(made, labels=60) as session:
        assert session.estimates().data() == figures
    assert (made.path / "review.csv").read_bytes() == data


def test_without_stored_guesses_the_predicted_class_is_likeliest(made: MadeRun) -> None:
    with session_of(made) as session:
        bare = Session(
            session.target, session.items, session.files, no_guesses(session.target),
            session.labels, 0.05,
        )  # fmt: skip
        first = bare.page_data()["items"][0]
        assert first["likeliest"] == [int(made.predicted_N[session.items[0].row])]


def test_a_port_that_is_taken_is_a_users_error() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="give another --port"):
            listen(port)
    with pytest.raises(UserError, match="between 0 and 65535"):
        listen(99999)
