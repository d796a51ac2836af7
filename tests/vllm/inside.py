"""The checks that `test_inside.py` runs in vLLM's own environment."""

from __future__ import annotations

import ast
import base64
import functools
import io
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import mistral_common
import msgspec
import numpy as np
import torch
import vllm
from PIL import Image
from vllm.config import CompilationConfig, ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector
from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding.data import (
    make_embedding_key,
)
from vllm.distributed.kv_events import EventBatch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.multimodal.media import MediaWithBytes
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from afferent import keys
from afferent.engines import item_events, place
from afferent.engines.references import FeaturesReference, Of, RawReference, sign
from afferent.engines.vllm import items
from afferent.engines.vllm.plugin import ec, probe
from afferent.engines.vllm.plugin import labels as plugin_labels
from afferent.engines.vllm.plugin import mistral as plugin_mistral
from afferent.engines.vllm.plugin import models as plugin_models
from afferent.engines.vllm.plugin import names as plugin_names
from afferent.engines.vllm.plugin.arena import Arena
from afferent.engines.vllm.plugin.embeddings import KeptEmbeddings
from afferent.engines.vllm.plugin.hooks import ALL, SUPPORTED, Hook
from afferent.engines.vllm.plugin.processing import FIELD
from afferent.engines.vllm.plugin.sources import Sources
from afferent.engines.vllm.plugin.step import Located, Step
from afferent.engines.vllm.plugin.step_pins import PinnedStep
from afferent.engines.vllm.plugin.transfer import Stopwatch
from afferent.errors import FormatError
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.results import Hit
from afferent.store.state.region import DEFAULT_SHARES
from afferent.types import ContentKey, Handle, MiB, Modality, ObjectKind


def there_and_back(item: MultiModalKwargsItem, **limits: int) -> MultiModalKwargsItem:
    tree = items.to_tree(item)
    block = memoryview(bytearray(codec.plan(tree, **limits).nbytes))
    codec.write_into(tree, block, **limits)
    return items.from_tree(codec.view(block, tensors="torch", **limits))


def refused(call: Callable[[], object], kind: type[Exception] = FormatError) -> str:
    """Return the error message, as pytest is not installed there."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def fields() -> None:
    """All kinds of fields: nested tensors, tuples, slices of one dimension or of more."""
    flat = MultiModalFlatField(slices=[slice(0, 2), slice(2, None, 3)], dim=1)
    deep = MultiModalFlatField(slices=[[slice(0, 1), slice(None)], [slice(1, 2), slice(0, 4)]])
    nested = [torch.arange(3), (torch.ones(2, dtype=torch.bfloat16), [torch.zeros(0)])]
    given = MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(torch.rand(4, 6), flat),
            "deep": MultiModalFieldElem(torch.rand(2, 4), deep),
            "grid": MultiModalFieldElem(
                torch.tensor([1, 2, 3]), MultiModalBatchedField(keep_on_cpu=True)
            ),
            "shared": MultiModalFieldElem(torch.tensor(5), MultiModalSharedField(batch_size=3)),
            "nested": MultiModalFieldElem(nested, MultiModalBatchedField()),
            "none": MultiModalFieldElem(None, MultiModalBatchedField()),
        }
    )
    found = there_and_back(given)
    assert list(found) == list(given)
    for name, element in given.items():
        assert found[name] == element, name
        assert found[name].field == element.field, name
    assert isinstance(found["nested"].data[1], tuple)
    several = MultiModalKwargsItems({"image": [given, None], "audio": [given]})
    assert items.to_tree(several).keys() == {"image", "audio"}
    assert items.to_tree(several)["image"][1] is None
    assert list(items.to_tree(several)["image"][0]) == list(given)


def many() -> None:
    """An item of 100,000 tensors needs a larger header, which both sides have to request."""
    item = MultiModalKwargsItem(
        {"all": MultiModalFieldElem([torch.tensor([n]) for n in range(100_000)], _BATCHED)}
    )
    assert "1048576" in refused(lambda: codec.plan(items.to_tree(item)))
    found = there_and_back(item, max_header_nbytes=16 << 20)
    assert [int(each) for each in found["all"].data] == list(range(100_000))


def refusals() -> None:
    for tree in ({"x": 1}, {"x": {"data": 1, "kind": "other", "options": {"keep_on_cpu": True}}}):
        refused(functools.partial(items.from_tree, tree))
    model: Any = plugin_models.subclass(Qwen2VLForConditionalGeneration)
    config = SimpleNamespace(compilation_config=CompilationConfig(cudagraph_mm_encoder=True))
    why = refused(functools.partial(model, vllm_config=config), ValueError)
    assert why == "Afferent: cudagraph_mm_encoder goes around the arena; leave it off"


def hooks() -> None:
    """This version of vLLM has all hooks of the plugin, imported and by its source code; the probe
    names a missing one, and refuses other versions.
    """
    probe.check()
    assert probe.missing() == []
    assert probe.has_stable_names()
    sources = Sources(Path(vllm.__path__[0]).parent)
    assert probe.missing(ALL, sources.find) == []
    lacking = [
        Hook("vllm.multimodal.parse", "ModalityDataItems.get_count", ("colour",)),
        Hook("vllm.nothing", "at_all"),
    ]
    expected = ["vllm.multimodal.parse.ModalityDataItems.get_count(colour)", "vllm.nothing.at_all"]
    assert probe.missing(lacking) == probe.missing(lacking, sources.find) == expected
    with mock.patch.object(vllm, "__version__", "0.1.0"):
        said = refused(probe.check, RuntimeError)
        assert f"supports vLLM {', '.join(SUPPORTED)}, and this is 0.1.0" in said
        with mock.patch.dict(os.environ, {probe.ANY_VERSION: "1"}):
            probe.check()


def events() -> None:
    """vLLM's own struct decodes batches of item events."""
    stored = item_events.ItemStored("ab" * 32, ObjectKind.FEATURES, 9, Modality.IMAGE, "cd" * 32)
    removed = item_events.ItemRemoved("ab" * 32, ObjectKind.EMBEDDINGS)
    batch = item_events.pack_batch([stored, removed], now_s=1.5)
    found = msgspec.msgpack.decode(batch, type=EventBatch)
    assert (found.ts, found.data_parallel_rank) == (1.5, None)
    assert [each["type"] for each in found.events] == ["ItemStored", "ItemRemoved"]
    assert found.events == msgspec.to_builtins([stored, removed])


def names() -> None:
    """Names of items have the form of vLLM's own, and each connector of its wheel takes them."""
    reference = FeaturesReference(
        *(Modality.IMAGE, bytes(range(32)), Handle(1, 0, 64, 1), 5, 5),
        *(((5, 4),), {}, 1e12),
    )
    own = MultiModalHasher.hash_kwargs("blake3", model_id="m", image=Image.new("RGB", (4, 3)))
    for name in (own, reference.name, reference.name_of_block):
        assert re.fullmatch("[0-9a-f]{64}", name), name
        assert _of_lmcache("hex_hash_to_int16")(name) == int(name[-4:], 16)
        assert make_embedding_key("m", name).endswith(name)
        with tempfile.TemporaryDirectory() as folder:
            for connector, arguments in (
                (ECExampleConnector, (name,)),
                (example_connector.ExampleConnector, ("layer", torch.zeros(3), [name])),
            ):
                each: Any = object.__new__(connector)
                each._storage_path = folder
                Path(each._generate_filename_debug(*arguments)).touch()


def _of_lmcache(function: str) -> Callable[[str], int]:
    """Return a function of the connector for LMCache, whose package is not installed here."""
    folder = Path(example_connector.__file__).parent
    tree = ast.parse((folder / "lmcache_integration" / "utils.py").read_text())
    names: dict[str, Any] = {}
    (found,) = [each for each in ast.walk(tree) if getattr(each, "name", "") == function]
    exec(ast.unparse(found), names)  # noqa: S102 the code of the installed vLLM
    return cast("Callable[[str], int]", names[function])


def connector() -> None:
    """The connector keeps a step's pins in the core, and sends its items to the workers."""
    key, where = bytes(range(32)), Located((1, 2), Handle(1, 0, 64, 1))
    pinned = PinnedStep(Step(7, {key: where}), ())
    there = pickle.loads(pickle.dumps(ec.StepMetadata(pinned)))  # noqa: S301 our own
    assert there.step == pinned.step
    config: Any = SimpleNamespace(ec_connector="AfferentConnector")
    assert plugin_names.is_ours(config)
    ec.register()
    resolve = VllmConfig._resolve_mm_embedding_inputs
    ec.register()
    assert VllmConfig._resolve_mm_embedding_inputs is resolve
    for is_encoder_decoder, own, wanted in (
        (False, None, "AfferentConnector"),
        (True, None, None),
        (False, ECTransferConfig(ec_connector="X", ec_role="ec_both"), "X"),
    ):
        multimodal = SimpleNamespace(enable_mm_embeds=False, allow_missing_mm_embeddings=False)
        model = SimpleNamespace(multimodal_config=multimodal, is_encoder_decoder=is_encoder_decoder)
        vllm_config: Any = SimpleNamespace(
            model_config=model,
            ec_transfer_config=own,
            kv_transfer_config=None,
            parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        )
        for _ in range(2):  # vLLM makes some configurations again
            resolve(vllm_config)
            found = getattr(vllm_config.ec_transfer_config, "ec_connector", None)
            assert found == wanted
            assert plugin_names.are_stable() == (wanted == "AfferentConnector")
            assert multimodal.enable_mm_embeds == (wanted == "X")
    kv: Any = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": [{"kv_connector": "LMCacheConnectorV1"}]},
        is_kv_consumer=True,
    )
    vllm_config.kv_transfer_config = kv
    resolve(vllm_config)
    assert plugin_names.are_shortened()


def arrivals() -> None:
    """The store is asked for a request's features when the engine core receives the request."""
    key = keys.digest(b"item")
    config: Any = SimpleNamespace(
        ec_transfer_config=ECTransferConfig(ec_connector="X", ec_role="ec_consumer"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
    with StoreServer(64 * MiB, shares=DEFAULT_SHARES) as server:
        os.environ[place.SECRET], os.environ[place.STORE] = "00" * 16, server.address
        with DaemonStore(server.address, name="front", writable=True) as front:
            handle = front.put("request", {"x": np.zeros(16)}, key=key)
            found = ec.AfferentConnector(config, ec.ECConnectorRole.SCHEDULER)
            _wait_until(lambda: found._pins._is_open)
            scheduler = SimpleNamespace(get_ec_connector=lambda: found)
            core: Any = SimpleNamespace(
                mm_receiver_cache=None, request_block_hasher=None, scheduler=scheduler
            )
            numbers = [handle.segment, handle.offset, handle.nbytes, handle.generation, 4]
            words = np.frombuffer(key, np.int64).tolist()
            row = MultiModalFieldElem(torch.tensor([*numbers, *words]), MultiModalBatchedField())
            item = MultiModalKwargsItem({FIELD.format("image"): row})
            where = PlaceholderRange(offset=1, length=4)
            feature = MultiModalFeatureSpec(item, "image", "name", where)
            arrived, _ = EngineCore.preprocess_add_request(core, _request([feature]))
            _wait_until(lambda: key in found._pins._found)
            os.kill(server.pid, signal.SIGSTOP)  # it would answer no question
            try:
                assert found.ensure_cache_available(arrived, 0)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            found.request_finished(arrived)
            EngineCore.preprocess_add_request(core, _request([feature]))
            _wait_until(lambda: key in found._pins._found)
            found.request_finished(arrived)  # which the scheduler has never looked at
            assert key not in found._pins._found
            scheduler.get_ec_connector = lambda: None
            EngineCore.preprocess_add_request(core, _request([feature]))
            found.shutdown()


def _request(features: list[MultiModalFeatureSpec]) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1] * 8,
        mm_features=features,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def labels() -> None:
    """Decoded items of every modality, and their parsed forms, carry the id of their request."""
    of = Of("request-1", 1, 3)
    image: Any = MediaWithBytes(Image.new("RGB", (4, 3)), b"file")
    video: Any = MediaWithBytes((torch.zeros(2, 3, 4, 3), {"fps": 1.0}), b"file")
    audio = (torch.zeros(16).numpy(), 16_000)
    shown = [plugin_labels.labelled(each, of) for each in (image, video, audio)]
    assert [each[0].shape for each in shown[1:]] == [video.media[0].shape, audio[0].shape]
    assert isinstance(shown[2], tuple)
    for found in (shown, [{"image": shown[0]}, {"video": shown[1]}, {"audio": shown[2]}]):
        parsed = SimpleNamespace()
        plugin_labels.pass_on(found, parsed)
        assert plugin_labels.labels_in({"any": parsed}) == [of] * 3
    parsed = SimpleNamespace()
    plugin_labels.pass_on([audio, torch.zeros(2)], parsed)
    assert plugin_labels.labels_in({"any": parsed}) == []


def mistral() -> None:
    """Mistral's own tokenizer gets the bytes of media handles, or the tokens of their features; no
    other string is touched.
    """
    folder = _mistrals_folder()
    tokenizer: Any = MistralTokenizer.from_pretrained(folder)
    unchanged: Any = MistralTokenizer.from_pretrained(folder)
    stock = type(tokenizer)
    for _ in range(2):
        plugin_mistral.open_handles(tokenizer)
    assert isinstance(tokenizer, stock)
    plugin_mistral.open_handles(other := SimpleNamespace())
    assert type(other) is SimpleNamespace
    file = io.BytesIO()
    Image.new("RGB", (70, 40), (200, 30, 10)).save(file, "PNG")
    os.environ[place.SECRET] = "00" * 16
    with StoreServer(64 * MiB, shares=DEFAULT_SHARES) as server:
        where = place.Place(server.address)
        os.environ[place.STORE] = server.address
        with DaemonStore(server.address, name="front", writable=True) as front:
            handle = front.put("request", {"x": np.frombuffer(file.getvalue(), np.uint8)})
            block = bytes(front.block(handle))
            at = block.index(file.getvalue())
            raw = RawReference(Modality.IMAGE, handle, at, len(file.getvalue()), time.time() + 60)
            url = sign(raw, where.secret())
            data = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            text = "afferent: is a text here"
            assert _prompt(tokenizer, url, text) == _prompt(unchanged, data, text)
            assert url.startswith("afferent:")
            runs = ((10, 3), (12, 1), (10, 3), (13, 1))
            features = FeaturesReference(
                *(Modality.IMAGE, bytes(32), handle, (10,), 10, runs, {}, 1e12),
                has_own_tokenizer=True,
            )
            plugin_mistral.check_format(features, tokenizer)
            _assert_refused(functools.partial(plugin_mistral.check_format, features, other))
            of_others = msgspec.structs.replace(features, has_own_tokenizer=False)
            plugin_mistral.check_format(of_others, other)
            _assert_refused(functools.partial(plugin_mistral.check_format, of_others, tokenizer))
            made = _prompt(tokenizer, sign(features, where.secret()), text)
            start = made.index(10)
            assert features.token_ids() == [10, 10, 10, 12, 10, 10, 10, 13]
            assert made[start : start + 8] == features.token_ids()
            of_video = msgspec.structs.replace(features, modality=Modality.VIDEO)
            bad_urls = (sign(of_video, where.secret()), url[:-2], data, "file:///etc/hostname")
            for bad in bad_urls:
                _assert_refused(functools.partial(_prompt, tokenizer, bad, text))
            for part in (
                {"type": "image", "url": "file:///etc/hostname"},
                {"type": "image", "path": "/etc/hostname", "image_url": {"url": url}},
                {"type": "audio", "url": "http://127.0.0.1:9/"},
                {"type": "audio", "base64": "UklGRg=="},
                {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            ):
                messages = [{"role": "user", "content": [part]}]
                _assert_refused(functools.partial(tokenizer.apply_chat_template, messages))


def _prompt(tokenizer: Any, url: str, text: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": parts}]
    made = tokenizer.apply_chat_template(messages)
    assert parts[0]["image_url"] == {"url": url}
    return made


def _assert_refused(call: Callable[[], Any]) -> None:
    try:
        call()
    except ValueError:
        return
    raise AssertionError("it was not refused")


def _mistrals_folder() -> str:
    """Return a folder with a tokenizer of the package, under the name of a model's."""
    folder = tempfile.mkdtemp()
    data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    (Path(folder) / "tekken.json").symlink_to(data)
    return folder


def killed() -> None:
    """The store is killed between a lookup and the read of its result.

    The read returns the right embeddings or none; then everything works again.
    """
    os.environ[place.SECRET] = "00" * 16
    with StoreServer(64 * MiB, shares=DEFAULT_SHARES) as server:
        arena = Arena(place.Place(server.address), name="worker")
        _kill_between(server, arena)
        arena.close()


def _kill_between(server: StoreServer, arena: Arena) -> None:
    wanted = [ContentKey(keys.digest(b"item %d" % number)) for number in range(3)]
    config: Any = SimpleNamespace(
        model=str(BUILT_IN_MODELS / "shapes"),
        dtype=torch.float32,
        quantization=None,
        multimodal_config=None,
    )
    kept = KeptEmbeddings(arena, config, publishes=True, row_nbytes=lambda: 28)
    _wait_until(lambda: kept._cache is not None)
    rows = [torch.full((5, 7), float(number)) for number in range(3)]
    look_up = arena.store.acquire

    def look_up_and_kill(*args: Any) -> Any:
        outcomes = look_up(*args)
        assert all(isinstance(outcome, Hit) for outcome in outcomes)
        before = server.pid
        os.kill(before, signal.SIGKILL)
        _wait_until(lambda: _is_another(server, before))
        return outcomes

    for _ in range(2):
        _publish(arena, kept, wanted, rows)
        arena.store.acquire = look_up_and_kill  # type: ignore[method-assign]
        found = kept.find(wanted, torch.device("cpu"))
        arena.store.acquire = look_up  # type: ignore[method-assign]
        for each, right in zip(found, rows, strict=True):
            assert each is None or torch.equal(each, right)
        _wait_until(lambda: arena.capacity_nbytes(ObjectKind.EMBEDDINGS) > 0)
        assert kept.find(wanted, torch.device("cpu")) == [None] * 3


def _is_another(server: StoreServer, before: int) -> bool:
    try:
        DaemonStore(server.address, name="looker").close()
    except Exception:
        return False
    return server.pid != before


def _publish(
    arena: Arena, kept: KeptEmbeddings, wanted: Sequence[ContentKey], rows: list[torch.Tensor]
) -> None:
    with arena.request("features") as request:
        handles = [
            arena.store.put(request, {"x": row}, key=key)
            for key, row in zip(wanted, rows, strict=True)
        ]
        made = dict(zip(wanted, zip(handles, rows, strict=True), strict=True))
        kept.publish(made, Stopwatch(torch.device("cpu")))
        _wait_until(lambda: kept._unwritten_nbytes == 0)
    for each, right in zip(kept.find(wanted, torch.device("cpu")), rows, strict=True):
        assert each is not None
        assert torch.equal(each, right)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


_BATCHED = MultiModalBatchedField()

if __name__ == "__main__":
    whats = (
        fields,
        many,
        refusals,
        hooks,
        events,
        names,
        connector,
        arrivals,
        labels,
        mistral,
        killed,
    )
    {what.__name__: what for what in whats}[sys.argv[1]]()
