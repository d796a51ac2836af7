"""Whether an engine does what its `info` says that it supports, of how tokens are chosen."""

from __future__ import annotations

from afferent.testing.engine_trial import Said, Trial, require


async def does_what_it_supports(trial: Trial) -> None:
    """What `info.supported` names changes the answer as `Sampling` says; the rest is not asked for.

    Penalties and ``min_p`` are not looked at: what they change depends on the model.
    """
    info = trial.engine.info
    supported = info.supported if info is not None else ()
    if "stop_token_ids" in supported:
        await _ends_at_tokens(trial)
    if "min_tokens" in supported:
        await _goes_on_for(trial)
    if "logit_bias" in supported:
        await _leans(trial)


async def _ends_at_tokens(trial: Trial) -> None:
    question = trial.question(0)
    stop = question.answer[-1]
    before = question.answer[: question.answer.index(stop)]
    for ignore_eos in (False, True):
        said = await trial.ask(question, stop_token_ids=(stop,), ignore_eos=ignore_eos)
        wanted = Said(before, reason="stop")
        require(said == wanted, f"with stop_token_ids={(stop,)} it says {said}")


async def _goes_on_for(trial: Trial) -> None:
    question = trial.question(0)
    num = len(question.answer) + 2
    said = await trial.ask(question, min_tokens=num, max_tokens=num)
    goes_on = len(said.token_ids) == num and said.token_ids[: num - 2] == question.answer
    require(goes_on, f"with min_tokens={num} it says {said}")


async def _leans(trial: Trial) -> None:
    question = trial.question(0)
    first = question.answer[0]
    said = await trial.ask(question, logit_bias=((first, -100.0),), max_tokens=1)
    require(said.token_ids[:1] != [first], f"a bias of -100 does not keep it from saying {first}")
