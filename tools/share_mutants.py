"""The mutants of fair scheduling between clients: see `tools.mutant_list`."""

from __future__ import annotations

from typing import Final

from tools.mutant import Mutant

_SHARES, _SHARES_TESTS = "admission/shares.py", ("tests/admission/test_shares.py",)
_JOBS, _JOBS_TESTS = "store/state/jobs.py", ("tests/store/test_fair_jobs.py",)
_TURNS, _TURNS_TESTS = "admission/turns.py", ("tests/admission/test_turns.py",)
_ALLOTMENT, _STEPS_TESTS = "schedule/allotment.py", ("tests/schedule/test_steps.py",)
_BODY = "proxy/body.py"
_AUTH, _AUTH_TESTS = "proxy/auth.py", ("tests/proxy/test_auth.py",)
_ROOM_TESTS = ("tests/builtin/test_body.py::test_room_is_for_those_who_send",)
_SMALL_TESTS = (
    "tests/builtin/test_body.py::test_small_bodies_find_room_however_much_was_announced",
)

SHARE_MUTANTS: Final = (
    Mutant(
        what="all tenants weigh the same",
        file=_SHARES,
        old="        tenant.start += cost / tenant.weight\n",
        new="        tenant.start += cost\n",
        tests=_SHARES_TESTS,
    ),
    Mutant(
        what="who was idle has saved up work",
        file=_SHARES,
        old="                tenant.start = max(tenant.start, self._now)\n",
        new="",
        tests=_SHARES_TESTS,
    ),
    Mutant(
        what="a small request waits for a large one",
        file=_SHARES,
        old="_Flow(flow, {item: cost}, tenant.now + cost)",
        new="_Flow(flow, {item: cost}, tenant.now)",
        tests=_SHARES_TESTS,
    ),
    Mutant(
        what="work that took less is saved up",
        file=_SHARES,
        old="max(tenant.start + cost / tenant.weight, self._now)",
        new="tenant.start + cost / tenant.weight",
        tests=_SHARES_TESTS,
    ),
    Mutant(
        what="a job costs what was guessed",
        file=_JOBS,
        old="charge(job.share, took_us - estimate_us)",
        new="charge(job.share, 0)",
        tests=_JOBS_TESTS,
    ),
    Mutant(
        what="long jobs have all workers",
        file=_JOBS,
        old="return sum(job.is_long for job in running) + 1 < num_workers",
        new="return True",
        tests=_JOBS_TESTS,
    ),
    Mutant(
        what="short jobs keep long ones out for ever",
        file=_JOBS,
        old="not self._short or self._short_ahead_us > 0",
        new="not self._short",
        tests=_JOBS_TESTS,
    ),
    Mutant(
        what="a tenant's name is not told to the store",
        file="proxy/auth.py",
        old="Share(tenant.name, tenant.weight if signed is None else signed.weight)",
        new="Share()",
        tests=_AUTH_TESTS,
    ),
    Mutant(
        what="each server believes a gateway's signature",
        file=_AUTH,
        old="        if self._trusts_gateways:\n            return",
        new="        if True:\n            return",
        tests=_AUTH_TESTS,
    ),
    Mutant(
        what="a client's signature of its tenant is passed on",
        file=_AUTH,
        old="{_SIGNED, *KEY_HEADERS} if self.has_keys else {_SIGNED}",
        new="{*KEY_HEADERS} if self.has_keys else set()",
        tests=_AUTH_TESTS,
    ),
    Mutant(
        what="a gateway's signature never ends",
        file="admission/signed_share.py",
        old="abs(self._clock() - float(signed_at)) > VALID_S",
        new="False",
        tests=("tests/admission/test_signed_share.py",),
    ),
    Mutant(
        what="items of two tenants have one name",
        file="proxy/inline_stage.py",
        old="keys.frame(_TAG, tenant.encode(), *document.named_options)",
        new="keys.frame(_TAG, *document.named_options)",
        tests=("tests/proxy/test_item_names.py",),
    ),
    Mutant(
        what="what was announced has room before it comes",
        file=_BODY,
        old="            and self._num_read >= _FIRST_NBYTES\n",
        new="",
        tests=_ROOM_TESTS,
    ),
    Mutant(
        what="a body that holds room may stop coming",
        file=_BODY,
        old="        if not announced or self._buffer.is_on_heap:\n",
        new="        if announced or self._buffer.is_on_heap:\n",
        tests=_ROOM_TESTS,
    ),
    Mutant(
        what="large bodies may announce all the room there is",
        file="admission/gate.py",
        old="self._take_mib(request, semaphore, nbytes, limit",
        new="self._take_mib(request, semaphore, 1, limit",
        tests=_SMALL_TESTS,
    ),
    Mutant(
        what="a trailing slash is redirected",
        file="builtin/http/app.py",
        old="app.router.redirect_slashes = False",
        new="app.router.redirect_slashes = True",
        tests=("tests/builtin/test_apis.py::test_a_query_that_is_no_text",),
    ),
    Mutant(
        what="names that were not found are asked for again",
        file="media/fetch/dial.py",
        old="if self._not_found.get(host, 0.0) > self._clock():",
        new="if self._not_found.get(host, 0.0) < 0:",
        tests=("tests/media/test_fetch.py",),
    ),
    Mutant(
        what="what only Pillow knows is broken",
        file="media/decode/image.py",
        old="    except Exception as error:\n",
        new="    except ValueError as error:\n",
        tests=("tests/media/test_decode_image.py",),
    ),
    Mutant(
        what="any number of pixels may be scanned",
        file="media/decode/jpeg.py",
        old="num_scans > _MAX_SCANS or num_scans * num_pixels > _MAX_SCANNED_PIXELS",
        new="num_scans > _MAX_SCANS",
        tests=("tests/media/test_decode_image.py",),
    ),
    Mutant(
        what="a large prompt has its turn before a small one",
        file=_TURNS,
        old="(tenant.now + cost, self._num_arrivals)",
        new="(tenant.now, self._num_arrivals)",
        tests=_TURNS_TESTS,
    ),
    Mutant(
        what="the turn of a large prompt never comes",
        file=_TURNS,
        old="        tenant.now += work / tenant.num_items\n",
        new="",
        tests=_TURNS_TESTS,
    ),
    Mutant(
        what="tenants have steps whatever their weights",
        file=_TURNS,
        old="        tenant.had += work / tenant.weight\n",
        new="        tenant.had += work\n",
        tests=_STEPS_TESTS,
    ),
    Mutant(
        what="a tenant that was idle has all steps",
        file=_TURNS,
        old="            tenant.had = max(tenant.had, self._now)\n",
        new="            tenant.had = 0.0\n",
        tests=_TURNS_TESTS,
    ),
    Mutant(
        what="who lacks memory keeps its turn",
        file=_ALLOTMENT,
        old="        if sequence.is_prefilling and not sequence.was_held_up\n",
        new="        if sequence.is_prefilling\n",
        tests=_STEPS_TESTS,
    ),
    Mutant(
        what="those who wait have no turn",
        file=_ALLOTMENT,
        old="turns.rank(first) < line[-1][0]",
        new="False",
        tests=_STEPS_TESTS,
    ),
    Mutant(
        what="a place that is given to who has left is lost",
        file="media/fetch/places.py",
        old="                self._leave()  # the slot was granted just before the cancellation\n",
        new="                pass\n",
        tests=("tests/media/test_places.py",),
    ),
    Mutant(
        what="each request waits for all that came before, whoever sent them",
        file="media/fetch/places.py",
        old="share=user.share, flow=user.request, cost=1",
        new="flow=0, cost=1",
        tests=("tests/media/test_places.py",),
    ),
    Mutant(
        what="what one tenant has fetched, another has not",
        file="media/fetch/url_memory.py",
        old="keys.frame(_TAG, tenant.encode(), ",
        new="keys.frame(_TAG, ",
        tests=("tests/media/test_url_memory.py",),
    ),
    Mutant(
        what="what may not be kept is kept",
        file="media/fetch/url_memory.py",
        old="    if _NOT_TO_BE_KEPT & said.keys():\n",
        new="    if False:\n",
        tests=("tests/media/test_url_memory.py",),
    ),
    Mutant(
        what="what was evicted is believed to be there",
        file="items/recall.py",
        old="            if key in here\n",
        new="            if here or key\n",
        tests=("tests/builtin/test_recall.py",),
    ),
    Mutant(
        what="all who come fetch for themselves",
        file="items/recall.py",
        old="            if others:\n",
        new="            if not others and False:\n",
        tests=("tests/builtin/test_recall.py",),
    ),
)
