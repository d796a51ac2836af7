"""Videos for a model without video: questions about their frames, which are images for it."""

from __future__ import annotations

import base64
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.types import ObjectKind
from tests import animations
from tests.hostile_av import hostile_files
from tests.media_files import make_video
from tests.server import TINY_ENGINE, Server, data_url, image_part, wait_until

COLOURS = ("red", "blue", "green")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes no videos: its folder has a rule for them that is unsupported."""
    folder = tmp_path_factory.mktemp("stills") / "shapes"
    shutil.copytree(BUILT_IN_MODELS / "shapes", folder)
    path = folder / "video_preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_resize": False}))
    return folder


@pytest.fixture(scope="module")
def stills(folder: Path) -> Iterator[Server]:
    with Server(str(folder)) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_left(stills: Server) -> Iterator[None]:
    yield
    wait_until(lambda: pinned_nbytes(stills) == 0)


def pinned_nbytes(server: Server) -> int:
    with server.store() as store:
        kinds = store.stat().kinds
    return sum(kinds[kind].held_nbytes for kind in (ObjectKind.FEATURES, ObjectKind.RAW))


def circle(colour: str, at: tuple[int, int] = (72, 36)) -> Image.Image:
    image = Image.new("RGB", (240, 180), "white")
    ImageDraw.Draw(image).ellipse((*at, at[0] + 96, at[1] + 96), fill=colour)
    return image


def moving(
    rng: np.random.Generator,
    format: str = "GIF",
    colours: Sequence[str] = COLOURS,
    **options: Any,
) -> bytes:
    """Return a file with a circle each half second, at a place of its own."""
    x, y = (int(each) for each in rng.integers(40, 90, 2))
    frames = [circle(colour, (x, y)) for colour in colours]
    return animations.saved(format, frames, duration=500, **options)


def part(data: bytes, kind: str = "image/gif") -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def ask(server: Server, videos: Sequence[dict[str, Any]], question: str) -> Any:
    content = [*videos, {"type": "text", "text": question}]
    return server.post({"model": "shapes", "messages": [{"role": "user", "content": content}]})


def said(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("format", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("WEBP", {})]
)
def test_frame_of_a_video_is_named(
    stills: Server, rng: np.random.Generator, format: str, options: dict[str, Any]
) -> None:
    data = moving(rng, format, **options)
    stills_of = [Image.fromarray(frame) for frame in animations.pillows_frames(data)]
    images = [image_part(data_url(animations.saved("PNG", [frame]), "png")) for frame in stills_of]
    for number, colour in enumerate(COLOURS, 1):
        question = f"What is in picture {number}?"
        answer, expected = ask(stills, [part(data)], question), ask(stills, images, question)
        assert said(answer) == said(expected) == f"a {colour} circle"
        assert answer.json()["usage"] == expected.json()["usage"]
        made = "made=3" if number == 1 else "hit=3"
        assert answer.headers["x-afferent-items"] == made


def test_same_frame_in_another_video_is_a_hit(stills: Server, rng: np.random.Generator) -> None:
    one, two, three = (circle("red", (int(rng.integers(80)), at)) for at in (1, 2, 3))
    first = animations.saved("WEBP", [one, two], duration=500, lossless=True)
    other = animations.saved("WEBP", [three, two, one], duration=500, lossless=True)
    items = [
        ask(stills, [part(data)], "What is in picture 1?").headers["x-afferent-items"]
        for data in (first, other)
    ]
    assert items[0] == "made=2"
    assert sorted(items[1].split(", ")) == ["hit=2", "made=1"]


def test_mp4_becomes_frames(stills: Server) -> None:
    answer = ask(stills, [part(make_video(num_frames=90), "video/mp4")], "What is in picture 1?")
    assert said(answer)
    assert answer.headers["x-afferent-items"] == "made=6"


def test_conversation_about_a_video_is_continued(stills: Server, rng: np.random.Generator) -> None:
    url = part(moving(rng), "video/gif")["video_url"]["url"]
    client, then = stills.client(), {"type": "input_text", "text": "What is in picture 1?"}
    content: Any = [{"type": "input_file", "file_data": url, "filename": "a.gif"}, then]
    first = client.responses.create(model="shapes", input=[{"role": "user", "content": content}])
    asked = "What is in picture 3?"
    next = client.responses.create(model="shapes", input=asked, previous_response_id=first.id)
    assert (first.output_text, next.output_text) == ("a red circle", "a green circle")


def test_same_file_as_an_image_is_its_first_frame(stills: Server, rng: np.random.Generator) -> None:
    data = moving(rng, colours=COLOURS[::-1])
    url = part(data)["video_url"]["url"]
    image = {"type": "image_url", "image_url": {"url": url}}
    assert said(ask(stills, [image], "What is in the picture?")) == "a green circle"
    assert said(ask(stills, [part(data)], "What is in picture 3?")) == "a red circle"
    assert said(ask(stills, [image], "What is in the picture?")) == "a green circle"


def test_file_that_is_known_as_an_image_alone_is_needed_as_a_video(
    folder: Path, rng: np.random.Generator
) -> None:
    """A body that is too long is read without the bytes of known items.

    The tiny engine says the mean colours of each image as tokens. The frames are white but for a
    circle, whose own colour has the value 255: a token that is no text.
    """
    noise = Image.fromarray(rng.integers(0, 256, (450, 450, 3), dtype=np.uint8))
    known = [
        image_part(data_url(animations.saved("PNG", [noise]), "png")),
        image_part(data_url(moving(rng, "WEBP", lossless=True, exif=bytes(200_000)), "webp")),
    ]
    video = {"type": "video_url", "video_url": known[1]["image_url"]}
    with Server(str(folder), *TINY_ENGINE, "--max-body-nbytes", "1MiB") as server:
        for image in known:
            said(ask(server, [image], "What is in the picture?"))
        answers = [ask(server, [known[0], video], "What is in the pictures?") for _ in range(2)]
        assert answers[0].status_code == 503, answers[0].text
        red, blue, green = ("\ufffd\x0e\x0e", "\x0e\x0e\ufffd", "\x0e\ufffd\x0e")
        assert said(answers[1]) == 3 * "\ufffd" + red + blue + green


def test_model_with_video_takes_an_animation_as_one_item(
    server: Server, rng: np.random.Generator
) -> None:
    video = part(moving(rng))
    for outcome in ("made=1", "hit=1"):
        answer = ask(server, [video], "What is in the video?")
        assert said(answer)
        assert answer.headers["x-afferent-items"] == outcome


def test_video_by_its_name_alone_has_to_be_sent(stills: Server) -> None:
    video = {"type": "video_url", "video_url": None, "uuid": "my-video"}
    answer = ask(stills, [video], "What?")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "media_not_cached")
    assert answer.json()["error"]["uuids"] == ["my-video"]


def test_too_many_videos_are_refused(stills: Server, rng: np.random.Generator) -> None:
    video = part(moving(rng))
    body = {"model": "shapes", "messages": [{"role": "user", "content": [video] * 9}]}
    answer = stills.post(body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_items")
    assert "--max-videos" in answer.text


def test_hostile_videos_get_a_4xx_and_leave_nothing(
    stills: Server, rng: np.random.Generator
) -> None:
    seed = int(rng.integers(1 << 30))
    print(f"seed of the files: {seed}")
    files = [*animations.hostile_animations()]
    files += [(name, data) for name, kind, data in hostile_files(seed, 60) if kind == "video"]
    outcomes: Counter[str] = Counter()
    for name, data in files:
        answer = ask(stills, [part(data, "video/mp4")], "What?")
        outcome = "ok" if answer.status_code == 200 else answer.json()["error"]["code"]
        outcomes[outcome] += 1
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, (name, answer.text)
    print(dict(outcomes))
    assert {"invalid_media", "media_too_large"} <= {*outcomes}
    assert said(ask(stills, [part(moving(rng))], "What is in picture 2?")) == "a blue circle"
    wait_until(lambda: len(stills.preprocess_workers()) == 2)
