"""Reinforcement learning: vLLM's rollouts and the training with `transformers` read one copy.

    python examples/rl_rollouts.py --prompts 256 --generations 16

It runs in vLLM's environment. A pool makes the features of each image once, in a store in shared
memory. vLLM reads them there for the rollouts. The training process gets the tokens of the
rollouts and a reference to each image's features, and reads the same blocks. The log-probabilities
of both are compared, as are those of the same rollouts with features by value: vLLM's processor
makes them for the rollouts, and the training process receives them as tensors.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from afferent import DaemonStore, Features, ItemFeatures, Modality, SharedItem

MODEL = "shapes"
COLOURS = {"red": (220, 20, 20), "yellow": (240, 220, 20), "green": (20, 170, 60), "blue": "blue"}
SHAPES = ("circle", "square")
TEMPERATURE = 1.5
LEARNING_RATE, CLIP = 1e-5, 0.2


# The data set and the reward


@dataclass(frozen=True)
class Sample:
    """Image prompt of the data set, with its answer."""

    file: bytes
    answer: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        url = "data:image/png;base64," + base64.b64encode(self.file).decode()
        image = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]

    def reward(self, text: str) -> float:
        """Return the part of the answer's words that a text has."""
        words = self.answer.split()
        return sum(word in text.split() for word in words) / len(words)


def draw_samples(number: int) -> Iterator[Sample]:
    rng = random.Random(0)  # noqa: S311 - for data
    for _ in range(number):
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        image = Image.new("RGB", (rng.randint(140, 224), rng.randint(140, 224)), "white")
        left, top, side = rng.randint(5, 50), rng.randint(5, 50), rng.randint(50, 80)
        draw = ImageDraw.Draw(image)
        write = draw.ellipse if shape == "circle" else draw.rectangle
        write((left, top, left + side, top + side), fill=COLOURS[colour])
        file = io.BytesIO()
        image.save(file, "PNG")
        yield Sample(file.getvalue(), f"a {colour} {shape}")


# Rollouts


@dataclass(frozen=True)
class Generation:
    """Tokens that the engine chose, and their log-probabilities at that time."""

    tokens: list[int]
    logps: list[float]
    advantage: float


@dataclass(frozen=True)
class Rollout:
    """Generations of one prompt; its image is a reference, or features by value."""

    image: SharedItem | ItemFeatures
    prompt: list[int]
    generations: list[Generation]


def roll_out(
    chat: Callable[..., list[Any]],
    samples: Sequence[Sample],
    images: Sequence[SharedItem | ItemFeatures],
    parameters: Any,
) -> tuple[list[Rollout], float]:
    """Return the rollouts of samples by an engine's ``chat``, and their mean reward."""
    outputs = chat(
        [sample.messages for sample in samples],
        parameters,
        use_tqdm=False,
        chat_template_content_format="openai",
    )
    rollouts, all_rewards = [], []
    for sample, image, output in zip(samples, images, outputs, strict=True):
        rewards = [sample.reward(each.text) for each in output.outputs]
        mean, deviation = statistics.mean(rewards), statistics.pstdev(rewards)
        generations = [
            Generation(
                tokens := list(each.token_ids),
                [found[token].logprob for token, found in zip(tokens, each.logprobs, strict=True)],
                (reward - mean) / (deviation + 1e-4),
            )
            for each, reward in zip(output.outputs, rewards, strict=True)
        ]
        rollouts.append(Rollout(image, list(output.prompt_token_ids), generations))
        all_rewards += rewards
    return rollouts, statistics.mean(all_rewards)


# Training


@dataclass(frozen=True)
class Task:
    """Work of the training process.

    Attributes:
        rollouts: Rollouts whose log-probabilities are computed.
        step: Number of the optimizer's step that they are for; ``None``: of none.
    """

    rollouts: list[Rollout]
    step: int | None = None


@dataclass(frozen=True)
class Done:
    """Result of a task.

    Attributes:
        logps: Log-probabilities of all tokens, as in the task's generations.
        open_ms: Times to open the features of each rollout.
    """

    logps: list[list[list[float]]]
    open_ms: list[float]


class Learner:
    """Model of the training process, which reads features and goes on from a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        logging.disable_progress_bar()
        self._features = Features(MODEL, backend="torchvision")  # it only opens and normalizes
        self._image_token = self._features.media_tokens[Modality.IMAGE].embed
        self._model = AutoModelForImageTextToText.from_pretrained(
            self._features.folder, dtype=torch.float32
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._checkpoint, self._num_steps = checkpoint, 0
        if checkpoint.exists():
            model, optimizer, self._num_steps = torch.load(checkpoint)
            self._model.load_state_dict(model)
            self._optimizer.load_state_dict(optimizer)

    def do(self, task: Task) -> Done:
        all_logps, open_ms = [], []
        is_due = task.step == self._num_steps  # a former process may have died after its step
        with torch.set_grad_enabled(is_due):
            for rollout in task.rollouts:
                start = time.perf_counter()
                image = rollout.image
                if isinstance(image, SharedItem):
                    image = self._features.open(image, tensors="torch")
                open_ms.append((time.perf_counter() - start) * 1e3)
                logps = self._logps(rollout, self._features.model_inputs(image))
                if is_due:
                    (_loss(logps, rollout.generations) / len(task.rollouts)).backward()
                all_logps.append([each.tolist() for each in logps])
        if is_due:
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._save()
        return Done(all_logps, open_ms)

    def _logps(self, rollout: Rollout, media: dict[str, Any]) -> list[torch.Tensor]:
        """Return the log-probabilities of the tokens of each generation, at the temperature."""
        number, start = len(rollout.generations), len(rollout.prompt)
        rows = [torch.tensor(rollout.prompt + each.tokens) for each in rollout.generations]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        logits = self._model(
            input_ids=ids,
            attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
            mm_token_type_ids=(ids == self._image_token).int(),
            **{name: each.repeat(number, 1) for name, each in media.items()},
        ).logits
        all_logps = torch.log_softmax(logits[:, start - 1 : -1] / TEMPERATURE, dim=-1)
        chosen = all_logps.gather(-1, ids[:, start:, None])[..., 0]
        return [chosen[n, : len(each.tokens)] for n, each in enumerate(rollout.generations)]

    def _save(self) -> None:
        """Write a checkpoint; a process that is killed meanwhile leaves the former one."""
        self._num_steps += 1
        state = (self._model.state_dict(), self._optimizer.state_dict(), self._num_steps)
        torch.save(state, new := self._checkpoint.with_suffix(".new"))
        new.replace(self._checkpoint)


def _loss(logps: Sequence[torch.Tensor], generations: Sequence[Generation]) -> torch.Tensor:
    """Return the clipped loss of a policy gradient, whose old policy is the engine's."""
    losses = []
    for each, generation in zip(logps, generations, strict=True):
        ratio = torch.exp(each - torch.tensor(generation.logps))
        gain = ratio * generation.advantage
        losses.append(-torch.minimum(gain, ratio.clamp(1 - CLIP, 1 + CLIP) * generation.advantage))
    return torch.cat(losses).mean()


def learn(pipe: Connection, checkpoint: Path) -> None:
    """Run the training process, until it receives ``None``."""
    learner = Learner(checkpoint)
    for task in iter(pipe.recv, None):
        pipe.send(learner.do(task))


class Trainer:
    """Training process; if it dies, the next one goes on from the checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=learn, args=(theirs, self._checkpoint), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, task: Task) -> None:
        self._task = task
        self._pipe.send(task)

    def finish(self) -> Done:
        """Return the result of the task; a process that has died is replaced."""
        while True:
            try:
                done: Done = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                self.process.join()
                print(f"the trainer has ended ({self.process.exitcode}): another one goes on")
                self._start()
                self._pipe.send(self._task)
            else:
                return done

    def do(self, task: Task) -> Done:
        self.begin(task)
        return self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self.process.join()


# Both


def difference(rollouts: Sequence[Rollout], done: Done) -> str:
    """Return the differences between the log-probabilities of both sides, as a text."""
    pairs = [
        abs(theirs - ours)
        for rollout, logps in zip(rollouts, done.logps, strict=True)
        for generation, row in zip(rollout.generations, logps, strict=True)
        for theirs, ours in zip(generation.logps, row, strict=True)
    ]
    return f"{max(pairs):.3g} at most, {statistics.mean(pairs):.3g} on average"


def compare(
    llm: Any,
    trainer: Trainer,
    samples: Sequence[Sample],
    by_reference: Sequence[SharedItem],
    by_value: Sequence[ItemFeatures],
    parameters: Sequence[Any],
) -> None:
    """Compare both sides with features by reference, and by value.

    The engine has one generation at a time, so that its batches and numbers are the same for both.
    """
    sides = {"reference": (llm.chat, by_reference), "value": (llm.llm.chat, by_value)}
    for name, (chat, images) in sides.items():
        llm.reset_prefix_cache()
        rollouts: list[Rollout] = []
        for number in range(len(samples)):
            one = slice(number, number + 1)
            rollouts += roll_out(chat, samples[one], images[one], parameters[one])[0]
        done = trainer.do(Task(rollouts))
        print(f"log-probabilities, features by {name}: {difference(rollouts, done)}")
    pairs = zip(rollouts, by_reference, strict=True)
    same = [replace(rollout, image=image) for rollout, image in pairs]
    is_equal = trainer.do(Task(same)).logps == done.logps
    print(f"the trainer's are equal by reference and by value: {is_equal}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--generations", type=int, default=16, help="for each prompt")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="prompts of a step")
    parser.add_argument("--compared", type=int, default=64, help="prompts, also by value")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill the trainer in this step")
    args = parser.parse_args(arguments)

    # Here, because the training process imports this file, and needs no vLLM.
    from vllm import SamplingParams

    from afferent.vllm import LLM

    samples = list(draw_samples(args.prompts))
    sampling = partial(
        SamplingParams,
        temperature=TEMPERATURE,
        max_tokens=args.max_tokens,
        logprobs=0,  # those of the chosen tokens
    )
    one = [sampling(n=1, seed=seed) for seed in range(args.compared)]
    many = [sampling(n=args.generations) for _ in range(args.prompts)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Features(MODEL, where="pool", backend="torchvision") as features,
    ):
        files = [sample.file for sample in samples]
        images = list(features.share_many(files))
        by_value = list(features.make_many(files[: args.compared], form="hf"))
        with (
            LLM(
                features.folder,
                features=features,
                dtype="float32",
                enforce_eager=True,
                max_model_len=1024,
                limit_mm_per_prompt={"video": 0},
                # vLLM's CPU build fails at a prompt in pieces whose request has a seed.
                enable_chunked_prefill=False,
                logprobs_mode="processed_logprobs",  # at the temperature, as the trainer's
            ) as llm,
            Trainer(Path(folder) / "checkpoint.pt") as trainer,
        ):
            nbytes = sum(image.nbytes for image in images)
            print(f"{len(images)} images, {nbytes / 1e6:.1f} MB of features")
            some = slice(args.compared)
            compare(llm, trainer, samples[some], images[some], by_value, one)
            start = time.perf_counter()
            rollouts, reward = roll_out(llm.chat, samples, images, many)
            took_s = time.perf_counter() - start
            number = sum(len(rollout.generations) for rollout in rollouts)
            print(f"{number} generations in {took_s:.1f} s, mean reward {reward:.3f}")
            train(trainer, rollouts, batch_size=args.batch_size, kill_at=args.kill_at)
        with DaemonStore(str(features.address), name="example") as store:
            print(f"{store.stat().num_jobs_made} images were processed")


def train(
    trainer: Trainer, rollouts: Sequence[Rollout], *, batch_size: int, kill_at: int | None
) -> None:
    """Take one step of the optimizer for each batch of rollouts."""
    open_ms: list[float] = []
    for step, start in enumerate(range(0, len(rollouts), batch_size)):
        batch = list(rollouts[start : start + batch_size])
        trainer.begin(Task(batch, step))
        if step + 1 == kill_at:
            trainer.process.kill()
        done = trainer.finish()
        open_ms += done.open_ms
        print(f"step {step + 1}: log-probabilities differ by {difference(batch, done)}")
    median_ms = statistics.median(open_ms)
    print(f"references opened in {median_ms:.3f} ms (median), {max(open_ms):.3f} ms (longest)")


if __name__ == "__main__":
    main()
