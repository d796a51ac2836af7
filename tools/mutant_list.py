"""All mutants that the tests have to notice: see `tools.mutants`."""

from __future__ import annotations

from typing import Final

from tools.http_mutants import HTTP_MUTANTS
from tools.mutant import Mutant
from tools.serve_mutants import SERVE_MUTANTS
from tools.share_mutants import SHARE_MUTANTS

_GATE = "admission/gate.py"
_HEARTBEAT = "runtime/heartbeat.py"
_HEARTBEAT_TESTS = ("tests/runtime/test_heartbeat.py",)
_GATE_TESTS = ("tests/admission/test_gate.py",)
_FETCH_TESTS = ("tests/media/test_fetch.py",)
_DELIVERY_TESTS = ("tests/media/test_delivery.py",)
_DIAL_TESTS = ("tests/media/test_dial.py",)
_POLICY = "media/fetch/fetch_policy.py"
_POLICY_TESTS = ("tests/media/test_fetch_policy.py",)
_FILES_TESTS = ("tests/media/test_files.py",)
_PROBE_TESTS = ("tests/media/test_probe.py",)
_RAW_TESTS = ("tests/media/test_raw.py",)
_ASYNC_STORE_TESTS = ("tests/store/test_async_store.py",)
_SOURCE_TESTS = ("tests/media/test_source.py",)
_ANIMATION_TESTS = ("tests/media/test_animation.py",)

_ADMIT: Final = (
    Mutant(
        what="old grants count as recent",
        file=_GATE,
        old="[at_s for at_s in self._grants if now_s - at_s <= _RECENT_S]",
        new="list(self._grants)",
        tests=_GATE_TESTS,
    ),
    Mutant(
        what="one grant is a rate",
        file=_GATE,
        old="if len(recent) < 2:",
        new="if len(recent) < 1:",
        tests=_GATE_TESTS,
    ),
    Mutant(
        what="who is refused is not counted among those who wait",
        file=_GATE,
        old="(self.num_waiting + 1)",
        new="self.num_waiting",
        tests=_GATE_TESTS,
    ),
    Mutant(
        what="who finds no place hears nothing of when to come again",
        file=_GATE,
        old="except (StoreFull, NoPermitLeft, DeadlineExceeded)",
        new="except (StoreFull, DeadlineExceeded)",
        tests=_GATE_TESTS,
    ),
    Mutant(
        what="a limit of one is none",
        file=_GATE,
        old="return self._max_concurrency > 0",
        new="return self._max_concurrency > 1",
        tests=_GATE_TESTS,
    ),
    Mutant(
        what="a refusal counts as a grant",
        file=_GATE,
        old="            self._waits.observe(self._clock() - start_s)\n        self._grants",
        new="            self._waits.observe(self._clock() - start_s)\n            self._grants",
        tests=_GATE_TESTS,
    ),
    Mutant(
        what="nobody who waits for a turn is counted",
        file=_GATE,
        old="self._for_bytes.num_waiting + self._for_turn.num_waiting",
        new="self._for_bytes.num_waiting",
        tests=_GATE_TESTS,
    ),
    Mutant(
        what="a wait may be announced that is longer than a minute",
        file=_GATE,
        old="return min(max(expected_s, least), most)",
        new="return max(expected_s, least)",
        tests=_GATE_TESTS,
    ),
)

_INGEST: Final = (
    Mutant(
        what="text may follow the padding",
        file="media/body/base64_text.py",
        old="        if self._padded:\n            raise _malformed()\n",
        new="",
        tests=("tests/media/test_cutter.py",),
    ),
    Mutant(
        what="an item of exactly its limit is refused",
        file="media/fetch/delivery.py",
        old="if nbytes > self._max_nbytes:",
        new="if nbytes >= self._max_nbytes:",
        tests=_DELIVERY_TESTS,
    ),
    Mutant(
        what="a request of exactly its limit is refused",
        file="media/fetch/delivery.py",
        old="if self._taken_nbytes + nbytes > self._max_nbytes:",
        new="if self._taken_nbytes + nbytes >= self._max_nbytes:",
        tests=_DELIVERY_TESTS,
    ),
    Mutant(
        what="a failed fetch keeps its part of the budget",
        file="media/fetch/delivery.py",
        old="kept = 0 if kind else self.nbytes",
        new="kept = self.nbytes",
        tests=_DELIVERY_TESTS,
    ),
    Mutant(
        what="what was announced and did not come is kept",
        file="media/fetch/delivery.py",
        old="kept = 0 if kind else self.nbytes",
        new="kept = 0 if kind else self._taken_nbytes",
        tests=_DELIVERY_TESTS,
    ),
    Mutant(
        what="one public address of several is enough",
        file="media/fetch/dial.py",
        old="not all(map(is_public, addresses))",
        new="not any(map(is_public, addresses))",
        tests=("tests/media/test_fetch.py::test_every_answer_of_the_resolver_is_checked",),
    ),
    Mutant(
        what="all of a host's addresses are tried",
        file="media/fetch/dial.py",
        old="addresses[:_MAX_DIALLED]",
        new="addresses",
        tests=("tests/media/test_fetch.py::test_so_many_addresses_are_tried_and_no_more",),
    ),
    Mutant(
        what="a host's header has no end",
        file="media/fetch/dial.py",
        old="self._header_nbytes += len(data)",
        new="self._header_nbytes = len(data)",
        tests=_DIAL_TESTS,
    ),
    Mutant(
        what="a header is read in large steps",
        file="media/fetch/dial.py",
        old="min(max_bytes, _HEADER_STEP_NBYTES)",
        new="max_bytes",
        tests=_DIAL_TESTS,
    ),
    Mutant(
        what="the second answer of a connection has no bound",
        file="media/fetch/dial.py",
        old="        self._header_nbytes = 0  # the header of the next answer begins\n",
        new="",
        tests=_DIAL_TESTS,
    ),
    Mutant(
        what="a host is cut off before its time of grace is over",
        file="media/fetch/fetch.py",
        old="if elapsed_s > self._grace_s and delivery",
        new="if delivery",
        tests=_FETCH_TESTS,
    ),
    Mutant(
        what="each redirect has the whole time again",
        file="media/fetch/fetch.py",
        old="                left_s -= time.monotonic() - started\n",
        new="",
        tests=_FETCH_TESTS,
    ),
    Mutant(
        what="one more redirect is followed",
        file="media/fetch/fetch.py",
        old="range(_MAX_REDIRECTS + 1)",
        new="range(_MAX_REDIRECTS + 2)",
        tests=_FETCH_TESTS,
    ),
    Mutant(
        what="a compressed answer is taken as it is",
        file="media/fetch/fetch.py",
        old='if any(v.lower() != b"identity"',
        new='if any(v.lower() == b"gzip"',
        tests=_FETCH_TESTS,
    ),
    Mutant(
        what="hosts are remembered for ever",
        file="media/fetch/places.py",
        old="            if not named.num_users:\n                del self._names[name]\n",
        new="",
        tests=_FETCH_TESTS,
    ),
    Mutant(
        what="a request fetches as many at a time as it likes",
        file="media/fetch/fetch.py",
        old="        async with self._places:\n            with Delivery(",
        new="        if True:\n            with Delivery(",
        tests=_FETCH_TESTS,
    ),
    Mutant(
        what="a redirect may lead from https to http",
        file=_POLICY,
        old='source.scheme == "https" and target.scheme != "https"',
        new='source.scheme == "http" and target.scheme != "https"',
        tests=_POLICY_TESTS,
    ),
    Mutant(
        what="a URL may name a user",
        file=_POLICY,
        old='if not host or "@" in parts.netloc:',
        new="if not host:",
        tests=_POLICY_TESTS,
    ),
    Mutant(
        what="an address may name an interface",
        file=_POLICY,
        old="                and ip.scope_id is None\n",
        new="",
        tests=_POLICY_TESTS,
    ),
    Mutant(
        what="ISATAP with the universal bit is let through",
        file=_POLICY,
        old="0xFDFF_FFFF",
        new="0xFFFF_FFFF",
        tests=_POLICY_TESTS,
    ),
    Mutant(
        what="a cloud's own services are public",
        file=_POLICY,
        old='            "168.63.129.16/32",',
        new='            "168.63.129.17/32",',
        tests=_POLICY_TESTS,
    ),
    Mutant(
        what="a link in place of a file is followed",
        file="media/fetch/files.py",
        old="_FILE = os.O_RDONLY | os.O_NOFOLLOW | ",
        new="_FILE = os.O_RDONLY | ",
        tests=_FILES_TESTS,
    ),
    Mutant(
        what="the outer of two roots is taken first",
        file="media/fetch/files.py",
        old="key=lambda root: len(root.parts), reverse=True",
        new="key=lambda root: len(root.parts)",
        tests=_FILES_TESTS,
    ),
    Mutant(
        what="an orientation that there is not is taken",
        file="media/headers/header.py",
        old="1 <= found <= 8",
        new="1 <= found <= 9",
        tests=_PROBE_TESTS,
    ),
    Mutant(
        what="several orientations are one",
        file="media/headers/header.py",
        old=" or count != 1:",
        new=":",
        tests=_PROBE_TESTS,
    ),
    Mutant(
        what="chunks of WebP are not padded",
        file="media/headers/header.py",
        old="at += 8 + length + length % 2",
        new="at += 8 + length",
        tests=_PROBE_TESTS,
    ),
    Mutant(
        what="a JPEG with one segment too many is read",
        file="media/headers/header.py",
        old="_MAX_SEGMENTS: Final = 2048",
        new="_MAX_SEGMENTS: Final = 2049",
        tests=_PROBE_TESTS,
    ),
    Mutant(
        what="an image of exactly as many pixels as are accepted is refused",
        file="media/headers/probe.py",
        old="if width * height > limits.max_image_pixels:",
        new="if width * height >= limits.max_image_pixels:",
        tests=_PROBE_TESTS,
    ),
    Mutant(
        what="a side of one pixel is taken",
        file="media/headers/probe.py",
        old="_MIN_SIDE: Final = 2",
        new="_MIN_SIDE: Final = 1",
        tests=_PROBE_TESTS,
    ),
    Mutant(
        what="one orientation does not swap the sides",
        file="media/headers/probe.py",
        old="TRANSPOSED: Final = (5, 6, 7, 8)",
        new="TRANSPOSED: Final = (5, 6, 7)",
        tests=_PROBE_TESTS,
    ),
    Mutant(
        what="the heap's allowance is not given back",
        file="media/body/raw.py",
        old="        self._allowance.take(-self._allowed_nbytes)\n",
        new="",
        tests=_RAW_TESTS,
    ),
    Mutant(
        what="a block that is outgrown is kept",
        file="media/body/raw.py",
        old="self._store.discard(self._request_id, [old])",
        new="pass",
        tests=_RAW_TESTS,
    ),
    Mutant(
        what="the first block is larger than was announced",
        file="media/body/raw.py",
        old="min(nbytes, _MAX_STEP_NBYTES) if self.nbytes else 0",
        new="min(nbytes, _MAX_STEP_NBYTES)",
        tests=_RAW_TESTS,
    ),
    Mutant(
        what="an empty item keeps its block",
        file="media/body/raw.py",
        old="                self._store.discard(self._request_id, [handle])\n",
        new="                pass\n",
        tests=_RAW_TESTS,
    ),
    Mutant(
        what="an object beside others is aborted when one of its items moves on",
        file="media/body/raw.py",
        old="if old is not None and self._shared_start is None:",
        new="if old is not None:",
        tests=_SOURCE_TESTS,
    ),
    Mutant(
        what="a place in a shared object is beyond its end",
        file="media/body/shared_room.py",
        old="self._used[handle] + nbytes > handle.nbytes",
        new="self._used[handle] + nbytes > handle.nbytes + 64",
        tests=_SOURCE_TESTS,
    ),
    Mutant(
        what="what is expected takes the place of what is needed",
        file="media/body/shared_room.py",
        old="except (StoreFull, ArenaTooSmall):",
        new="except ArenaTooSmall:",
        tests=_SOURCE_TESTS,
    ),
    Mutant(
        what="the end of a request may be late",
        file="store/client/async_store.py",
        old="return request.handles is not None",
        new="return True",
        tests=_ASYNC_STORE_TESTS,
    ),
    Mutant(
        what="what may be late overtakes a call",
        file="store/client/async_store.py",
        old='self._channel.send_packed(b"".join(unsent))',
        new='self._channel.send_packed(b"".join(reversed(unsent)))',
        tests=_ASYNC_STORE_TESTS,
    ),
    Mutant(
        what="a data: URL need not say that it is base64",
        file="media/fetch/source.py",
        old='if not comma or not header.lower().endswith(";base64"):',
        new="if not comma:",
        tests=_SOURCE_TESTS,
    ),
    Mutant(
        what="a large item is hashed where it is called",
        file="media/body/digest.py",
        old="total < _WORTH_A_THREAD_NBYTES",
        new="total > _WORTH_A_THREAD_NBYTES",
        tests=("tests/media/test_digest.py",),
    ),
    Mutant(
        what="nobody else has a turn",
        file="media/body/pace.py",
        old="            await asyncio.sleep(0)\n",
        new="",
        tests=("tests/media/test_pace.py",),
    ),
)

_KEYS: Final = (
    Mutant(
        what="an image and a video of the same bytes have one key",
        file="keys.py",
        old='options = f"{modality} {max_pixels}".encode()',
        new='options = f"{max_pixels}".encode()',
        tests=("tests/test_keys.py",),
    ),
)

_RUNTIME: Final = (
    Mutant(
        what="a watcher that slept blames others",
        file=_HEARTBEAT,
        old="self._awake_s += min(now_s - self._looked_s, _MOST_BETWEEN_LOOKS_S)",
        new="self._awake_s += now_s - self._looked_s",
        tests=_HEARTBEAT_TESTS,
    ),
    Mutant(
        what="who was started again has the silence of the one before",
        file=_HEARTBEAT,
        old="before, self._heard = self._heard, {}",
        new="before = self._heard",
        tests=_HEARTBEAT_TESTS,
    ),
    Mutant(
        what="those that a silent one watches are silent, too",
        file=_HEARTBEAT,
        old="if self.place.watchers.get(name) not in silent",
        new="if name",
        tests=_HEARTBEAT_TESTS,
    ),
    Mutant(
        what="a folder of a living process is taken for one that was left",
        file="runtime/sockets.py",
        old="        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        new="",
        tests=("tests/runtime/test_sockets.py",),
    ),
)

_FRAMES: Final = (
    Mutant(
        what="a frame without a duration is shown for a millisecond",
        file="media/decode/animation.py",
        old="each if each > _LEAST_MS else _DEFAULT_MS",
        new="max(each, 1)",
        tests=_ANIMATION_TESTS,
    ),
    Mutant(
        what="a frame is shown for one step too long",
        file="media/decode/animation.py",
        old='side="right"',
        new='side="left"',
        tests=_ANIMATION_TESTS,
    ),
    Mutant(
        what="a frame may lie outside of the canvas",
        file="media/decode/animation.py",
        old="if x + across > width or y + down > height:",
        new="if x > width or y > height:",
        tests=_ANIMATION_TESTS,
    ),
    Mutant(
        what="composed frames that are not taken do not count",
        file="media/decode/animation.py",
        old="    check_decoded(len(shown_ms), found.width, found.height, limits)\n",
        new="",
        tests=_ANIMATION_TESTS,
    ),
    Mutant(
        what="a model has as many frames as a video has",
        file="media/decode/frames.py",
        old="min(MOST_FRAMES, limits.max_sampled_frames, limits.max_document_pages, total)",
        new="min(limits.max_sampled_frames, limits.max_document_pages, total)",
        tests=("tests/media/test_frames.py",),
    ),
)

MUTANTS: Final = (
    *_ADMIT,
    *_FRAMES,
    *_INGEST,
    *_KEYS,
    *_RUNTIME,
    *HTTP_MUTANTS,
    *SERVE_MUTANTS,
    *SHARE_MUTANTS,
)
