"""The mutants of the code that serves requests: see `tools.mutant_list`."""

from __future__ import annotations

from typing import Final

from tools.mutant import Mutant

_AUTH, _AUTH_TESTS = "proxy/auth.py", ("tests/proxy/test_auth.py",)
_BODY = "proxy/body.py"
_CHAT, _CHAT_TESTS = "builtin/apis/chat/api.py", ("tests/builtin/test_chat.py",)
_CONVERSATIONS = "builtin/pipeline/conversations.py"
_CONVERSATIONS_TESTS = ("tests/builtin/test_conversations.py",)
_ENDPOINT, _ENDPOINT_TESTS = "builtin/http/endpoint.py", ("tests/builtin/test_endpoint.py",)
_SCOPE = "proxy/request_scope.py"
_GENERATE, _GENERATE_TESTS = "builtin/pipeline/generate.py", ("tests/builtin/test_generate.py",)
_HOLDING_TESTS = ("tests/builtin/test_holding.py::test_how_often_the_store_is_asked",)
_ITEMS_TESTS = ("tests/builtin/test_items.py",)
_LIMIT_TESTS = ("tests/builtin/test_body.py::test_each_item_has_a_limit_of_its_own",)
_METRICS_TESTS = ("tests/telemetry/test_metrics.py",)
_NAMES_TESTS = ("tests/builtin/test_names.py",)
_STREAM_TESTS = ("tests/proxy/test_body_stream.py",)
_PROMPT_STAGE = "builtin/pipeline/prompt_stage.py"
_PIPELINE, _PIPELINE_TESTS = "builtin/pipeline/pipeline.py", ("tests/builtin/test_pipeline.py",)
_PROMPT_TESTS = ("tests/builtin/test_prompt.py",)
_REASON_TESTS = ("tests/builtin/test_chat.py::test_an_answer_says_why_it_ended",)
_RECEIVE, _RECEIVE_TESTS = "items/receive.py", ("tests/items/test_receive.py",)

SERVE_MUTANTS: Final = (
    Mutant(
        what="all tenants share their places",
        file=_AUTH,
        old='f"tenant/{tenant.name}"',
        new='"tenant"',
        tests=_AUTH_TESTS,
    ),
    Mutant(
        what="a tenant has its place again as soon as the engine has accepted",
        file=_AUTH,
        old='return f"{request_id} place"',
        new="return request_id",
        tests=_ENDPOINT_TESTS,
    ),
    Mutant(
        what="places are given back only if every tenant has a limit",
        file=_AUTH,
        old="self._has_quotas = any(",
        new="self._has_quotas = all(",
        tests=_AUTH_TESTS,
    ),
    Mutant(
        what="all items of a body together have the limit of one",
        file=_BODY,
        old="if self._buffer.nbytes - self._start + len(data) > self._max_nbytes:",
        new="if self._buffer.nbytes + len(data) > self._max_nbytes:",
        tests=_LIMIT_TESTS,
    ),
    Mutant(
        what="a client may take any time for a body if it does not pause",
        file=_BODY,
        old="                left_s -= time.monotonic() - start_s\n",
        new="",
        tests=("tests/builtin/test_body.py::test_a_body_that_comes_too_slowly",),
    ),
    Mutant(
        what="a body whose length was not announced has no limit",
        file=_BODY,
        old="            self._check_size(self._num_read)\n",
        new="",
        tests=("tests/builtin/test_body.py::test_limits_on_the_body",),
    ),
    Mutant(
        what="a request may take any time",
        file=_ENDPOINT,
        old="asyncio.timeout_at(own.deadline)",
        new="asyncio.timeout_at(None)",
        tests=_ENDPOINT_TESTS,
    ),
    Mutant(
        what="a stream has all of the time again after its first token",
        file=_ENDPOINT,
        old="deadline=own.deadline",
        new="deadline=own.deadline + 60",
        tests=_ENDPOINT_TESTS,
    ),
    Mutant(
        what="a stream begins before the engine has said anything",
        file=_ENDPOINT,
        old="        if not isinstance(output, PromptInfo):\n            break\n",
        new="        break\n",
        tests=_ENDPOINT_TESTS,
    ),
    Mutant(
        what="requests of all tenants are the nameless tenant's",
        file=_ENDPOINT,
        old="call = replace(call, generate=structs.replace(call.generate, share=share))",
        new="pass",
        tests=_NAMES_TESTS,
    ),
    Mutant(
        what="what a request that failed had come to is kept",
        file=_SCOPE,
        old="            scope.release()\n",
        new="",
        tests=_ENDPOINT_TESTS,
    ),
    Mutant(
        what="one tenant may read what was answered to another",
        file="builtin/http/lookups.py",
        old='name = tenant.name if tenant is not None else ""',
        new='name = ""',
        tests=("tests/builtin/test_apis.py::test_tenants_have_conversations_of_their_own",),
    ),
    Mutant(
        what="a stream that failed is counted as one that ended well",
        file="builtin/http/sse.py",
        old="            self._outcome = failure.code\n",
        new='            self._outcome = "ok"\n',
        tests=_ENDPOINT_TESTS,
    ),
    Mutant(
        what="every answer was ended by the model",
        file=_CHAT,
        old="_reason(answer.end, has_calls=bool(answer.calls))",
        new='"stop"',
        tests=_REASON_TESTS,
    ),
    Mutant(
        what="every stream was ended by the model",
        file=_CHAT,
        old="None if end is None else _reason(end, has_calls=index in self._callers)",
        new='None if end is None else "stop"',
        tests=_REASON_TESTS,
    ),
    Mutant(
        what="the prompt counts once for each answer",
        file="builtin/apis/openai.py",
        old="prompt = usages[0].prompt_tokens",
        new="prompt = sum(usage.prompt_tokens for usage in usages)",
        tests=_CHAT_TESTS,
    ),
    Mutant(
        what="the newer of the two limits on tokens is ignored",
        file=_CHAT,
        old="max_tokens=chat.max_completion_tokens or chat.max_tokens,",
        new="max_tokens=chat.max_tokens,",
        tests=("tests/builtin/test_chat.py::test_the_newer_limit_on_tokens_decides",),
    ),
    Mutant(
        what="an answer that was not to be stored is kept",
        file="builtin/apis/responses/api.py",
        old="is_kept=request.store is not False",
        new="is_kept=request.store is not None",
        tests=("tests/builtin/test_responses.py",),
    ),
    Mutant(
        what="a stop string is the end of a turn",
        file="builtin/apis/messages/events.py",
        old='ended if met is None else "stop_sequence"',
        new="ended",
        tests=("tests/builtin/test_messages.py",),
    ),
    Mutant(
        what="parameters that are not served are ignored",
        file="builtin/apis/names.py",
        old="if len(value) > _LONGEST_VALUE_NBYTES or not _is_one_of(value, use.values):",
        new="if False:",
        tests=("tests/builtin/test_parameters.py::test_what_is_not_served_is_refused_by_name",),
    ),
    Mutant(
        what="a tenant with too many requests hears that the server is busy",
        file="proxy/statuses.py",
        old="e.QuotaExceeded: 429,",
        new="e.QuotaExceeded: 503,",
        tests=("tests/test_errors.py",),
    ),
    Mutant(
        what="an image is keyed as if it were sent in full detail",
        file=_RECEIVE,
        old="return self._key_of(tag, part.modality, self._max_pixels(part), digest)",
        new="return self._key_of(tag, part.modality, 0, digest)",
        tests=("tests/builtin/test_chat.py::test_low_detail_bounds_the_image",),
    ),
    Mutant(
        what="a file is keyed as an image, whatever it is taken as",
        file=_RECEIVE,
        old="            modality=modality,\n            max_pixels=max_pixels,",
        new="            modality=Modality.IMAGE,\n            max_pixels=max_pixels,",
        tests=_RECEIVE_TESTS,
    ),
    Mutant(
        what="what was looked for stays pinned",
        file=_RECEIVE,
        old="            await self._store.release(request_id, pinned)\n",
        new="            pass\n",
        tests=_RECEIVE_TESTS,
    ),
    Mutant(
        what="what is not here is passed over",
        file=_RECEIVE,
        old="        if missing:\n",
        new="        if len(missing) == len(unsent):\n",
        tests=_NAMES_TESTS,
    ),
    Mutant(
        what="an item may have one byte less than its limit",
        file=_RECEIVE,
        old="if part.source.nbytes > most:",
        new="if part.source.nbytes >= most:",
        tests=_LIMIT_TESTS,
    ),
    Mutant(
        what="one item less is accepted than the limit says",
        file="items/stage.py",
        old="if number > most:",
        new="if number >= most:",
        tests=_ITEMS_TESTS,
    ),
    Mutant(
        what="a name is bound before its item has been used",
        file="items/stage.py",
        old=(
            "            for item, before, after in zip(distinct, found, settled, strict=True)\n"
            "        }\n"
            "        if items.new_names:  # only now: no name is bound to an invalid item\n"
            "            await self._names.bind(request_id, items.new_names)\n"
        ),
        new=(
            "            for item, before, after in zip(distinct, found, settled, strict=True)\n"
            "            if not items.new_names\n"
            "            or await self._names.bind(request_id, items.new_names) is None\n"
            "        }\n"
        ),
        tests=_NAMES_TESTS,
    ),
    Mutant(
        what="bytes that were received are held until the engine accepts",
        file="items/stage.py",
        old="            await self._store.release(request_id, sealed)\n",
        new="            pass\n",
        tests=_HOLDING_TESTS,
    ),
    Mutant(
        what="features are pinned while a request waits for room",
        file="items/stage.py",
        old="            await self._store.release(request_id, pinned)\n",
        new="            pass\n",
        tests=_HOLDING_TESTS,
    ),
    Mutant(
        what="every item of a body is read from its beginning",
        file="items/item.py",
        old="InputRange(raw.start, raw.nbytes)",
        new="InputRange(0, raw.nbytes)",
        tests=("tests/builtin/test_body.py::test_however_a_body_arrives",),
    ),
    Mutant(
        what="all videos have the plan of the first",
        file="items/plan.py",
        old="key = ContentKey(keys.frame(_PLAN_TAG, item.key))",
        new="key = ContentKey(keys.frame(_PLAN_TAG))",
        tests=_ITEMS_TESTS,
    ),
    Mutant(
        what="plans stay pinned",
        file="items/acquire.py",
        old="        await self._store.release(request_id, handles)\n",
        new="",
        tests=_ITEMS_TESTS,
    ),
    Mutant(
        what="a reservation that was not needed is kept",
        file="items/acquire.py",
        old="if not all(isinstance(outcome, Scheduled)",
        new="if not any(isinstance(outcome, Scheduled)",
        tests=_HOLDING_TESTS,
    ),
    Mutant(
        what="all tenants share their names",
        file="items/names.py",
        old="keys.name_key(tenant=tenant, name=uuid)",
        new='keys.name_key(tenant="", name=uuid)',
        tests=_NAMES_TESTS,
    ),
    Mutant(
        what="a name stands for a file, whatever it is taken as",
        file="items/names.py",
        old="if known != given:",
        new="if known.digest != given.digest:",
        tests=_NAMES_TESTS,
    ),
    Mutant(
        what="all tenants share their conversations",
        file=_CONVERSATIONS,
        old="key = keys.conversation_key(tenant=generate.tenant, response_id",
        new='key = keys.conversation_key(tenant="", response_id',
        tests=_CONVERSATIONS_TESTS,
    ),
    Mutant(
        what="instructions are kept with the conversation",
        file=_CONVERSATIONS,
        old="said = generate.messages[1:] if call.instructions else generate.messages",
        new="said = generate.messages",
        tests=_CONVERSATIONS_TESTS,
    ),
    Mutant(
        what="a conversation stays pinned",
        file=_CONVERSATIONS,
        old="            self._store.forget(generate.request_id)\n",
        new="            pass\n",
        tests=_CONVERSATIONS_TESTS,
    ),
    Mutant(
        what="items are let go when the first answer is accepted",
        file=_SCOPE,
        old="            if left == 0:\n",
        new="            if left >= 0:\n",
        tests=_CHAT_TESTS,
    ),
    Mutant(
        what="the last token that there is room for can't be asked for",
        file=_PROMPT_STAGE,
        old="if needed > room:",
        new="if needed >= room:",
        tests=_PIPELINE_TESTS,
    ),
    Mutant(
        what="what the engine can't do is not refused",
        file=_PROMPT_STAGE,
        old="            capabilities.check(info, request, has_pages=documents.has_images)\n",
        new="            pass\n",
        tests=_PIPELINE_TESTS,
    ),
    Mutant(
        what="the engine goes on after a stop string",
        file=_PIPELINE,
        old="if outputs and isinstance(outputs[-1], End):",
        new="if False:",
        tests=_PIPELINE_TESTS,
    ),
    Mutant(
        what="a prompt is counted once for each answer",
        file=_PIPELINE,
        old='TOKENS.labels("prompt").inc(len(engine_request.token_ids))\n        trace',
        new='TOKENS.labels("prompt").inc(len(engine_request.token_ids) * request.n)\n        trace',
        tests=_PIPELINE_TESTS,
    ),
    Mutant(
        what="a step counts as one token",
        file=_GENERATE,
        old="self.num_tokens += len(token_ids)",
        new="self.num_tokens += 1",
        tests=_GENERATE_TESTS,
    ),
    Mutant(
        what="the end of an answer is lost that looked like a stop string",
        file=_GENERATE,
        old="text = self.matcher.flush()",
        new='text = ""',
        tests=_GENERATE_TESTS,
    ),
    Mutant(
        what="a client's text may spell out the tokens of media",
        file="builtin/pipeline/prompt.py",
        old="            if index % 2:\n",
        new="            if index < 0:\n",
        tests=_PROMPT_TESTS,
    ),
    Mutant(
        what="the images of a prompt change places",
        file="builtin/pipeline/prompt.py",
        old="index, start = waiting[kind].popleft(), len(token_ids)",
        new="index, start = waiting[kind].pop(), len(token_ids)",
        tests=_PROMPT_TESTS,
    ),
    Mutant(
        what="a body that found no room is counted as a bad one",
        file="proxy/counting.py",
        old='trace.where == "body" and outcome in _NO_ROOM',
        new='trace.where == "body" and outcome not in _NO_ROOM',
        tests=_METRICS_TESTS,
    ),
    Mutant(
        what="the steps of an answer count as its tokens",
        file="proxy/counting.py",
        old="self._num_later += num_tokens",
        new="self._num_later += 1",
        tests=_METRICS_TESTS,
    ),
    Mutant(
        what="a replica gets the end of a body before the check",
        file="proxy/body_stream.py",
        old="        self._release_held()\n        self._held = chunk\n",
        new="        self._held = chunk\n        self._release_held()\n",
        tests=_STREAM_TESTS,
    ),
    Mutant(
        what="a body that has to be changed is complete as it came",
        file="proxy/inline_stage.py",
        old="return _tokens(text) == _tokens(written)",
        new="return True",
        tests=("tests/proxy/test_inlined_body.py",),
    ),
    Mutant(
        what="a body goes to the replica of another item",
        file="proxy/body_stream.py",
        old=" or placement != self._placement",
        new="",
        tests=_STREAM_TESTS,
    ),
    Mutant(
        what="a body that waits keeps its replica",
        file="proxy/body_stream.py",
        old="call_later(_GRACE_S, self.close)",
        new="call_later(60, self.close)",
        tests=_STREAM_TESTS,
    ),
)
