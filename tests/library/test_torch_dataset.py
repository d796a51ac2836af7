"""`afferent.FeatureDataset` and `Collator`, against the models' own processors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    MiniCPMV4_6ForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
)

from afferent import Collator, FeatureDataset, Features, Modality, Sample, SharedItem
from afferent.errors import ConfigError, InvalidRequest, UnsupportedMedia
from afferent.media.families.hub import BUILT_IN_MODELS
from tests.engine import families
from tests.images import photo
from tests.library.test_float_features import processor_of
from tests.media.folders import make_gemma3
from tests.media.golden_features import MEDIA

pytestmark = pytest.mark.timeout(180)

SHAPES = BUILT_IN_MODELS / "shapes"


@pytest.fixture(scope="module")
def pool() -> Iterator[Features]:
    with Features("shapes", where="pool", num_workers=1) as features:
        yield features


def samples_of(collator: Collator, count: int) -> list[Sample]:
    """Return samples with one image or two, of different sizes."""
    marker = collator.markers[Modality.IMAGE]
    found = []
    for number in range(count):
        images = [photo(60 + 30 * number, 80, number), photo(90, 60, number)][: 1 + number % 2]
        found.append(Sample(f"Look: {', '.join([marker] * len(images))}, number {number}", images))
    return found


def test_a_batch_equals_that_of_the_models_own_processor(tmp_path: Path) -> None:
    make_gemma3(tmp_path, size={"height": 64, "width": 64})
    processor = AutoProcessor.from_pretrained(tmp_path)
    with Features(tmp_path) as features:
        collator = Collator(features)
        samples = samples_of(collator, 4)
        dataset = FeatureDataset(features, samples, form="hf")
        made = collator([dataset[index] for index in range(len(dataset))])
        expected = processor(
            text=[sample.text for sample in samples],
            images=[list(sample.media) for sample in samples],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        assert set(made) == set(expected)
        for name, tensor in expected.items():
            assert tensor.dtype == made[name].dtype
            assert torch.equal(tensor, made[name]), name


def test_a_batch_trains_the_model_with_labels_of_texts_alone() -> None:
    with Features("shapes") as features:
        collator = Collator(features, with_labels=True)
        dataset = FeatureDataset(features, samples_of(collator, 4))
        made = collator([dataset[index] for index in range(len(dataset))])
    learned = made["labels"] != -100
    assert learned.any()
    assert torch.equal(made["labels"][learned], made["input_ids"][learned])
    assert not (learned & (made["mm_token_type_ids"] != 0)).any()
    assert not (learned & (made["attention_mask"] == 0)).any()
    model = Qwen2VLForConditionalGeneration.from_pretrained(SHAPES).eval()
    with torch.inference_mode():
        assert torch.isfinite(model(**made).loss)


@pytest.mark.parametrize(
    "make",
    [
        families.make_llava_next,
        families.make_pixtral,
        families.make_smolvlm,
        families.make_minicpm,
        make_gemma3,
    ],
)
def test_media_of_different_sizes_are_padded_as_by_the_processor(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path)
    images = [photo(90, 70, 1), photo(60, 160, 2), photo(200, 50, 3)]
    with Features(tmp_path) as features:
        collator = Collator(features)
        marker = collator.markers[Modality.IMAGE]
        samples = [Sample(f"Look: {marker}", [image]) for image in images]
        made = collator(FeatureDataset(features, samples, form="hf").__getitems__([0, 1, 2]))
        given = [[image] for image in images] if make is families.make_smolvlm else images
        expected = processor_of(tmp_path, "pil")(images=given, return_tensors="np")
    for name in made.keys() & expected.keys():
        assert np.array_equal(made[name].numpy(), np.asarray(expected[name])), name
    assert "pixel_values" in made.keys() & expected.keys()
    assert ("token_type_ids" in made) == (make is make_gemma3)


def test_images_of_a_sample_are_numbered(tmp_path: Path) -> None:
    families.make_minicpm(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    images = [photo(90, 70, 1), photo(60, 60, 2)]
    with Features(tmp_path) as features:
        collator = Collator(features)
        marker = collator.markers[Modality.IMAGE]
        samples = [Sample(f"{marker} and {marker}", images), Sample(marker, images[1:])]
        made = collator(FeatureDataset(features, samples).__getitems__([0, 1]))
        model = MiniCPMV4_6ForConditionalGeneration.from_pretrained(tmp_path)
    with torch.no_grad():
        assert model(**made).logits.isfinite().all()
    first, second = map(tokenizer.decode, made["input_ids"])
    assert first.count("<image_id>") == 2
    assert " and <image_id>1</image_id><image>" in first
    for each in (first, second):
        assert each.startswith("<image_id>0</image_id><image>")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("share", [False, True])
def test_a_data_loader_gives_the_arguments_of_the_model(
    pool: Features, method: str, share: bool
) -> None:
    collator = Collator(pool)
    samples = samples_of(collator, 9)
    dataset = FeatureDataset(pool, samples, share=share)
    loader: Any = DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=3,
        num_workers=2,
        collate_fn=collator,
        multiprocessing_context=method,
    )
    batches = list(loader)
    assert len(batches) == 3
    with Features("shapes") as here:
        for number, batch in enumerate(batches):
            indices = [3 * number, 3 * number + 1, 3 * number + 2]
            expected = Collator(here)(FeatureDataset(here, samples).__getitems__(indices))
            assert set(batch) == set(expected)
            for name, tensor in expected.items():
                assert torch.equal(batch[name], tensor), name


def test_references_of_loader_workers_open_in_the_training_process(pool: Features) -> None:
    samples = samples_of(Collator(pool), 6)
    loader: Any = DataLoader(
        FeatureDataset(pool, samples, share=True),  # type: ignore[arg-type]
        batch_size=2,
        num_workers=2,
        collate_fn=list,
        multiprocessing_context="spawn",
    )
    prepared = [sample for batch in loader for sample in batch]
    for sample, source in zip(prepared, samples, strict=True):
        for item, image in zip(sample.media, source.media, strict=True):
            assert isinstance(item, SharedItem)
            expected = pool.make(image)["pixel_values"]
            assert (item.features()["pixel_values"] == expected).all()


def test_videos_are_collated_with_what_positions_need(tmp_path: Path) -> None:
    families.make_qwen_vl(tmp_path, "qwen2_5")
    with Features(tmp_path) as features:
        collator = Collator(features)
        sample = Sample(f"See: {collator.markers[Modality.VIDEO]}", [MEDIA / "h264.mp4"])
        made = collator([FeatureDataset(features, [sample])[0]])
    names = {"pixel_values_videos", "video_grid_thw", "second_per_grid_ts"}
    assert names <= set(made)
    num_rows = int(made["video_grid_thw"].prod()) // 4
    assert int((made["mm_token_type_ids"] == 2).sum()) == num_rows
    assert made["pixel_values_videos"].dtype == torch.float32


def test_an_item_that_fails_raises_its_error_in_the_training_process(pool: Features) -> None:
    collator = Collator(pool)
    marker = collator.markers[Modality.IMAGE]
    dataset = FeatureDataset(pool, [b"bad"], to_sample=lambda data: Sample(marker, [data]))
    loader: Any = DataLoader(
        dataset,  # type: ignore[arg-type]
        num_workers=1,
        collate_fn=collator,
        multiprocessing_context="fork",
    )
    with pytest.raises(UnsupportedMedia, match="JPEG"):
        list(loader)


def test_wrong_samples_are_refused(pool: Features) -> None:
    collator = Collator(pool)
    dataset = FeatureDataset(pool, [Sample("no marker", [photo(60, 60)])])
    with pytest.raises(InvalidRequest, match="1 items, and its text has 0 markers"):
        collator([dataset[0]])
    with pytest.raises(ConfigError, match="to_sample"):
        _ = FeatureDataset(pool, ["a text"])[0]
    with Features("shapes") as here, pytest.raises(ConfigError, match="share"):
        FeatureDataset(here, [], share=True)
