"""Audio: decoded samples, and the spectra and embeddings that models expect."""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import soxr
import torch
from transformers import VoxtralConfig, VoxtralForConditionalGeneration, WhisperFeatureExtractor

from afferent.builtin.engine.model.runner import load_model
from afferent.config import Limits
from afferent.errors import (
    ConfigError,
    InternalError,
    InvalidMedia,
    MediaTooLarge,
    UnsupportedMedia,
    UnsupportedModel,
)
from afferent.media.decode.audio import decode_audio, probe_audio
from afferent.media.decoded import DecodedAudio
from afferent.media.families import registry
from afferent.media.families.mel import LogMel
from afferent.media.families.qwen2_audio import Qwen2AudioFamily
from afferent.media.families.whisper import VoxtralFamily, WhisperFamily, describe
from afferent.media.headers.probe import AudioHeader, ImageHeader
from afferent.types import Modality
from tests.callbacks import measured
from tests.engine import families
from tests.media_files import later, make_audio, make_av_audio, make_video, tone

LIMITS = Limits()
CLIPS = {
    "wav": ("WAV", None, 44_100),
    "wav-float": ("WAV", "FLOAT", 22_050),
    "wav-8-bit": ("WAV", "PCM_U8", 8_000),
    "flac": ("FLAC", None, 48_000),
    "vorbis": ("OGG", "VORBIS", 44_100),
    "opus": ("OGG", "OPUS", 48_000),
    "mp3": ("MP3", None, 44_100),
}


@pytest.mark.parametrize("rate_hz", [16_000, 48_000])
def test_opus_is_decoded_without_the_delay_of_its_encoder(rate_hz: int) -> None:
    """Some encoders write times that begin at their delay; FFmpeg reads both alike."""
    file = make_audio(tone(1.3, rate_hz), rate_hz, "OGG", "OPUS")
    samples = decode_audio(memoryview(file), 16_000, LIMITS).samples
    with av.open(io.BytesIO(later(file))) as container:
        frames = [frame.to_ndarray()[0] for frame in container.decode(audio=0)]
    expected = soxr.resample(np.concatenate(frames), 48_000, 16_000)
    assert len(samples) == len(expected)
    moved = [
        float(np.dot(samples[200:-200], np.roll(expected, n)[200:-200])) for n in range(-150, 151)
    ]
    assert abs(int(np.argmax(moved)) - 150) <= 1
    again = decode_audio(memoryview(later(file)), 16_000, LIMITS).samples
    np.testing.assert_array_equal(again, samples)


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_are_resampled_as_one(name: str, channels: int) -> None:
    form, subtype, rate_hz = CLIPS[name]
    file = make_audio(tone(2.5, rate_hz, channels=channels), rate_hz, form, subtype)
    samples, _ = soundfile.read(io.BytesIO(file), dtype="float32", always_2d=True)
    header = probe_audio(memoryview(file), LIMITS)
    assert header == AudioHeader(rate_hz, channels, len(samples))
    audio = decode_audio(memoryview(file), 16_000, LIMITS)
    expected = soxr.resample(samples.mean(axis=1), rate_hz, 16_000)
    assert audio.header == AudioHeader(16_000, 1, len(expected))
    np.testing.assert_allclose(audio.samples, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("encoder", "container", "rate_hz"),
    [("aac", "ipod", 44_100), ("libopus", "webm", 48_000), ("alac", "ipod", 16_000)],
)
def test_audio_in_a_container(encoder: str, container: str, rate_hz: int) -> None:
    samples = tone(2.0, rate_hz, channels=2)
    file = make_av_audio(samples, rate_hz, encoder, container)
    header = probe_audio(file, LIMITS)
    assert header.num_channels == 2
    assert 2.0 <= header.duration_s < 2.1
    audio = decode_audio(file, 16_000, LIMITS)
    expected = soxr.resample(samples.mean(axis=1), rate_hz, 16_000)
    assert 0 <= len(audio.samples) - len(expected) < 1600
    # Silence before the audio is cut off, so the samples have the right position.
    assert np.corrcoef(audio.samples[: len(expected)], expected)[0, 1] > 0.995


def test_limits() -> None:
    stereo = tone(1.0, 16_000, channels=2)
    file = make_audio(stereo, 16_000)
    assert len(decode_audio(file, 16_000, LIMITS).samples) == 16_000
    for limits, named in (
        (Limits(max_audio_s=0.9), "--max-audio-s"),
        (Limits(max_audio_channels=1), "--max-audio-channels"),
        (Limits(max_audio_rate_hz=8000), "--max-audio-rate-hz"),
    ):
        with pytest.raises(MediaTooLarge, match=named):
            probe_audio(file, limits)
        with pytest.raises(MediaTooLarge, match=named):
            decode_audio(file, 16_000, limits)


def test_a_flac_that_does_not_say_its_length() -> None:
    """A recorder that can't seek leaves out the length; it is known only at the end of the file."""
    file = bytearray(make_audio(tone(2.0), 16_000, "FLAC"))
    file[21] &= 0xF0
    file[22:26] = bytes(4)
    assert probe_audio(file, LIMITS).duration_s == LIMITS.max_audio_s
    assert len(decode_audio(file, 16_000, LIMITS).samples) == 32_000
    with pytest.raises(MediaTooLarge, match="longer"):
        decode_audio(file, 16_000, Limits(max_audio_s=1.5))


@pytest.mark.parametrize("kind", ["mp3", "opus", "vorbis"])
def test_audio_file_of_several_parts_is_refused_and_not_cut_off(kind: str) -> None:
    """libsndfile returns the first part alone; services for speech join files like this."""
    form, subtype, rate_hz = CLIPS[kind]
    file = make_audio(tone(2.0, rate_hz), rate_hz, form, subtype)
    assert len(decode_audio(memoryview(file), 16_000, LIMITS).samples) == 32_000
    for joined in (file + file, file + file + file):
        with pytest.raises(InvalidMedia, match="several parts"):
            decode_audio(memoryview(joined), 16_000, LIMITS)


@pytest.mark.parametrize("end", [b"TAG" + bytes(125), b"APETAGEX" + bytes(range(256)) * 4000])
def test_tag_behind_an_mp3_is_no_audio(end: bytes) -> None:
    file = make_audio(tone(2.0, 16_000), 16_000, "MP3")
    assert len(decode_audio(memoryview(file + end), 16_000, LIMITS).samples) == 32_000


def test_search_for_frames_behind_an_mp3_ends_soon() -> None:
    """Each two bytes could begin a frame."""
    file = make_audio(tone(2.0, 16_000), 16_000, "MP3") + b"\xff\xfb\x10" * 3_000_000
    with measured() as cost:
        assert len(decode_audio(memoryview(file), 16_000, LIMITS).samples) == 32_000
    assert cost.thread_s < 2 * cost.slowness


def test_length_of_an_mp3_without_a_header_is_a_guess() -> None:
    """Its first frame is of low quality, and the others are of high quality."""
    low, high = (make_mp3(seconds, kbps) for seconds, kbps in ((1, 32), (70, 320)))
    header = probe_audio(memoryview(low + high), LIMITS)
    assert header.num_frames == LIMITS.max_audio_s * 44_100
    samples = decode_audio(memoryview(low + high), 16_000, LIMITS).samples
    assert len(samples) / 16_000 == pytest.approx(71, abs=0.2)
    with pytest.raises(InvalidMedia, match="does not say its length"):
        decode_audio(memoryview(high + make_mp3(60, 32)), 16_000, LIMITS)


def make_mp3(seconds: float, kbps: int) -> bytes:
    """Return an MP3 without the frame that says its length."""
    out = io.BytesIO()
    samples = np.ascontiguousarray(tone(seconds, 44_100).T)
    with av.open(out, "w", format="mp3", options={"write_xing": "0"}) as container:
        stream = container.add_stream(
            "libmp3lame", rate=44_100, layout="mono", bit_rate=kbps * 1000
        )
        frame = av.AudioFrame.from_ndarray(samples, "fltp", "mono")
        frame.sample_rate = 44_100
        resampler = av.AudioResampler("s16p", "mono", 44_100)
        for each in (*resampler.resample(frame), None):
            container.mux(stream.encode(each))
    return out.getvalue()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, 32_000.0])
def test_samples_that_are_no_audio(bad: float) -> None:
    samples = tone(1.0)
    samples[7000] = bad
    with pytest.raises(InvalidMedia):
        decode_audio(make_audio(samples, 16_000, "WAV", "FLOAT"), 16_000, LIMITS)


def test_what_is_no_audio() -> None:
    for file in (b"", b"RIFF", b"#EXTM3U\n/etc/passwd", b"FORM\0\0\0\x0eAIFFCOMM", bytes(100)):
        with pytest.raises(UnsupportedMedia):
            probe_audio(file, LIMITS)
    for file in (b"fLaC" + bytes(50), b"OggS" + bytes(50), make_video(num_frames=2)):
        with pytest.raises(InvalidMedia):
            decode_audio(file, 16_000, LIMITS)
    for form in ("AIFF", "AU", "CAF"):  # libsndfile could read them, even behind an ID3 tag
        other = make_audio(tone(0.1), 16_000, form)
        for file in (other, b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + other):
            with pytest.raises((UnsupportedMedia, InvalidMedia)):
                decode_audio(file, 16_000, LIMITS)


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("duration_s", [0.001, 0.5, 12.3, 29.99, 30.0, 31.0])
def test_spectra_are_those_of_the_extractor(num_mels: int, duration_s: float) -> None:
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    mel = LogMel.from_settings(extractor.to_dict())
    samples = tone(duration_s)[:, 0]
    out = np.full(mel.spec(1).shape, np.nan, np.float32)
    mel.write(samples, out)
    by_torch = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"]
    np.testing.assert_allclose(out, by_torch, atol=1e-4)
    if duration_s == 12.3:
        padded = np.pad(samples, (0, 480_000 - len(samples)))[None]
        by_numpy = extractor._np_extract_fbank_features(padded, "cpu")
        np.testing.assert_allclose(out, by_numpy, atol=2e-5)


def test_spectra_of_silence_and_of_one_sample() -> None:
    extractor = WhisperFeatureExtractor()
    mel = LogMel()
    for samples in (np.zeros(1, np.float32), np.zeros(20_000, np.float32), np.ones(1, np.float32)):
        out = np.empty(mel.spec(1).shape, np.float32)
        mel.write(samples, out)
        expected = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"]
        np.testing.assert_allclose(out, expected, atol=1e-4)


def test_an_extractor_that_adds_noise() -> None:
    with pytest.raises(UnsupportedModel):
        LogMel.from_settings(WhisperFeatureExtractor(dither=0.1).to_dict())
    with pytest.raises(UnsupportedModel):
        LogMel.from_settings({"hop_length": 0})


def folder_of(folder: Path, config: dict[str, object], num_mels: int = 80) -> dict[str, object]:
    (folder / "config.json").write_text(json.dumps(config))
    WhisperFeatureExtractor(feature_size=num_mels).save_pretrained(folder)
    return config


def test_whisper(tmp_path: Path) -> None:
    family = describe(tmp_path, folder_of(tmp_path, {"model_type": "whisper"}))
    assert isinstance(family, WhisperFamily)
    assert family.sample_rate_hz == 16_000
    assert family.tokens.keys() == {Modality.AUDIO}
    for num_frames in (1, 441_000, 44_100_000):
        planned = family.plan(AudioHeader(44_100, 2, num_frames))
        assert planned.prompt == ()
        assert planned.specs["input_features"].shape == (1, 80, 3000)
    audio = DecodedAudio(tone(1.0)[:, 0], 16_000)
    out = {"input_features": np.empty((1, 80, 3000), np.float32)}
    family.process(audio, out)
    assert family.model_inputs(out).keys() == out.keys()
    with pytest.raises(InvalidMedia):
        family.plan(ImageHeader(10, 10))
    with pytest.raises(InternalError):
        family.process(DecodedAudio(audio.samples, 8000), out)


def test_voxtral(tmp_path: Path) -> None:
    """The chunks are those of Voxtral's processor; the number of embeddings is as planned."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = VoxtralConfig(
        audio_config={**small, "intermediate_size": 64, "num_mel_bins": 128},
        text_config={**small, "intermediate_size": 32, "vocab_size": 99, "head_dim": 8}
        | {"num_key_value_heads": 2},
        audio_token_id=24,
    )
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    family = describe(tmp_path, folder_of(tmp_path, saved, num_mels=128))
    assert isinstance(family, VoxtralFamily)
    assert family.tokens[Modality.AUDIO].embed == 24
    audio = DecodedAudio(tone(61.7)[:, 0], 16_000)
    planned = family.plan(audio.header)
    assert planned.prompt == (3 * 375,)
    out = {"input_features": np.empty(planned.specs["input_features"].shape, np.float32)}
    family.process(audio, out)
    extractor = WhisperFeatureExtractor(feature_size=128)
    expected = extractor(
        audio.samples,
        sampling_rate=16_000,
        padding=True,
        truncation=False,
        pad_to_multiple_of=480_000,
        return_tensors="np",
    )["input_features"]
    expected = expected.reshape(128, -1, 3000).transpose(1, 0, 2)
    np.testing.assert_allclose(out["input_features"], expected, atol=2e-4)
    model = VoxtralForConditionalGeneration(config).eval()
    with torch.no_grad():
        tensors = {name: torch.from_numpy(array[:1]) for name, array in out.items()}
        encoded = model.get_audio_features(**family.model_inputs(tensors)).pooler_output
    assert encoded.shape[0] == 375


@pytest.mark.parametrize(
    ("header", "num_chunks"),
    [
        (AudioHeader(16_000, 1, 1), 1),
        (AudioHeader(16_000, 1, 480_000), 1),
        (AudioHeader(16_000, 1, 480_001), 2),
        (AudioHeader(44_100, 2, 44_100 * 30), 1),
        (AudioHeader(44_100, 2, 44_100 * 30 + 1), 2),
        (AudioHeader(8_000, 1, 8_000 * 600), 20),
    ],
)
def test_chunks(header: AudioHeader, num_chunks: int) -> None:
    family = VoxtralFamily(mel=LogMel(feature_size=128), audio_token_id=24, embeds_per_chunk=375)
    planned = family.plan(header)
    assert planned.num_embeds == num_chunks * 375
    assert planned.specs["input_features"].shape == (num_chunks, 128, 3000)


@pytest.mark.parametrize("duration_s", [0.031, 0.5, 7.77, 29.99, 30.0, 31.0])
def test_qwen2_audio(duration_s: float, tmp_path: Path) -> None:
    """Spectra and mask are those of the feature extractor; the encoder makes the planned rows."""
    families.make_qwen2_audio(tmp_path)
    family = registry.describe(tmp_path)
    assert isinstance(family, Qwen2AudioFamily)
    assert family.sample_rate_hz == 16_000
    audio = DecodedAudio(tone(duration_s)[:, 0], 16_000)
    planned = family.plan(audio.header)
    out = {n: np.full(s.shape, 7, np.dtype(s.dtype)) for n, s in planned.specs.items()}
    family.process(audio, out)
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path)
    expected = extractor(
        audio.samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np"
    )
    np.testing.assert_allclose(out["input_features"], expected["input_features"], atol=1e-4)
    assert (out["feature_attention_mask"] == expected["attention_mask"]).all()
    model = load_model(tmp_path)
    mask = torch.from_numpy(out["feature_attention_mask"])
    _, rows = model.model.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
    assert planned.prompt == (int(rows),)
    assert family.model_inputs(out).keys() == out.keys()


def test_qwen2_audio_that_is_not_done(tmp_path: Path) -> None:
    families.make_qwen2_audio(tmp_path)
    family = registry.describe(tmp_path)
    assert family is not None
    with pytest.raises(InvalidMedia, match="short"):
        family.plan(AudioHeader(16_000, 1, 320))
    with pytest.raises(InvalidMedia):
        family.plan(ImageHeader(10, 10))
    WhisperFeatureExtractor(feature_size=16, chunk_length=20).save_pretrained(tmp_path)
    assert registry.describe(tmp_path) is None


def test_models_that_are_none_of_these(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        describe(tmp_path, {"model_type": "whisper"})
    folder_of(tmp_path, {})
    with pytest.raises(ConfigError, match="no audio token"):
        describe(tmp_path, {"model_type": "voxtral"})
    with pytest.raises(ConfigError, match="whole number"):
        describe(tmp_path, {"model_type": "voxtral", "audio_config": {"intermediate_size": 7000}})
